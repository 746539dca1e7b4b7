"""A rank's samples in parts that fit into memory. How they are cut changes no number."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from leaderless.data.batch import Batch, Jagged, ragged_index
from leaderless.data.prompts.images import PromptImage, unpack_images
from leaderless.distributed.transport import ProcessGroup
from leaderless.models.attention.shared_prompts import Family
from leaderless.models.divergence_scores import TeacherWords
from leaderless.models.lora.dropout import key_of, mixed
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
        after: [m] int64, number of tokens of each sample in the pass that follow its prompt.
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
    """Samples packed one after the other, for one forward pass; siblings share the tokens of their prompt.

    A sample ends before its last sampled token, from which nothing is predicted.

    Attributes:
        tokens: [T] int64, each prompt followed by its continuations.
        positions: [T] int64, place of each token in its sample.
        families: Lengths of each prompt and its continuations.
        select: [R] int64, index of the token before each sampled token, at which the latter is predicted. The last
            token of a prompt predicts the first one of each continuation.
        targets: [R] int64, the sampled tokens.
        response_index: [R] int64, their places in the batch's `response_tokens` columns.
        response_lengths: [m] int64, number of sampled tokens of each sample.
        temperature: Temperature at which all tokens were sampled or, if they differ, [R] float32.
        images: Images of the prompts and of what follows them, in the order of their tokens.
        experts: [T, layers * k] uint8, experts of each token, for a prompt from one of its samples; `UNKNOWN`
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
    batch: Batch, max_tokens: int, process_group: ProcessGroup, enough_tokens: int | None = None
) -> list[MicroBatch]:
    """Cut a batch into micro-batches of bounded size, the same number on every rank.

    Siblings come together as far as they fit, so that their prompt is computed once. A rank with fewer micro-batches
    than others gets empty ones, so that all ranks of the process group take part in the same number of passes.

    A micro-batch has at most `max_tokens`, or a single sample that is longer; samples with the column `sides` are never
    separated from the others of their prompt. Samples of several prompts are put
    together only up to `enough_tokens`.
    """
    samples = _Samples.of(batch)
    packs = _fill(_families(samples, max_tokens), min(max_tokens, enough_tokens or max_tokens))
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
    """Rows of one prompt, and the tokens that they take together."""

    rows: list[int]
    num_tokens: int


def _families(samples: _Samples, max_tokens: int) -> list[_Siblings]:
    """Siblings together, the longest first; in several parts where they do not fit into one micro-batch."""
    by_length = torch.argsort(samples.inputs, descending=True, stable=True)
    order = by_length[torch.argsort(samples.prompt_of_row[by_length], stable=True)]
    prompts, inputs = samples.prompt_of_row[order], samples.inputs[order]
    columns = (order, prompts, samples.prompts.lengths[prompts], inputs)
    families: list[_Siblings] = []
    first, last = 0, -1
    for row, prompt, before, after in zip(*(column.tolist() for column in columns), strict=True):
        if prompt != last:
            first, last = len(families), prompt
        places = range(first, len(families))
        fits = samples.are_together
        place = next((one for one in places if fits or families[one].num_tokens + after <= max_tokens), None)
        if place is None:
            families.append(_Siblings([row], before + after))
        else:
            families[place].rows.append(row)
            families[place].num_tokens += after
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
    """One micro-batch of some rows; rows of a prompt stand together."""
    rows = torch.tensor([row for family in families for row in family.rows])
    sizes = torch.tensor([len(family.rows) for family in families])
    firsts = sizes.cumsum(0) - sizes
    family_of_row = torch.repeat_interleave(torch.arange(len(families)), sizes)
    which = samples.prompt_of_row[rows[firsts]]
    prompts = samples.prompts.select(which)
    continuations, sampled = samples.continuations.select(rows), samples.mask.select(rows).values
    before, after = prompts.lengths, samples.inputs[rows]
    # A continuation starts after all prompts so far, including its own, and all continuations so far.
    starts = before.cumsum(0)[family_of_row] + after.cumsum(0) - after
    prompt_index = ragged_index(starts[firsts] - before, before)
    index = ragged_index(starts, after)
    tokens = torch.empty(len(prompt_index) + len(index), dtype=torch.int64)
    tokens[prompt_index] = prompts.values
    tokens[index] = continuations.values[ragged_index(continuations.offsets[:-1], after)]
    positions = torch.empty_like(tokens)
    positions[prompt_index] = ragged_index(torch.zeros_like(before), before)
    positions[index] = ragged_index(before[family_of_row], after)
    step = ragged_index(torch.zeros_like(rows), continuations.lengths)[sampled]
    row = torch.repeat_interleave(torch.arange(len(rows)), continuations.lengths)[sampled]
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
            Family(prompt, tuple(length for length in lengths.tolist() if length))
            for prompt, lengths in zip(before.tolist(), torch.split(after, sizes.tolist()), strict=True)
        ],
        select=torch.where(step == 0, starts[firsts][family_of_row[row]], starts[row] + step) - 1,
        targets=continuations.values[sampled],
        response_index=response_index,
        response_lengths=counts,
        temperature=1.0 if samples.temperatures is None else _common(samples.temperatures[response_index]),
        images=_images(samples, rows, which, before[family_of_row], (starts[firsts] - before, starts), after),
        experts=experts,
        support=None if samples.support is None else samples.support[response_index],
        origins=Origins(samples.ids[rows], sizes, before, after),
        teacher=None if samples.teacher is None else samples.teacher[response_index],
    )


