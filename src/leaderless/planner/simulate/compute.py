"""Seconds of a model on each shard: decoding by memory bandwidth, passes by their floating-point operations."""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from leaderless.config import Recipe
from leaderless.config.judges import JudgeOptions
from leaderless.config.models import ModelConfig
from leaderless.planner import Layout
from leaderless.planner.graph.judges import questions_per_response
from leaderless.planner.memory.decoder_size import ModelSize
from leaderless.planner.memory.layer_parts import Heads
from leaderless.planner.memory.model import number_bytes
from leaderless.planner.simulate.network import GIGA, Float, Network
from leaderless.planner.simulate.rows import Int, SimulatedRows

TERA = 1e12
GRADIENT_BYTES = 4
"""Gradients are summed in float32."""
BACKWARD = 2
"""Cost of a backward pass, in forward passes."""


@dataclass(frozen=True)
class ModelCost:
    """Seconds that a model takes, sharded over the ranks of a layout; `shards` are [n], the shard of each row.

    Its engine `keeps_latents` or, as the native one, keys and values that are made from them.
    """

    size: ModelSize
    config: ModelConfig
    layout: Layout
    network: Network
    recipe: Recipe
    keeps_latents: bool = False

    def gather_seconds(self) -> float:
        """Gathering the sharded weights on every rank."""
        num_bytes = self.size.num_parameters * number_bytes(self.config)
        return self.network.gather_seconds(num_bytes, np.array(self.layout.ranks))

    def part_seconds(self) -> float:
        """Gathering the weights of this rank's part of the layers, from the ranks that divide it."""
        return self._gather_part(number_bytes(self.config))

    def _gather_part(self, width: int) -> float:
        """Gathering numbers with some bytes each for all weights of a part: of layers, and of divided experts."""
        size, layout, first = self.size, self.layout, self.layout.ranks[0]
        others = self.network.gather_seconds(size.num_gathered(layout) * width, np.array(layout.part(first)))
        experts = size.num_gathered_experts(layout) * width
        return others + self.network.gather_seconds(experts, np.array(layout.copies(first)))

    def sum_seconds(self, tokens: float) -> float:
        """Summing the results of all layers over the ranks that divide them, for some tokens in one direction.

        Attention and the feed-forward part each have a sum, which is a reduce-scatter and a gather.
        """
        ranks = np.array(self.layout.peers(self.layout.ranks[0], "tp"))
        num_bytes = tokens / self.layout.cp * self.size.hidden_size * number_bytes(self.config)
        return 2 * (self.size.num_layers / self.layout.pp) * 2 * self.network.gather_seconds(num_bytes, ranks)

    def exchange_seconds(self, tokens: float) -> float:
        """Sending tokens to the ranks that have their experts, and results back, in all layers and one direction.

        Loads are taken to be equal. A token is sent once for each expert, by one of the ranks that have it.
        """
        layout, size = self.layout, self.size
        num_bytes = tokens / layout.tp * size.num_chosen_experts * size.hidden_size * number_bytes(self.config)
        ranks = np.array(layout.experts(layout.ranks[0]))
        return 2 * (size.num_mixtures / layout.pp) * self.network.exchange_seconds(num_bytes, ranks)

    def forward_flops(self, rows: SimulatedRows, shards: Int) -> Float:
        """[n] operations of one pass: two per weight and token, and the square of the length for causal attention.

        A prompt is read once by a shard, with the first of its rows. A token goes through the experts that are chosen
        for it. Where it attends to a bounded number of keys, these count. A recurrence takes as much for each token.
        """
        size = self.size
        tokens, shared = (lengths.astype(np.float64) for lengths in (rows.tokens, rows.shared_tokens(shards)))
        attention = np.zeros_like(tokens)
        for most, queries in self._by_reach(lambda heads: heads.query_size).items():
            attention += 2.0 * queries * (_twice_pairs(tokens, most) - _twice_pairs(shared, most))
        if size.indexer is not None:  # it scores all keys, and has no results
            attention += size.num_indexers * size.indexer.num_heads * size.indexer.head_dim * (tokens**2 - shared**2)
        recurrence = size.num_recurrent_layers * size.recurrence.num_operations
        return (2.0 * size.num_active_parameters + recurrence) * (tokens - shared) + attention

    def scoring_seconds(self, rows: SimulatedRows, shards: Int) -> float:
        """One forward pass over all rows, until the slowest shard is done, while weights are gathered.

        The ranks of a shard divide the work. Those that divide layers wait for their sums, and stages of a pipeline
        until it is full; what ranks send to each other besides is not charged.
        """
        device = self.network.cluster.device
        rate = device.peak_tflops * TERA * device.scoring_utilization
        work = self._per_shard(shards, self.forward_flops(rows, shards)).max() / (rate * self.layout.ranks_per_shard)
        work = (work + self._sums(rows, shards)) * self._filling(rows, shards)
        num_gathers = 1 if self._keeps_weights else self._num_passes(rows, shards)
        return max(float(work), num_gathers * self.part_seconds())

    @property
    def _keeps_weights(self) -> bool:
        """Whether weights stay gathered. What `auto` means is known only where a run begins: it counts as nothing."""
        return self.recipe.training.keep_whole in {"weights", "all"}

    def training_seconds(self, rows: SimulatedRows, shards: Int) -> float:
        """All updates of a step. Shards wait for each other at each of them, while weights and gradients are sent."""
        device = self.network.cluster.device
        passes = 1 + BACKWARD + self.config.gradient_checkpointing
        rate = device.peak_tflops * TERA * device.training_utilization / passes * self.layout.ranks_per_shard
        pass_s, sum_s = (1 if self._keeps_weights else 2) * self.part_seconds(), self._gather_part(GRADIENT_BYTES)
        sums_once = self.recipe.training.keep_whole == "all"
        num_updates = self.recipe.batch.parts_per_step
        update_of_row = rows.groups * num_updates // (int(rows.groups[-1]) + 1)
        total = 0.0
        for update in range(num_updates):
            chosen = update_of_row == update
            part = SimulatedRows(
                rows.groups[chosen], rows.prompt_tokens[chosen], rows.response_tokens[chosen], rows.are_samples
            )
            work = self._per_shard(shards[chosen], self.forward_flops(part, shards[chosen])).max() / rate
            work += (2 + self.config.gradient_checkpointing) * self._sums(part, shards[chosen])
            work *= self._filling(part, shards[chosen])
            num_passes = self._num_passes(part, shards[chosen])
            total += max(float(work), num_passes * pass_s + (min(1, num_passes) if sums_once else num_passes) * sum_s)
        return total * self.recipe.batch.epochs_per_step

    def generation_seconds(self, rows: SimulatedRows, shards: Int) -> Float:
        """[dp] time of each shard: weights are gathered once, prompts read once per group, then token follows token.

        Each decoding step reads all weights, and the keys and values of the sequences that have not ended, at the same
        share of the bandwidth with every engine; of layers whose tokens attend to a bounded number of keys, only these.
        It reads and writes the states of recurrences. The ranks of an engine divide the work, and are not charged for
        what they send to each other.
        """
        device = self.network.cluster.device
        rate = device.peak_tflops * TERA * device.scoring_utilization
        bandwidth = device.memory_bandwidth_gb_per_s * device.decoding_utilization
        weights, width = self.size.num_parameters, number_bytes(self.config)
        size = self.size
        operations = 2 * size.num_active_parameters + size.num_recurrent_layers * size.recurrence.num_operations
        read = self._per_shard(shards, self._read_bytes(rows))
        steps = num_decoding_steps(rows.response_tokens, shards, self.layout.dp, self.recipe.rollout.max_sequences)
        memory_s = (steps * weights * width + read) / (bandwidth * GIGA)
        compute_s = self._per_shard(shards, operations * rows.response_tokens) / rate
        read_once = rows.prompt_tokens - rows.shared_tokens(shards)
        prompts_s = self._per_shard(shards, operations * read_once) / rate
        own: Float = (prompts_s + np.maximum(memory_s, compute_s)) / self.layout.ranks_per_shard + self.gather_seconds()
        return own

    def _by_reach(self, sizes: Callable[[Heads], int]) -> Counter[int | None]:
        """Sizes of the heads of all layers that attend, added up by the most keys to which their tokens attend."""
        found = Counter[int | None]()
        for most, heads in zip(self.size.most_keys(), self.size.heads_of_layers(), strict=True):
            found[most] += sizes(heads)
        return found

    def _read_bytes(self, rows: SimulatedRows) -> Int:
        """[n] bytes of keys, values and states that decoding reads, and of states that it writes."""
        size, width, prompts, responses = self.size, number_bytes(self.config), rows.prompt_tokens, rows.response_tokens
        latents = self.keeps_latents and size.num_latents
        found = responses * (2 * size.state_bytes(width))
        for most, values in self._by_reach(lambda heads: latents or heads.kv_values).items():
            found += _keys_read(prompts, responses, most) * (values * width)
        if size.indexer is not None:
            found += _keys_read(prompts, responses, None) * (size.num_indexers * size.indexer.head_dim * width)
        return found

    def judging_seconds(self, options: JudgeOptions, rows: SimulatedRows, shards: Int) -> Float:
        """[dp] time in which the engine of a judge answers what each shard asks about its rows.

        A question is as long as what it shows, without the words around it, and an answer as long as it may be. Nothing
        is known from before.
        """
        siblings = len(rows) // max(1, len(np.unique(rows.groups)))
        asked = np.repeat(np.arange(len(rows)), questions_per_response(options, siblings))
        shown = rows.prompt_tokens + rows.response_tokens * (2 if options.pairwise else 1)
        answers = np.full(len(asked), options.max_answer_tokens)
        questions = SimulatedRows(np.arange(len(asked)), shown[asked], answers, are_samples=False)
        return self.generation_seconds(questions, shards[asked])

    def _sums(self, rows: SimulatedRows, shards: Int) -> float:
        """Seconds in which ranks send each other values of the fullest shard's tokens, in one direction, pass by pass.

        Those that divide layers sum their results, and those that divide experts exchange tokens.
        """
        if self.layout.tp * self.layout.ep == 1:
            return 0.0
        tokens = self._per_shard(shards, rows.tokens - rows.shared_tokens(shards)).max()
        num_passes = max(1, self._num_passes(rows, shards))
        each = float(tokens) / num_passes
        exchanged = self.exchange_seconds(each / self.layout.cp) if self.layout.ep > 1 else 0.0
        return num_passes * (self.sum_seconds(each) * (self.layout.tp > 1) + exchanged)

    def _filling(self, rows: SimulatedRows, shards: Int) -> float:
        """Time of a pipeline's passes, as a multiple of its busy stages': it has to fill, and to become empty again."""
        return 1 + (self.layout.pp - 1) / max(1, self._num_passes(rows, shards))

    def _num_passes(self, rows: SimulatedRows, shards: Int) -> int:
        """Micro-batches of the fullest shard, which all shards run."""
        tokens = self._per_shard(shards, rows.tokens - rows.shared_tokens(shards))
        longest = self.recipe.longest_text()
        bound = self.recipe.batch.first_micro_batch_tokens(-(-longest // self.layout.cp))
        return int(np.ceil(tokens.max() / (bound * self.layout.cp)))

    def _per_shard(self, shards: Int, values: Int | Float) -> Float:
        return np.bincount(shards, weights=values, minlength=self.layout.dp).astype(np.float64)


def _twice_pairs(tokens: Float, most: int | None) -> Float:
    """[n] pairs of a token and a key before it, twice: the square of the length, if all keys are seen."""
    seen = tokens if most is None else np.minimum(tokens, most)
    pairs: Float = seen * (2 * tokens - seen)
    return pairs


def _keys_read(prompts: Int, responses: Int, most: int | None) -> Int:
    """[n] keys that the tokens of responses see, each of which sees those before it and itself."""
    found: Int = responses * prompts + responses * (responses + 1) // 2
    if most is None:
        return found
    # Those that it does not see: one more for each token beyond the first `most` of prompt and response.
    beyond = np.clip(prompts + responses - most, 0, None)
    in_prompt = np.clip(prompts - most, 0, None)
    found -= (beyond * (beyond + 1) - in_prompt * (in_prompt + 1)) // 2
    return found


def num_decoding_steps(lengths: Int, shards: Int, num_shards: int, max_sequences: int) -> Int:
    """[num_shards] decoding steps until all responses have ended; a free place takes the next response."""
    steps = np.zeros(num_shards, dtype=np.int64)
    np.maximum.at(steps, shards, lengths)
    crowded = np.flatnonzero(np.bincount(shards, minlength=num_shards) > max_sequences)
    if len(crowded):
        by_shard = np.argsort(shards, kind="stable")
        begins = np.searchsorted(shards[by_shard], crowded)
        ends = np.searchsorted(shards[by_shard], crowded, side="right")
        for shard, begin, end in zip(crowded, begins, ends, strict=True):
            steps[shard] = _last_end(lengths[by_shard[begin:end]].tolist(), max_sequences)
    return steps


def _last_end(lengths: Sequence[int], places: int) -> int:
    """End of the last job, where jobs begin in order and as soon as one of the places is free."""
    free = list(lengths[:places])
    heapq.heapify(free)
    for length in lengths[places:]:
        heapq.heapreplace(free, free[0] + length)
    return max(free)


def tokenizing_seconds(rows: SimulatedRows, tokens_per_s: float, shards: Int, num_shards: int) -> Float:
    """[num_shards] seconds of reading the prompts of each shard."""
    return np.bincount(shards, weights=rows.tokens, minlength=num_shards).astype(np.float64) / tokens_per_s
