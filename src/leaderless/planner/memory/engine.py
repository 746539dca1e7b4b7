"""The memory of a native engine: keys and values, what it keeps between its passes, and what these need."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from leaderless.config import Recipe
from leaderless.planner.graph.judges import as_judged
from leaderless.planner.layout import most_prompts_of_rank
from leaderless.planner.memory.limits import (
    MOST_SPARE_SLOTS,
    PREFILL_TOKENS,
    SMALLEST_SLOT,
    CacheBound,
    bucket_of,
    buffers_bytes,
    pool_tokens,
)
from leaderless.planner.memory.model import FLOAT32_BYTES, ModelMemory
from leaderless.planner.workflow.products import agents_of

LOGIT_BYTES, TRUNCATED_LOGIT_BYTES = 12, 40
"""Bytes for each logit of a decoding step: itself, scaled, and its weight; for top-p or top-k, sorted as well."""

Parts = dict[str, int]


@dataclass(frozen=True)
class EngineMemory:
    """A native engine on one rank.

    Attributes:
        recipe: Settings.
        model: Model that generates.
        cache: Bound of its memory.
        is_cpu: Whether it computes on the CPU.
        most: Most sequences that are decoded at the same time; by default what the recipe allows.
        is_served: Whether clients ask it, who may ask for as many.
    """

    recipe: Recipe
    model: ModelMemory
    cache: CacheBound
    is_cpu: bool
    most: int | None = None
    is_served: bool = False

    @property
    def has_pages(self) -> bool:
        """Whether keys and values are in pages of a pool."""
        return self.cache.has_pages and not self.is_cpu and self.model.size.is_plain

    @property
    def stays(self) -> bool:
        """Whether an engine next to a trainer keeps its memory, weights of its own included, while it sleeps."""
        return self.model.is_beside and not self.model.engine.keeps_weights and self.cache.stays and self.has_pages

    def kept(self) -> Parts:
        """Memory that stays from pass to pass.

        A recorded pass has memory of its own for everything that it computes, in which those with fewer rows find room,
        too; passes that are not recorded, such as the first ones and those that read prompts, do not use it.
        """
        size, width = self.model.size, self.model.width
        if not self.has_pages:
            cache = {"kv cache": self._slots_bytes()}
            return cache | ({"states": self._state_bytes()} if size.num_recurrent_layers else {})
        per_row = self._values_per_token() * width + self._logit_bytes() * size.vocab_size
        buffers = buffers_bytes(self.bound, self.longest, size.num_heads, size.head_dim)
        return {
            "kv cache": self.pool_tokens() * size.kv_values_per_token * width,
            "recorded passes": self._num_rows * per_row,
            "buffers of passes": buffers,
        }

    def moments(self) -> Iterator[Parts]:
        """Memory that a pass needs on top: one that reads prompts, and one that decodes or draws first tokens."""
        size, width = self.model.size, self.model.width
        per_token, prompts = self._values_per_token() * width, self._num_prompts()
        state = FLOAT32_BYTES * size.recurrence.num_states  # of a layer
        read = min(PREFILL_TOKENS, prompts * self.followed.data.max_prompt_tokens)
        first_logits = prompts * FLOAT32_BYTES * size.vocab_size
        unpacked = {"unpacked weight": self.model.unpacked_bytes()} if self.model.block else {}
        yield unpacked | {
            "activations": max(read * per_token, read * self.model.vision.held_values() * width),
            "pixels": read * self.model.vision.pixel_bytes(width),
            "logits": first_logits,
        }
        yield unpacked | {
            "activations": self._num_rows * per_token,
            "logits": self._num_rows * self._logit_bytes() * size.vocab_size + first_logits,
            "attention over slots": 0 if self.is_cpu or self.has_pages else self._attention_over_slots(),
            # The new one, its product with the token, and the addend of the token.
            **({"states being updated": 3 * self._num_rows * state} if state else {}),
        }

    def fullest(self) -> Parts:
        """All parts at the fullest moment."""
        return self.kept() | max(self.moments(), key=lambda parts: sum(parts.values()))

    def pool_tokens(self) -> int:
        """Tokens of the pool of pages."""
        count, prompt = self.num_sequences, self.followed.data.max_prompt_tokens
        num_shared = self._num_prompts() * (self.followed.batch.responses_per_prompt > 1)
        return pool_tokens(count, self._own_tokens, num_shared, prompt, self.cache.most_tokens)

    def _slots_bytes(self) -> int:
        """Keys and values in slots, of which layers with windows and chunks keep the last tokens."""
        size, each = self.model.size, Counter[int | None]()
        for most, heads in zip(size.most_kept(), size.heads_of_layers(), strict=True):
            each[most] += heads.kv_values
        values = sum(count * self._slot_tokens(most) for most, count in each.items())
        return (values + size.index_values * self._slot_tokens(None)) * self.model.width

    def _slot_tokens(self, most: int | None) -> int:
        """Tokens of slots of 64, 128, 256, … tokens; while a slot grows, the smaller one is there, too.

        The slots of a size stay until none of them is used. So sequences of all lengths need slots of all sizes for
        each of them: conversations of an environment, and sequences that begin while others end. A layer keeps as many
        tokens as the slot that is large enough for the `most` that it needs.
        """
        recipe, count = self.followed, self.num_sequences
        siblings, prompts = recipe.batch.responses_per_prompt, self._num_prompts()
        *smaller, largest = _slots_up_to(self._own_tokens, most)
        is_asked = self.model.instance.is_judge or self.is_served
        is_mixed = self.is_played or (not is_asked and self._num_samples() > count)
        own = largest + sum(smaller if is_mixed else smaller[-1:])
        if not self.is_cpu:
            prompts, count = _num_slots(prompts), _num_slots(count)
        return prompts * _slots_up_to(recipe.data.max_prompt_tokens, most)[-1] * (siblings > 1) + count * own

    def _attention_over_slots(self) -> int:
        """Temporary memory for attention to all slots of one layer: a copy of its keys or values, and float32 scores.

        Scores are there three times: as they are, masked, and as weights.
        """
        size, count = self.model.size, self.num_sequences
        keys = size.num_kv_heads * size.head_dim * self.model.width
        return count * _slot(self._own_tokens) * (keys + 3 * FLOAT32_BYTES * size.num_heads)

    def _state_bytes(self) -> int:
        """States of sequences and of the prompts that they share; those of a layer twice, while they are read.

        When sequences come and go, the states of those that stay are copied next to each other, layer by layer.
        """
        size, width, count = self.model.size, self.model.width, self.num_sequences
        prompts = self._num_prompts() * (self.followed.batch.responses_per_prompt > 1)
        return (count + prompts) * size.state_bytes(width) + count * size.recurrence.state_bytes(width)

    @property
    def _own_tokens(self) -> int:
        """Most tokens that a sequence does not share.

        Where conversations of an environment begin with a shared prompt, they have it themselves after a turn.
        """
        is_alone = self.followed.batch.responses_per_prompt == 1
        return self.longest if is_alone or self.is_played else self.response

    @property
    def followed(self) -> Recipe:
        """The recipe as the engine follows it."""
        is_judge = self.model.instance.is_judge
        return as_judged(self.recipe, self.model.instance.role) if is_judge else self.recipe

    @property
    def is_played(self) -> bool:
        """Whether sequences are conversations."""
        return self.followed.has_episodes

    @property
    def longest(self) -> int:
        """Most tokens of a prompt and what follows it."""
        return self.followed.data.max_prompt_tokens + self.response

    @property
    def response(self) -> int:
        """Most tokens after a prompt."""
        environment = self.followed.environment
        return environment.max_episode_tokens if environment else self.model.sampling.max_response_tokens

    @property
    def bound(self) -> int:
        """Most sequences that may be decoded at the same time."""
        return self.model.sampling.max_sequences if self.most is None else self.most

    @property
    def num_sequences(self) -> int:
        """Sequences that the engine decodes or keeps at the same time."""
        if self.recipe.evaluation.every_steps or self.model.instance.is_judge or self.is_served:
            return self.bound  # held-out prompts, and questions, are not counted before they are there
        return min(self.bound, self._num_samples())

    def _num_samples(self) -> int:
        """Sequences that a rank generates for training; each agent of an episode has one."""
        prompts = iterations(self.recipe) * most_prompts_of_rank(self.recipe, self.model.instance.serving_layout.dp)
        environment = self.recipe.environment
        num_agents = len(agents_of(environment)) if environment is not None else 1
        return prompts * self.recipe.batch.responses_per_prompt * max(1, num_agents)

    def _num_prompts(self) -> int:
        return -(-self.num_sequences // self.followed.batch.responses_per_prompt)

    @property
    def _num_rows(self) -> int:
        """Rows of a decoding pass."""
        return bucket_of(self.num_sequences) if self.has_pages else self.num_sequences

    def _logit_bytes(self) -> int:
        return TRUNCATED_LOGIT_BYTES if self.model.sampling.is_truncated else LOGIT_BYTES

    def _values_per_token(self) -> int:
        """Numbers that a pass without a gradient holds of each token in the feed-forward part of a layer.

        Besides what `held_values` names, these are queries, keys and values, and the result of attention.
        """
        size = self.model.size
        return self.model.held_values(size) + 2 * (size.num_heads + size.num_kv_heads) * size.head_dim


def iterations(recipe: Recipe) -> int:
    """Iterations whose groups a rank generates at the same time."""
    return 1 + max((channel.capacity for channel in recipe.continuous_channels.values()), default=0)


def _slot(tokens: int) -> int:
    return max(SMALLEST_SLOT, 1 << (tokens - 1).bit_length())


def _slots_up_to(tokens: int, most: int | None) -> list[int]:
    """Tokens that a layer keeps in slots of each size, up to that for some tokens, if it needs `most` of them."""
    sizes = (SMALLEST_SLOT << power for power in range((_slot(tokens) // SMALLEST_SLOT).bit_length()))
    return [size if most is None else min(size, _slot(most)) for size in sizes]


def _num_slots(sequences: int) -> int:
    """Slots of a size on an accelerator, where some sequences come one by one."""
    if sequences > MOST_SPARE_SLOTS:
        return -(-sequences // MOST_SPARE_SLOTS) * MOST_SPARE_SLOTS
    return 1 << (sequences - 1).bit_length()
