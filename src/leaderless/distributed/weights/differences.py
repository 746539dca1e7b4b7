r"""A message of weights as its difference from an earlier one: the places of changed numbers, and their new bits.

At the learning rates of reinforcement learning, an update moves most weights by less than half of a step of their half
precision, and few numbers change as they are sent. A difference is exact: numbers are compared and sent as bits, so
that -0.0, infinities and every NaN arrive as they are. It ends in the same checksum as the whole message, which a rank
compares when it has the whole again: so a base other than the sender's is found as well.

    whole         numbers | padding to a word | policy version | checksum
    difference    form, codes, values | policy version, checksum | places, to a word | new bits, to a word

Of three forms of the places, the one with fewest bytes is taken. Gaps are the unchanged numbers before each changed
one; a code that is the largest of its type stands for as many of them, and the gap goes on.

    mask      a bit for each number of the message
    gaps 8    a byte for each changed number, and one more for each 255 numbers of its gap
    gaps 16   two bytes for each changed number, and two more for each 65,535 numbers of its gap
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

WORD = 8
"""Bytes of a word of a checksum."""
TRAILER = 2 * WORD
"""Bytes of a policy version and a checksum, at the end of each whole message."""
HEAD = 3 * WORD + TRAILER
"""Bytes before the places of a difference."""
BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Types in which numbers of some bytes are compared."""
MASK = 0
"""The form with a bit for each number."""
GAPS = {1: torch.uint8, 2: torch.int16}
"""The other forms, each named by the bytes of a code, and the type that holds these."""


class Difference(NamedTuple):
    """A message, or None where the whole has no more bytes; and how many numbers differ."""

    message: Tensor | None
    num_changed: int


@dataclass(frozen=True)
class _Places:
    """Places of changed numbers in some form: [bytes] uint8, the number of codes, or of bytes of a mask, and an index.

    The latter are the changed numbers as torch selects them.
    """

    form: int
    num_codes: int
    data: Tensor
    index: Tensor


def round_up(num_bytes: int) -> int:
    """A number of bytes that is whole words of a checksum."""
    return -(-num_bytes // WORD) * WORD


def difference(whole: Tensor, base: Tensor, width: int) -> Difference:
    """The difference of a message from an earlier one, on the device of both.

    Args:
        whole: [bytes] uint8, numbers, a policy version and a checksum.
        base: [bytes] uint8, the numbers of the earlier one, with the same padding.
        width: Bytes of a number: 1, 2, 4 or 8.
    """
    numbers = whole[:-TRAILER].view(BITS[width])
    changed = numbers != base.view(BITS[width])
    num_changed = int(torch.count_nonzero(changed))  # a sum of bool takes many times as long
    num_bytes = HEAD + round_up(num_changed * width)
    # No form has fewer bytes than the shorter of a byte for each change and a bit for each number.
    if num_bytes + round_up(min(num_changed, -(-len(changed) // 8))) >= len(whole):
        return Difference(None, num_changed)
    places = _places(changed, num_changed)
    num_bytes += round_up(len(places.data))
    if num_bytes >= len(whole):
        return Difference(None, num_changed)
    message = torch.zeros(num_bytes, dtype=torch.uint8, device=whole.device)
    message.view(torch.int64)[:3] = torch.tensor([places.form, places.num_codes, num_changed])
    message[HEAD - TRAILER : HEAD] = whole[-TRAILER:]
    message[HEAD : HEAD + len(places.data)] = places.data
    begin = HEAD + round_up(len(places.data))
    message[begin : begin + num_changed * width].view(BITS[width]).copy_(numbers[places.index])
    return Difference(message, num_changed)


def apply(message: Tensor, whole: Tensor, width: int) -> None:
    """Make a whole message of its base, in the same memory, and of its difference.

    A difference that was damaged makes something else, or leaves the base; the checksum does not match then.

    Args:
        message: [bytes] uint8 of a difference.
        whole: [bytes] uint8, the numbers of the base, and room for a policy version and a checksum.
        width: Bytes of a number.
    """
    form, num_codes, num_changed = message[: HEAD - TRAILER].view(torch.int64).tolist()
    numbers = whole[:-TRAILER].view(BITS[width])
    whole[-TRAILER:] = message[HEAD - TRAILER : HEAD]
    begin = HEAD + round_up(num_codes * max(form, 1))
    if min(num_codes, num_changed) < 0 or form not in (MASK, *GAPS) or begin + num_changed * width > len(message):
        return
    data, values = message[HEAD:begin], message[begin : begin + num_changed * width].view(BITS[width])
    if form == MASK:
        changed = _unpacked(data)[: len(numbers)]
        if len(changed) == len(numbers) and int(changed.sum()) == num_changed:
            numbers.masked_scatter_(changed, values)
        return
    places = _after_gaps(data.view(GAPS[form])[:num_codes], form)
    if len(places) == num_changed:
        # Damaged gaps may lead past the end, where an accelerator would stop.
        numbers[places.clamp_(max=len(numbers) - 1)] = values


def _places(changed: Tensor, num_changed: int) -> _Places:
    """The places of changed numbers, [n] bool, in the form that takes fewest bytes."""
    mask_bytes = -(-len(changed) // 8)
    if num_changed > mask_bytes:  # gaps have a byte for each
        return _Places(MASK, mask_bytes, _packed(changed), changed)
    places = changed.nonzero()[:, 0]
    gaps = places.diff(prepend=places.new_tensor([-1])) - 1
    sizes = {form: form * (num_changed + int((gaps // _most(form)).sum())) for form in GAPS}
    form = min(sizes, key=lambda one: (sizes[one], one))
    if sizes[form] > mask_bytes:
        return _Places(MASK, mask_bytes, _packed(changed), changed)
    return _Places(form, sizes[form] // form, _codes(gaps, form), places)


def _most(form: int) -> int:
    """The code that stands for as many unchanged numbers, and no changed one."""
    return (1 << (8 * form)) - 1


def _codes(gaps: Tensor, form: int) -> Tensor:
    """Gaps, [n] int64, as codes, [bytes] uint8."""
    most = _most(form)
    ends = (gaps // most + 1).cumsum(0)
    codes = torch.full((int(ends[-1]) if len(ends) else 0,), -1, dtype=torch.int32, device=gaps.device).to(GAPS[form])
    codes[ends - 1] = (gaps % most).to(torch.int32).to(GAPS[form])
    return codes.view(torch.uint8)


def _after_gaps(codes: Tensor, form: int) -> Tensor:
    """The places of changed numbers, [n] int64, by their codes."""
    sizes = codes.to(torch.int64) & _most(form)
    places = sizes.cumsum(0)[sizes != _most(form)]
    return places.add_(torch.arange(len(places), device=places.device))


def _packed(changed: Tensor) -> Tensor:
    """Eight numbers, [n] bool, in each byte, the first in its lowest bit."""
    bits = torch.zeros(round_up(len(changed)), dtype=torch.uint8, device=changed.device)
    bits[: len(changed)] = changed
    return (bits.view(-1, 8) << _shifts(bits)).sum(1, dtype=torch.uint8)


def _unpacked(data: Tensor) -> Tensor:
    """Numbers, [8 n] bool, of [n] bytes."""
    return ((data[:, None] >> _shifts(data)) & 1).bool().view(-1)


def _shifts(like: Tensor) -> Tensor:
    return torch.arange(8, dtype=torch.uint8, device=like.device)
