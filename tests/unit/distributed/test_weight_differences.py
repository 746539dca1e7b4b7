"""Differences of messages: what comes of one is the whole bit by bit, and it is never longer."""

from __future__ import annotations

from typing import NamedTuple

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import Tensor

from leaderless.distributed.weights.differences import (
    BITS,
    GAPS,
    HEAD,
    MASK,
    TRAILER,
    apply,
    difference,
    round_up,
)
from leaderless.distributed.weights.sent import SentWeights

TYPES = [torch.float32, torch.bfloat16, torch.float16, torch.int8, torch.float8_e4m3fn, torch.float8_e5m2]


class Case(NamedTuple):
    """Numbers of a type, as many as `size`, of which a share changes, in runs of some length."""

    dtype: torch.dtype
    size: int
    share: float
    run: int
    seed: int


cases = st.builds(
    Case,
    st.sampled_from(TYPES),
    st.integers(0, 3000),
    st.floats(0, 1) | st.sampled_from([0.0, 0.001, 0.01, 1.0]),
    st.sampled_from([1, 7, 300]),
    st.integers(0, 1 << 30),
)


def messages(case: Case) -> tuple[Tensor, Tensor]:
    """A whole message, and the numbers of the one before: random bits, which are NaN and infinite in part."""
    generator = torch.Generator().manual_seed(case.seed)
    num_bytes = case.size * case.dtype.itemsize
    base = torch.zeros(round_up(num_bytes), dtype=torch.uint8)
    base[:num_bytes] = torch.randint(0, 256, (num_bytes,), dtype=torch.uint8, generator=generator)
    whole = torch.cat([base, torch.randint(0, 256, (TRAILER,), dtype=torch.uint8, generator=generator)])
    runs = torch.rand(-(-case.size // case.run), generator=generator) < case.share
    changed = runs.repeat_interleave(case.run)[: case.size]
    numbers = whole[:num_bytes].view(BITS[case.dtype.itemsize])
    numbers[changed] ^= torch.randint(1, 128, (case.size,), generator=generator).to(numbers.dtype)[changed]
    return whole, base


def applied(message: Tensor, base: Tensor, width: int) -> Tensor:
    """The whole that a difference makes of its base."""
    made = torch.cat([base, torch.zeros(TRAILER, dtype=torch.uint8)])
    apply(message, made, width)
    return made


@given(case=cases)
@example(Case(torch.bfloat16, 200_000, 0.00001, 1, 3))  # gaps of more than 65,535
@example(Case(torch.bfloat16, 70_000, 0.0002, 1, 1))
@example(Case(torch.float8_e5m2, 3000, 0.3, 1, 2))
@example(Case(torch.float32, 0, 0.0, 1, 0))
def test_a_difference_makes_the_whole_and_is_shorter(case: Case) -> None:
    whole, base = messages(case)
    width = case.dtype.itemsize
    before = base.clone()
    message, num_changed = difference(whole, base, width)
    # A loop over the bits of each number.
    numbers = [part.view(BITS[width]).tolist() for part in (whole[:-TRAILER], base)]
    changed = [place for place, (new, old) in enumerate(zip(*numbers, strict=True)) if new != old]
    assert num_changed == len(changed)
    assert torch.equal(base, before)
    sizes = [_naive_places(changed, len(numbers[0]), form) for form in (MASK, *GAPS)]
    shortest = HEAD + round_up(min(sizes)) + round_up(num_changed * width)
    if message is None:
        assert shortest >= len(whole)
        return
    assert len(message) == shortest < len(whole)
    assert torch.equal(applied(message, base, width), whole)


def _naive_places(changed: list[int], count: int, form: int) -> int:
    """Bytes of places, one after the other."""
    if form == MASK:
        return -(-count // 8)
    most, size, begin = (1 << (8 * form)) - 1, 0, 0
    for place in changed:
        gap, begin = place - begin, place + 1
        while gap >= most:
            gap, size = gap - most, size + form
        size += form
    return size


@pytest.mark.parametrize(("size", "places", "form"), [(1 << 12, 400, 1), (1 << 18, 40, 2), (1 << 12, 900, MASK)])
def test_each_form_is_taken_where_it_is_the_shortest(size: int, places: int, form: int) -> None:
    base = torch.zeros(2 * size, dtype=torch.uint8)
    whole = torch.cat([base, torch.zeros(TRAILER, dtype=torch.uint8)])
    whole[: 2 * size].view(torch.int16)[:: size // places] = -1
    message = difference(whole, base, 2).message
    assert message is not None
    assert int(message[:8].view(torch.int64)) == form
    assert torch.equal(applied(message, base, 2), whole)


@pytest.mark.parametrize(("form", "most"), [(1, 255), (2, 65535)])
@pytest.mark.parametrize("codes", [1, 2])
@pytest.mark.parametrize("more", [-1, 0, 1])
def test_gaps_around_what_a_code_stands_for_are_found_again(form: int, most: int, codes: int, more: int) -> None:
    gap = codes * most + more
    gaps = [0, *[20] * (400 if form == 1 else 0), gap, 0, gap]
    places = torch.tensor(gaps).add(1).cumsum(0) - 1
    size = 4 * (int(places[-1]) // 4 + 2)
    base = torch.zeros(2 * size, dtype=torch.uint8)
    whole = torch.cat([base, torch.zeros(TRAILER, dtype=torch.uint8)])
    whole[: 2 * size].view(torch.int16)[places] = 1
    message, num_changed = difference(whole, base, 2)
    assert message is not None
    assert num_changed == len(gaps)
    assert message[:16].view(torch.int64).tolist() == [form, len(gaps) + 2 * (gap // most)]
    assert torch.equal(applied(message, base, 2), whole)


def test_negative_zero_and_the_bits_of_nan_arrive() -> None:
    old = torch.zeros(400)
    new = old.clone()
    new[3] = -0.0
    new.view(torch.int32)[5:8] = torch.tensor([0x7FC00001, 0x7FA00000, -1])  # quiet, signaling, negative
    whole = torch.cat([new.view(torch.uint8), torch.arange(TRAILER, dtype=torch.uint8)])
    message, num_changed = difference(whole, old.view(torch.uint8), 4)
    assert num_changed == 4
    assert message is not None
    assert torch.equal(applied(message, old.view(torch.uint8), 4), whole)


@given(case=cases, byte=st.integers(0, 1 << 20), value=st.integers(1, 255))
def test_a_damaged_difference_makes_something_else_or_is_the_same(case: Case, byte: int, value: int) -> None:
    whole, base = messages(case)
    width = case.dtype.itemsize
    message = difference(whole, base, width).message
    if message is None:
        return
    damaged = message.clone()
    damaged[byte % len(damaged)] ^= value
    made = applied(damaged, base, width)  # no error, and no write past the end
    assert len(made) == len(whole)
    if byte % len(damaged) in range(HEAD - TRAILER, HEAD):
        assert not torch.equal(made, whole)


def test_numbers_that_were_sent_are_kept_until_others_are() -> None:
    sent, cpu = SentWeights(), torch.device("cpu")
    sent.open({(0, 2): 16, (1, 2): 8}, cpu)
    first, second = torch.arange(16, dtype=torch.uint8), torch.arange(8, dtype=torch.uint8)
    sent.keep((0, 2), first)
    sent.keep((1, 2), second)
    sent.open({(0, 2): 16, (1, 2): 8}, cpu)
    assert torch.equal(sent.numbers((0, 2), cpu), first)
    first += 1
    assert not torch.equal(sent.numbers((0, 2), cpu), first), "it is a copy"
    assert torch.equal(sent.numbers((1, 2), cpu), second)
