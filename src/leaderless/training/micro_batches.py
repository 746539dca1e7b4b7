"""A rank's samples in parts that fit into memory. How they are cut changes no number."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from operator import attrgetter

import torch
from torch import Tensor

from leaderless.data.batch import Batch, Jagged, ragged_index
from leaderless.data.prompts.images import PromptImage, unpack_images
from leaderless.distributed.transport import ProcessGroup
from leaderless.models.attention.shared_prompts import Family
from leaderless.models.divergence_scores import TeacherWords
from leaderless.models.lora.dropout import mixed
from leaderless.models.routers import UNKNOWN
from leaderless.models.sampling_support import Support
from leaderless.planner.workflow.columns import (
    EXPERTS,
    IMAGES,
    LATER_IMAGES,
    SUPPORT,
    SUPPORT_SIZES,
    TEACHER_LOG_PROBS,
    TEACHER_SIZES,
    TEACHER_TOKENS,
)
from leaderless.training.prefix_trees import Tokens, family_of, tree_order

SIDES = "sides"
"""Column of samples that are only used together with the other ones of their prompt, of which they are one side."""
TEMPERATURES = "temperatures"
"""Column of the temperatures at which sampled tokens are scored; without it they are 1."""

EMPTY_TOKENS = 16
"""Tokens of a pass without samples: a compiler makes other kernels for a single one, in the middle of an update."""


@dataclass(frozen=True)
class Origins:
    """Where the tokens of a pass are from.

    Attributes:
        ids: [m] int64, samples in the order in which they stand in the pass.
        siblings: [f] int64, how many of them there are of each prompt.
        before: [f] int64, length of each prompt.
        after: [m] int64, number of tokens of the pass that follow the prompt in each sample, and are in none before it.
    """

    ids: Tensor
    siblings: Tensor
    before: Tensor
    after: Tensor

    def at(self, place: int) -> tuple[str, range]:
        """Prompt, or continuation in a sample, that a token of the pass belongs to, and the places of all of it."""
        ids, after = iter(self.ids.tolist()), iter(self.after.tolist())
        begin, found = 0, ("no sample", range(place, place))
        for siblings, before in zip(self.siblings.tolist(), self.before.tolist(), strict=True):
            own = [next(ids) for _ in range(siblings)]
            spans = [(before, f"the prompt of sample {own[0]}")]
            spans += [(next(after), f"what follows the prompt in sample {one}") for one in own]
            for count, name in spans:
                if place < begin + count:
                    return name, range(begin, begin + count)
                begin += count
        return found


@dataclass(frozen=True)
class MicroBatch:
    """Samples packed one after the other, for one forward pass; siblings share the tokens that they begin with.

    A sample ends before its last sampled token, from which nothing is predicted.

    Attributes:
        tokens: [T] int64, each prompt followed by its continuations.
        positions: [T] int64, place of each token in its sample.
        families: Lengths of each prompt and its continuations.
        select: [R] int64, index of the token before each sampled token, at which the latter is predicted. The last
            token that samples share predicts the next one of each.
        targets: [R] int64, the sampled tokens.
        response_index: [R] int64, their places in the batch's `response_tokens` columns.
        response_lengths: [m] int64, number of sampled tokens of each sample.
        temperature: Temperature at which all tokens were sampled or, if they differ, [R] float32.
        images: Images of the prompts and of what follows them, in the order of their tokens.
        experts: [T, layers * k] uint8, experts of each token, from the first of its samples that knows them; `UNKNOWN`
            where routers choose, and None if they always do.
        support: Words that the sampled tokens could be drawn as; None if they could all be any word.
        origins: Samples and prompts that the tokens are from; None without samples.
        teacher: Likeliest words of a teacher at each sampled token; None without such columns.
    """

    tokens: Tensor
    positions: Tensor
    families: list[Family]
    select: Tensor
    targets: Tensor
    response_index: Tensor
    response_lengths: Tensor
    temperature: float | Tensor = 1.0
    images: tuple[PromptImage, ...] = ()
    experts: Tensor | None = None
    support: Support | None = None
    origins: Origins | None = None
    teacher: TeacherWords | None = None

    def origin_of(self, place: int) -> tuple[str, range]:
        """Sample or prompt that a token belongs to, and the places of all of its tokens; see `Origins.at`."""
        return ("no sample", range(len(self.tokens))) if self.origins is None else self.origins.at(place)

    @classmethod
    def empty(cls) -> MicroBatch:
        """Some tokens and no target, with which a rank without samples takes part in a pass."""
        none, tokens = torch.empty(0, dtype=torch.int64), torch.zeros(EMPTY_TOKENS, dtype=torch.int64)
        families = [Family(EMPTY_TOKENS, ())]
        return cls(tokens, torch.arange(EMPTY_TOKENS), families, none, none, none, torch.zeros(1, dtype=torch.int64))


def longest_sample(batch: Batch) -> int:
    """Number of tokens that a pass takes for the longest sample, prompt and continuation; 0 without any.

    Of samples that are only used together, it is the length of all of them.
    """
    samples = _Samples.of(batch)
    if samples.are_together:
        return max((family.num_tokens for family in _families(samples, 0)), default=0)
    lengths = samples.prompts.lengths[samples.prompt_of_row] + samples.inputs
    return int(lengths.max()) if len(lengths) else 0


def make_micro_batches(
    batch: Batch,
    max_tokens: int,
    process_group: ProcessGroup,
    enough_tokens: int | None = None,
    *,
    has_copies: bool = False,
) -> list[MicroBatch]:
    """Cut a batch into micro-batches of bounded size, the same number on every rank.

    Siblings come together as far as they fit, so that their prompt is computed once, and what else several of them
    begin with. A rank with fewer micro-batches than others gets empty ones, so that all ranks of the process group take
    part in the same number of passes.

    A micro-batch has at most `max_tokens`, or a single sample that is longer; samples with the column `sides` are never
    separated from the others of their prompt. Samples of several prompts are put together only up to `enough_tokens`.
    Where attention copies what samples share behind their prompt, each copy counts, so that a pass takes no more memory
    than without sharing.
    """
    samples = _Samples.of(batch)
    packs = _fill(_families(samples, max_tokens, has_copies=has_copies), min(max_tokens, enough_tokens or max_tokens))
    count = int(process_group.max(torch.tensor([len(packs)]), "the number of micro-batches"))
    return [_pack(samples, families) for families in packs] + [MicroBatch.empty()] * (count - len(packs))


def response_lengths(mask: Jagged) -> Tensor:
    """[n] int64: number of tokens of each sample that the policy sampled, from the column `response_mask`."""
    total = torch.cat([torch.zeros(1, dtype=torch.int64), mask.values.long().cumsum(0)])
    return total[mask.offsets[1:]] - total[mask.offsets[:-1]]


@dataclass(frozen=True)
class _Samples:
    """The columns of a batch that passes need, with [n] int64 numbers for each sample."""

    ids: Tensor
    prompts: Jagged  # each once
    prompt_of_row: Tensor
    continuations: Jagged
    mask: Jagged
    inputs: Tensor  # tokens of the continuation before the last sampled one
    counts: Tensor  # sampled tokens
    temperatures: Tensor | None  # [total] float32, of sampled tokens
    images: Jagged | None  # bytes of each prompt
    later_images: Jagged | None  # bytes of what follows the prompt in each sample
    experts: Jagged | None  # of prompts and inputs, one token after the other
    support: Support | None  # of sampled tokens
    teacher: TeacherWords | None  # of sampled tokens
    are_together: bool  # whether those of a prompt are only used together

    @classmethod
    def of(cls, batch: Batch) -> _Samples:
        """Take the columns of a batch; rows with prompts of their own share none."""
        prompts, prompt_of_row = batch.prompts, batch.prompt_index
        if prompts is None or prompt_of_row is None or "prompt_tokens" in batch.columns:
            prompts, prompt_of_row = batch, torch.arange(len(batch))
        if not bool(prompts.jagged("prompt_tokens").lengths.all()):
            return cls.of(_with_prompts(batch))
        mask = batch.jagged("response_mask")
        step = ragged_index(torch.zeros_like(mask.lengths), mask.lengths)
        row = torch.repeat_interleave(torch.arange(len(mask)), mask.lengths)
        inputs = torch.zeros_like(mask.lengths).scatter_reduce_(0, row, step * mask.values, reduce="amax")
        continuations, counts = batch.jagged("tokens"), response_lengths(mask)
        temperatures = batch.jagged(TEMPERATURES).values if TEMPERATURES in batch else None
        images = prompts.jagged(IMAGES) if IMAGES in prompts else None
        later_images = batch.jagged(LATER_IMAGES) if LATER_IMAGES in batch else None
        experts = batch.jagged(EXPERTS) if EXPERTS in batch else None
        own = prompts.jagged("prompt_tokens")
        support = None
        if SUPPORT in batch:
            support = Support(batch.jagged(SUPPORT).values, batch.jagged(SUPPORT_SIZES).values.long())
        teacher = None
        if TEACHER_TOKENS in batch:
            names = TEACHER_TOKENS, TEACHER_LOG_PROBS, TEACHER_SIZES
            words, scores, sizes = (batch.jagged(name).values for name in names)
            teacher = TeacherWords(words, scores, sizes.long())
        optional = (temperatures, images, later_images, experts, support, teacher)
        return cls(batch.ids, own, prompt_of_row, continuations, mask, inputs, counts, *optional, SIDES in batch)

    def texts(self, rows: Sequence[int]) -> list[Tokens]:
        """The tokens of rows behind their prompts that are in passes, those of images as hashes of these."""
        which = torch.tensor(rows)
        begins, counts = self.continuations.offsets[which].tolist(), self.inputs[which].tolist()
        values = self.continuations.values.numpy()
        found = [values[begin : begin + count] for begin, count in zip(begins, counts, strict=True)]
        if self.later_images is None:
            return found
        columns = self.later_images.select(which).rows(), self.prompts.lengths[self.prompt_of_row[which]].tolist()
        for place, (packed, length) in enumerate(zip(*columns, strict=True)):
            found[place] = text = found[place].copy()
            for image in unpack_images(packed.numpy().tobytes()):
                text[image.place - length :][: image.num_tokens] = image.digest
        return found


def _with_prompts(batch: Batch) -> Batch:
    """The same samples with prompts of their own, where some have none: they take the first token of what follows.

    Conversations with nothing in common, not even the first token, have an empty prompt. Nobody samples the first
    token of a sequence.
    """
    columns = (batch.jagged(name).to_lists() for name in ("prompt_tokens", "tokens", "response_mask"))
    moved = [
        (prompt, tokens, mask) if prompt else (tokens[:1] or [0], tokens[1:], mask[1:])
        for prompt, tokens, mask in zip(*columns, strict=True)
    ]
    prompts, tokens, masks = ([row[place] for row in moved] for place in range(3))
    own = {
        "prompt_tokens": Jagged.from_lists(prompts, torch.int64, "prompt_tokens"),
        "tokens": Jagged.from_lists(tokens, torch.int64, "tokens"),
        "response_mask": Jagged.from_lists(masks, torch.bool, "tokens"),
    }
    if IMAGES in batch:
        own[IMAGES] = batch.jagged(IMAGES)
    return Batch(batch.ids, {**batch.columns, **own})


@dataclass
class _Siblings:
    """Rows of one prompt in the order of a tree.

    Attributes:
        rows: The rows.
        shared: Tokens behind the prompt that each has in common with the one before it.
        num_tokens: Tokens that they take together.
        common: Tokens behind the prompt that the next row has in common with them.
    """

    rows: list[int]
    shared: list[int]
    num_tokens: int
    common: int = 0

    def add(self, row: int, inputs: int) -> None:
        """Take one more row, of so many tokens behind the prompt."""
        self.rows.append(row)
        self.shared.append(self.common)
        self.common = inputs


def _families(samples: _Samples, max_tokens: int, *, has_copies: bool = False) -> list[_Siblings]:
    """Siblings together, the longest first; in several parts where they do not fit into one micro-batch."""
    order = torch.argsort(samples.prompt_of_row, stable=True)
    prompts, counts = torch.unique_consecutive(samples.prompt_of_row[order], return_counts=True)
    lengths, families, is_once = samples.inputs.tolist(), list[_Siblings](), not has_copies
    for before, rows in zip(
        samples.prompts.lengths[prompts].tolist(), torch.split(order, counts.tolist()), strict=True
    ):
        own, numbers = list[_Siblings](), rows.tolist()
        for place, shared in zip(*tree_order(samples.texts(numbers)), strict=True):
            row, inputs = numbers[place], lengths[numbers[place]]
            for one in own:
                one.common = min(one.common, shared)
            all_fit, room = samples.are_together, max_tokens - inputs
            fitting = [one for one in own if all_fit or one.num_tokens - is_once * one.common <= room]
            best = max(fitting, key=attrgetter("common"), default=None)
            if best is None:
                own.append(best := _Siblings([], [], before))
            best.num_tokens += inputs - is_once * best.common
            best.add(row, inputs)
        families += own
    return families


def _fill(families: Sequence[_Siblings], enough_tokens: int) -> list[list[_Siblings]]:
    """Contents of each micro-batch: the largest first, each where there is still room."""
    packs: list[list[_Siblings]] = []
    filled: list[int] = []
    for family in sorted(families, key=lambda family: -family.num_tokens):
        place = next((i for i, tokens in enumerate(filled) if tokens + family.num_tokens <= enough_tokens), None)
        if place is None:
            packs.append([family])
            filled.append(family.num_tokens)
        else:
            packs[place].append(family)
            filled[place] += family.num_tokens
    return packs


def _pack(samples: _Samples, families: Sequence[_Siblings]) -> MicroBatch:
    """One micro-batch of some rows; rows of a prompt stand together, and begin with what they share."""
    rows = torch.tensor([row for family in families for row in family.rows])
    shared = torch.tensor([count for family in families for count in family.shared])
    sizes = torch.tensor([len(family.rows) for family in families])
    firsts = sizes.cumsum(0) - sizes
    family_of_row = torch.repeat_interleave(torch.arange(len(families)), sizes)
    which = samples.prompt_of_row[rows[firsts]]
    prompts = samples.prompts.select(which)
    continuations, sampled = samples.continuations.select(rows), samples.mask.select(rows).values
    before, after = prompts.lengths, samples.inputs[rows]
    new = after - shared
    # What a row adds starts after all prompts so far, including its own, and all that rows have added so far.
    starts = before.cumsum(0)[family_of_row] + new.cumsum(0) - new
    prompt_index = ragged_index(starts[firsts] - before, before)
    index = _places(starts - shared, after, shared)
    tokens = torch.empty(len(prompt_index) + int(new.sum()), dtype=torch.int64)
    tokens[prompt_index] = prompts.values
    tokens[index] = continuations.values[ragged_index(continuations.offsets[:-1], after)]
    positions = torch.empty_like(tokens)
    positions[prompt_index] = ragged_index(torch.zeros_like(before), before)
    positions[index] = ragged_index(before[family_of_row], after)
    step = ragged_index(torch.zeros_like(rows), continuations.lengths)[sampled]
    row = torch.repeat_interleave(torch.arange(len(rows)), continuations.lengths)[sampled]
    last_of_prompt = (starts[firsts] - 1)[family_of_row[row]]
    index_before = ((after.cumsum(0) - after)[row] + step - 1).clamp(min=0)
    counts = samples.counts[rows]
    response_index = ragged_index((samples.counts.cumsum(0) - samples.counts)[rows], counts)
    experts = None
    if samples.experts is not None:
        own, places = samples.experts.select(rows), (prompt_index, index)
        experts = _packed_experts(own, family_of_row, (before, after), places)
    return MicroBatch(
        tokens=tokens,
        positions=positions,
        families=[
            family_of(prompt, lengths.tolist(), one.shared)
            for prompt, lengths, one in zip(before.tolist(), torch.split(after, sizes.tolist()), families, strict=True)
        ],
        select=torch.where(step == 0, last_of_prompt, torch.cat([index, step.new_zeros(1)])[index_before]),
        targets=continuations.values[sampled],
        response_index=response_index,
        response_lengths=counts,
        temperature=1.0 if samples.temperatures is None else _common(samples.temperatures[response_index]),
        images=_images(
            samples, (which, starts[firsts] - before), (rows, before[family_of_row]), torch.split(index, after.tolist())
        ),
        experts=experts,
        support=None if samples.support is None else samples.support[response_index],
        origins=Origins(samples.ids[rows], sizes, before, new),
        teacher=None if samples.teacher is None else samples.teacher[response_index],
    )


def _places(begins: Tensor, lengths: Tensor, shared: Tensor) -> Tensor:
    """Places in the pass of the tokens of rows behind their prompts: shared ones are where the row before has them.

    Args:
        begins: [m] int64, place of the first token of each row, if it shared none.
        lengths: [m] int64, number of tokens of each row.
        shared: [m] int64, number of tokens that each shares with the one before it.
    """
    index = ragged_index(begins, lengths)
    parts = torch.split(index, lengths.tolist())
    for place in shared.nonzero().flatten().tolist():
        count = int(shared[place])
        parts[place][:count] = parts[place - 1][:count]
    return index


def _images(
    samples: _Samples, prompts: tuple[Tensor, Tensor], rows: tuple[Tensor, Tensor], places: Sequence[Tensor]
) -> tuple[PromptImage, ...]:
    """The images of a pass, in the order of their tokens.

    Args:
        samples: The samples.
        prompts: [n] int64, prompts of the pass, and the place of the first token of each.
        rows: [m] int64, rows of the pass, and the length of the prompt of each.
        places: Places of the tokens of each row behind its prompt.
    """
    found = dict[int, PromptImage]()
    if samples.images is not None:
        for packed, begin in zip(samples.images.select(prompts[0]).rows(), prompts[1].tolist(), strict=True):
            found |= {image.place + begin: image.moved(begin) for image in unpack_images(packed.numpy().tobytes())}
    if samples.later_images is not None:
        for packed, length, own in zip(
            samples.later_images.select(rows[0]).rows(), rows[1].tolist(), places, strict=True
        ):
            for image in unpack_images(packed.numpy().tobytes()):
                if image.place - length < len(own):
                    place = int(own[image.place - length])
                    found[place] = image.moved(place - image.place)
    return tuple(found[place] for place in sorted(found))


def _packed_experts(
    experts: Jagged, family_of_row: Tensor, lengths: tuple[Tensor, Tensor], places: tuple[Tensor, Tensor]
) -> Tensor | None:
    """The experts of the tokens of a pass; None where none are recorded.

    Args:
        experts: Experts of each sample, of its prompt and its inputs; none where they were not recorded.
        family_of_row: Prompt of each sample.
        lengths: Lengths of each prompt, and of the inputs of each sample.
        places: Indices of the tokens of prompts in the pass, and of the tokens of inputs.
    """
    (before, after) = lengths
    num_tokens, is_known = before[family_of_row] + after, experts.lengths > 0
    if not bool(is_known.any()):
        return None
    width = int(experts.lengths[is_known][0] // num_tokens[is_known][0])
    if not bool((experts.lengths == width * num_tokens)[is_known].all()):
        raise RuntimeError(
            f"samples of {num_tokens.tolist()} tokens have {experts.lengths.tolist()} recorded experts: each token "
            "must have the same number of them"
        )
    packed = experts.values.new_full((1 + int(torch.cat(places).max()), width), UNKNOWN)
    parts = zip(experts.rows(), is_known.tolist(), family_of_row.tolist(), strict=True)
    inputs, prompts = torch.split(places[1], after.tolist()), torch.split(places[0], before.tolist())
    for row, (values, known, family) in enumerate(parts):
        if known:
            own = torch.cat([prompts[family], inputs[row]])
            packed[own] = torch.where(packed[own] == UNKNOWN, values.view(-1, width), packed[own])
    return packed


def _common(temperatures: Tensor) -> float | Tensor:
    """The temperature of all tokens, if they have the same one; else the temperature of each, [R] float32."""
    if not len(temperatures):
        return 1.0
    if bool((temperatures != temperatures[0]).any()):
        return temperatures
    return float(str(temperatures[0].numpy()))  # as it was set: 0.7, of which float32 has only the closest number


def token_keys(micro_batch: MicroBatch, seed: int, update: int) -> Tensor:
    """A key for each token of a micro-batch, [T] int64, which depends on no other sample.

    It follows from the token, from those before it in its sample and from the position of each. So tokens that samples
    share have the same keys in all passes over them, if these do not fit into one.

    Args:
        micro_batch: The micro-batch.
        seed: Seed of the run.
        update: Number of optimizer steps so far; keys differ from step to step.
    """
    contents = mixed(micro_batch.tokens ^ mixed(micro_batch.positions))
    total, lengths, parents = contents.cumsum(0), list[int](), list[int]()
    for family in micro_batch.families:
        first = len(lengths) + 1
        lengths += [family.prompt, *family.continuations]
        parents += [-1, *(parent + first for parent in family.parents or (-1,) * len(family.continuations))]
    ends = torch.tensor(lengths).cumsum(0)
    sums = [0, *total[ends - 1].tolist()]
    before, through = list[int](), list[int]()  # of each part: what its sums have too much, and the sum at its end
    for part, parent in enumerate(parents):
        before.append(_wrapped(sums[part] - (through[parent] if parent >= 0 else 0)))
        through.append(sums[part + 1] - before[part])
    own = total - torch.repeat_interleave(torch.tensor(before), torch.tensor(lengths))
    return mixed(mixed(own) ^ mixed(mixed(torch.tensor([seed])) ^ update))


def _wrapped(number: int) -> int:
    """What 64 bits with a sign keep of a whole number."""
    return (number + (1 << 63)) % (1 << 64) - (1 << 63)