def _images(
    samples: _Samples, rows: Tensor, prompts: Tensor, before: Tensor, begins: tuple[Tensor, Tensor], inputs: Tensor
) -> tuple[PromptImage, ...]:
    """The images of a pass, in the order of their tokens.

    Args:
        samples: The samples.
        rows: [m] int64, rows of the pass.
        prompts: [n] int64, prompts of the pass.
        before: [m] int64, length of the prompt of each sample.
        begins: Places in the pass of each prompt and of what follows it in each sample.
        inputs: [m] int64, number of tokens of each sample in the pass that follow its prompt.
    """
    found: list[PromptImage] = []
    if samples.images is not None:
        for packed, begin in zip(samples.images.select(prompts).rows(), begins[0].tolist(), strict=True):
            found += [image.moved(begin) for image in unpack_images(packed.numpy().tobytes())]
    if samples.later_images is not None:
        columns = (samples.later_images.select(rows).rows(), before.tolist(), begins[1].tolist(), inputs.tolist())
        for packed, length, begin, count in zip(*columns, strict=True):
            own = [image.moved(-length) for image in unpack_images(packed.numpy().tobytes())]
            found += [image.moved(begin) for image in own if image.place < count]
    return tuple(sorted(found, key=lambda image: image.place))


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
    packed = experts.values.new_full((sum(map(len, places)), width), UNKNOWN)
    parts = zip(experts.rows(), is_known.tolist(), family_of_row.tolist(), strict=True)
    inputs, prompts = list(torch.split(places[1], after.tolist())), torch.split(places[0], before.tolist())
    for row, (values, known, family) in enumerate(parts):
        if known:
            own = values.view(-1, width)
            packed[prompts[family]], packed[inputs[row]] = own[: before[family]], own[before[family] :]
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

    The key of a token after the prompt follows from the id of its sample and from its position there. Siblings share
    the tokens of their prompt. A prompt's keys follow from all of its tokens and the position of each, so that they are
    the same in all passes over its siblings, if these do not fit into one.

    Args:
        micro_batch: The micro-batch.
        seed: Seed of the run.
        update: Number of optimizer steps so far; keys differ from step to step.
    """
    origins = micro_batch.origins
    if origins is None:
        return torch.zeros(len(micro_batch.tokens), dtype=torch.int64)
    siblings = origins.siblings
    # A prompt comes before its siblings, so the segments before it belong to all earlier prompts and samples.
    prompts = torch.arange(len(siblings)) + siblings.cumsum(0) - siblings
    is_prompt = torch.zeros(len(siblings) + len(origins.ids), dtype=torch.bool).index_fill_(0, prompts, value=True)
    lengths = torch.empty_like(is_prompt, dtype=torch.int64)
    lengths[is_prompt], lengths[~is_prompt] = origins.before, origins.after
    segment = torch.repeat_interleave(torch.arange(len(lengths)), lengths)
    contents = mixed(micro_batch.tokens ^ mixed(micro_batch.positions))
    owners = torch.zeros_like(lengths).index_add_(0, segment, contents)
    owners[~is_prompt] = origins.ids
    run = mixed(mixed(torch.tensor([seed])) ^ update)
    owners = mixed(mixed(owners) ^ mixed(run ^ torch.where(is_prompt, key_of("prompt"), key_of("sample"))))
    return mixed(owners[segment] ^ micro_batch.positions)
