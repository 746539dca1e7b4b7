"""The stage that keeps some samples for people to look at, and what is kept of a sample."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import cast

import torch

from leaderless.base.image_files import thumbnail
from leaderless.base.values import Json
from leaderless.data.batch import Batch
from leaderless.data.prompts.encode import Tokenizer
from leaderless.data.prompts.images import unpack_images
from leaderless.data.row_hashes import HashedRows
from leaderless.observability.proof_log import LINES, RECORDED, RowSum, text_hash
from leaderless.planner.workflow.columns import IMAGES, LATER_IMAGES
from leaderless.rewards.pool import Graded
from leaderless.rewards.protocol import RewardInput
from leaderless.stages.context import StageContext
from leaderless.stages.reward import inputs_of

MANY = 3
"""Most times that a token which was not sampled is shown in a row."""
MAX_RECORDED_TOKENS = 8192
"""Number of tokens of a step, from its first responses, that are recorded one by one."""
Record = Callable[[Sequence[Mapping[str, Json]]], object]
"""Function that writes samples for people to look at."""
Descriptions = Sequence[dict[str, Json]]
"""Records of some samples."""
LOG_PROBS = {"rollout": "rollout_log_probs", "old": "old_log_probs"}
"""Recorded log-probs: short name and column."""


def record(batch: Batch, context: StageContext) -> Batch:
    """On the node's first rank, write all samples of its first `run.recorded_prompts` prompts into the run's folder."""
    return record_as(batch, context, _describe)


def record_as(batch: Batch, context: StageContext, describe: Callable[[Batch, StageContext], Descriptions]) -> Batch:
    """Write samples as `record` does, with what a function says of each of them."""
    if context.process_group.rank == context.node.layout.ranks[0] and len(batch):
        kept = torch.unique(batch.group_ids)[: context.recipe.run.recorded_prompts]
        chosen = batch.select((batch.group_ids[:, None] == kept).any(dim=1))
        places, said = _places(chosen, context), describe(chosen, context)
        samples = [place | one for place, one in zip(places, said, strict=True)]
        lines = context.run_directory.write_samples(context.step, context.process_group.rank, samples)
        known = context.recorded.get(LINES, RowSum())
        context.recorded[LINES] = known + RowSum.of([text_hash(line) for line in lines])
    return batch


def recorded_columns(names: Iterable[str]) -> set[str]:
    """The columns that are recorded byte by byte: all but images, which may be large."""
    return {*names} - {IMAGES, LATER_IMAGES}


def describe_sample(sample: RewardInput, graded: Graded, tokens: Json) -> dict[str, Json]:
    """Record of any sample; its tokens come from `TokenRecorder`."""
    return {
        "prompt": sample.prompt,
        "response": sample.response,
        "answer": sample.answer,
        "reward": graded.value,
        "is_valid": graded.is_valid,
        "details": dict(graded.details),
        "is_truncated": sample.is_truncated,
        "tokens": tokens,
    }


@dataclass
class TokenRecorder:
    """Describes tokens one by one, as long as there is room.

    Attributes:
        tokenizer: Tokenizer of the policy.
        room: Number of tokens that may still be described.
    """

    tokenizer: Tokenizer
    room: int = MAX_RECORDED_TOKENS
    _texts: dict[int, str] = field(default_factory=dict)

    def describe(
        self, tokens: Sequence[int], log_probs: Mapping[str, Sequence[float]], is_sampled: Sequence[bool] | None = None
    ) -> Json:
        """The first tokens of a response: their texts and, by name, log-probs; `mask` where some were not sampled.

        The tokens are all that follow the prompt, the log-probs belong to sampled ones; `is_sampled` is a mask over
        the tokens, None where all were sampled. A token that was not sampled and is there more than three times in
        a row, as for an image, is shown once. Returns lists of equal length and the `total` number of tokens, or
        None when there is no room left.
        """
        mask = [True] * len(tokens) if is_sampled is None else is_sampled
        shown = list(_without_runs(tokens, mask))
        count = min(len(shown), self.room)
        if not count:
            return None
        self.room -= count
        tokens, mask, times = zip(*shown[:count], strict=True)
        for token in {*tokens} - self._texts.keys():
            self._texts[token] = self.tokenizer.decode([token])
        texts: list[Json] = [
            self._texts[token] + f" \u00d7 {number}" * (number > 1) for token, number in zip(tokens, times, strict=True)
        ]
        view: dict[str, Json] = {"total": len(shown), "text": texts}
        for name, values in log_probs.items():
            rest = iter(values)
            view[name] = [round(next(rest), 3) if sampled else None for sampled in mask]
        if not all(mask):
            view["mask"] = [int(sampled) for sampled in mask]
        return view


def _without_runs(tokens: Sequence[int], is_sampled: Sequence[bool]) -> Iterator[tuple[int, bool, int]]:
    """Tokens, whether they were sampled, and how many of them one stands for."""
    for (token, sampled), run in groupby(zip(tokens, is_sampled, strict=True)):
        size = len(list(run))
        if sampled or size <= MANY:
            yield from [(token, sampled, 1)] * size
        else:
            yield token, sampled, size


def _describe(batch: Batch, context: StageContext) -> Descriptions:
    tokens, inputs = batch.jagged("tokens").to_lists(), inputs_of(batch, context)
    masks = batch.jagged("response_mask").rows() if "response_mask" in batch else None
    log_probs = {name: batch.jagged(column).rows() for name, column in LOG_PROBS.items() if column in batch}
    recorder, graded, room = TokenRecorder(context.tokenizer), graded_in(batch), MAX_RECORDED_TOKENS
    rows, exact = HashedRows(batch, recorded_columns(context.node.reads)), list[int]()
    samples: list[dict[str, Json]] = []
    for index, sample in enumerate(inputs):
        known = {name: values[index].tolist() for name, values in log_probs.items()}
        mask = None if masks is None else masks[index].tolist()
        samples.append(describe_sample(sample, graded[index], recorder.describe(tokens[index], known, mask)))
        room -= len(tokens[index])
        if room >= 0:
            samples[-1]["row"] = rows.row(index).to_json()
            exact.append(rows.hashes[index])
    context.recorded[RECORDED] = context.recorded.get(RECORDED, RowSum()) + RowSum.of(exact)
    return samples


def graded_in(batch: Batch) -> list[Graded]:
    """Reward of each sample of a batch."""
    rewards, is_valid = batch.dense("rewards").tolist(), batch.dense("reward_valid").tolist()
    details = cast("Sequence[Mapping[str, Json]]", batch.objects("reward_details"))
    return [Graded(*one) for one in zip(rewards, is_valid, details, strict=True)]


def _places(batch: Batch, context: StageContext) -> Descriptions:
    """Where each sample is in the run."""
    pictures = thumbnails(batch)
    agents = batch.dense("agent").tolist() if "agent" in batch else None
    places: list[dict[str, Json]] = []
    for index in range(len(batch)):
        place: dict[str, Json] = {
            "step": context.step,
            "group_id": int(batch.group_ids[index]),
            "episode_id": int(batch.episode_ids[index]),
            "sample_id": int(batch.ids[index]),
        }
        if "advantages" in batch:
            advantages = batch.jagged("advantages").rows()[index]
            place["advantage"] = float(advantages[0]) if len(advantages) else 0.0
        if shown := pictures.pop(int(batch.group_ids[index]), None):
            place["images"] = shown
        if "joint_ids" in batch:
            place["joint_id"] = int(batch.dense("joint_ids")[index])
        if len(context.agents) > 1:
            place["role"] = context.node.node.agents[0] if agents is None else context.agents[agents[index]]
        places.append(place)
    return places


def thumbnails(batch: Batch) -> dict[int, Json]:
    """The images of each prompt that has some, small and as data URLs, by the id of its group."""
    prompts = batch if batch.prompts is None else batch.prompts
    if IMAGES not in prompts:
        return {}
    packed = zip(prompts.ids.tolist(), prompts.jagged(IMAGES).rows(), strict=True)
    shown = ((number, [thumbnail(one.data) for one in unpack_images(row.numpy().tobytes())]) for number, row in packed)
    return {number: list(urls) for number, urls in shown if urls}
