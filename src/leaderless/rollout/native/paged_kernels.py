"""Attention over pages as Triton kernels, with rotary positions.

Importing this needs Triton, which builds of torch for CUDA bring along.
"""

from __future__ import annotations

import os

import triton
import triton.language as tl
from torch import Tensor

from leaderless.rollout.native.lean_forward import Rotation
from leaderless.rollout.native.paged_plan import ITEM_NUMBERS, PagedPlan, WorkItems

LEAST_QUERIES = 16
"""Least rows of a product on tensor cores."""
LEAST_WIDTH = 16
"""Least numbers of a key that Triton multiplies; the keys of tiny models are filled up."""
KEY_BYTES = 1 << 14
"""Most bytes of the keys, or of the values, that a program reads at a time; half of it in float32."""
LOG2E = 1.4426950408889634
IS_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
"""Whether Triton's interpreter runs the kernels, which takes bfloat16 in products for integers."""


@triton.jit  # type: ignore[untyped-decorator]
def rotate_and_write(  # noqa: PLR0913, PLR0917
    query: tl.tensor,
    key: tl.tensor,
    value: tl.tensor,
    cosine: tl.tensor,
    sine: tl.tensor,
    rotated: tl.tensor,
    keys: tl.tensor,
    values: tl.tensor,
    places: tl.tensor,
    query_stride: tl.tensor,
    key_stride: tl.tensor,
    value_stride: tl.tensor,
    kv_heads: tl.constexpr,
    repeat: tl.constexpr,
    width: tl.constexpr,
    block: tl.constexpr,
    heads: tl.constexpr,
    is_rotated: tl.constexpr,
) -> None:
    """Write the key and the value of one row and one key head at its place.

    Unless they are rotated already, rotate the key and the queries of the head, and write these, too. Strides are
    numbers from one row to the next.
    """
    row, kv_head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    dim = tl.arange(0, block)
    is_dim = dim < width
    place = (tl.load(places + row) * kv_heads + kv_head) * width
    new = value + row * value_stride + kv_head * width
    tl.store(values + place + dim, tl.load(new + dim, mask=is_dim), mask=is_dim)
    new = key + row * key_stride + kv_head * width
    if is_rotated:
        tl.store(keys + place + dim, tl.load(new + dim, mask=is_dim), mask=is_dim)
    else:
        # Each half of a head with the other.
        other = tl.where(dim < width // 2, dim + width // 2, dim - width // 2)
        cosines = tl.load(cosine + row * width + dim, mask=is_dim, other=0.0)
        sines = tl.load(sine + row * width + dim, mask=is_dim, other=0.0)
        one, two = tl.load(new + dim, mask=is_dim, other=0.0), tl.load(new + other, mask=is_dim, other=0.0)
        tl.store(keys + place + dim, rotated_by(one, two, cosines, sines), mask=is_dim)
        member = tl.arange(0, heads)
        is_read = (member < repeat)[:, None] & is_dim[None, :]
        head = (kv_head * repeat + member) * width
        asked = query + row * query_stride + head[:, None]
        one = tl.load(asked + dim[None, :], mask=is_read, other=0.0)
        two = tl.load(asked + other[None, :], mask=is_read, other=0.0)
        result = rotated_by(one, two, cosines[None, :], sines[None, :])
        written = row * (kv_heads * repeat * width) + head[:, None] + dim[None, :]
        tl.store(rotated + written, result, mask=is_read)


@triton.jit  # type: ignore[untyped-decorator]
def rotated_by(one: tl.tensor, two: tl.tensor, cosines: tl.tensor, sines: tl.tensor) -> tl.tensor:
    """The sum of both products, rounded as `rotate` does: each product, and then their sum."""
    first = (one.to(tl.float32) * cosines.to(tl.float32)).to(one.dtype)
    second = (two.to(tl.float32) * sines.to(tl.float32)).to(one.dtype)
    return (first.to(tl.float32) + second.to(tl.float32)).to(one.dtype)


@triton.jit  # type: ignore[untyped-decorator]
def attend_to_items(  # noqa: PLR0913, PLR0917
    query: tl.tensor,
    keys: tl.tensor,
    values: tl.tensor,
    items: tl.tensor,
    rows: tl.tensor,
    pages: tl.tensor,
    outputs: tl.tensor,
    normalizers: tl.tensor,
    scale: tl.tensor,
    kv_heads: tl.constexpr,
    repeat: tl.constexpr,
    width: tl.constexpr,
    block: tl.constexpr,
    page_size: tl.constexpr,
    num_queries: tl.constexpr,
    num_keys: tl.constexpr,
    numbers: tl.constexpr,
    is_widened: tl.constexpr,
) -> None:
    """Attend with the rows of one item and the query heads of one key head to the tokens of the item.

    Results are float32 and divided by their own sums; normalizers are logarithms of these to the base of 2.
    """
    item = items + tl.program_id(0) * numbers
    kv_head = tl.program_id(1)
    table, num_tokens = tl.load(item), tl.load(item + 1)
    first_row, num_rows, first_result = tl.load(item + 2), tl.load(item + 3), tl.load(item + 4)
    if num_tokens == 0:
        return
    dim = tl.arange(0, block)
    is_dim = dim < width
    # Query heads that share a key head are computed as several queries of that head.
    one = tl.arange(0, num_queries)
    member, head = one // repeat, kv_head * repeat + one % repeat
    is_query = member < num_rows
    row = tl.load(rows + first_row + member, mask=is_query, other=0).to(tl.int64)
    is_read = is_query[:, None] & is_dim[None, :]
    place = (row * (kv_heads * repeat) + head) * width
    asked = tl.load(query + place[:, None] + dim[None, :], mask=is_read, other=0.0)
    if is_widened:
        asked = asked.to(tl.float32)
    peak = tl.full([num_queries], float("-inf"), tl.float32)
    total = tl.zeros([num_queries], tl.float32)
    result = tl.zeros([num_queries, block], tl.float32)
    for begin in range(0, num_tokens, num_keys):
        token = begin + tl.arange(0, num_keys)
        is_key = token < num_tokens
        page = tl.load(pages + table + token // page_size, mask=is_key, other=0).to(tl.int64)
        start = ((page * page_size + token % page_size) * kv_heads + kv_head) * width
        # What lies behind the last token is not read: 0 times NaN would be NaN.
        key = tl.load(keys + start[None, :] + dim[:, None], mask=is_key[None, :] & is_dim[:, None], other=0.0)
        value = tl.load(values + start[:, None] + dim[None, :], mask=is_key[:, None] & is_dim[None, :], other=0.0)
        if is_widened:
            key = key.to(tl.float32)
        scores = tl.dot(asked, key, input_precision="ieee") * scale
        scores = tl.where(is_key[None, :], scores, float("-inf"))
        new_peak = tl.maximum(peak, tl.max(scores, 1))
        kept = tl.exp2(peak - new_peak)
        weights = tl.exp2(scores - new_peak[:, None])
        total = total * kept + tl.sum(weights, 1)
        weights = weights.to(value.dtype)
        if is_widened:
            weights, value = weights.to(tl.float32), value.to(tl.float32)
        result = result * kept[:, None] + tl.dot(weights, value, input_precision="ieee")
        peak = new_peak
    written = (first_result + member).to(tl.int64) * (kv_heads * repeat) + head
    tl.store(outputs + written[:, None] * width + dim[None, :], result / total[:, None], mask=is_read)
    tl.store(normalizers + written, peak + tl.log2(total), mask=is_query)


@triton.jit  # type: ignore[untyped-decorator]
def merge_items(  # noqa: PLR0913, PLR0917
    outputs: tl.tensor,
    normalizers: tl.tensor,
    runs: tl.tensor,
    merged: tl.tensor,
    kv_heads: tl.constexpr,
    repeat: tl.constexpr,
    width: tl.constexpr,
    block: tl.constexpr,
    heads: tl.constexpr,
) -> None:
    """Merge the results of one row, for the query heads of one key head; a row without any gets zeros."""
    row = tl.program_id(0).to(tl.int64)
    one, dim = tl.arange(0, heads), tl.arange(0, block)
    head = tl.program_id(1) * repeat + one
    is_head = one < repeat
    is_read = is_head[:, None] & (dim < width)[None, :]
    peak = tl.full([heads], float("-inf"), tl.float32)
    total = tl.zeros([heads], tl.float32)
    result = tl.zeros([heads, block], tl.float32)
    for kind in tl.static_range(2):  # own tokens, and a shared prompt's
        run = runs + (row * 2 + kind) * 3
        first, count, distance = tl.load(run), tl.load(run + 1), tl.load(run + 2)
        for number in range(count):
            place = (first + number * distance).to(tl.int64) * (kv_heads * repeat) + head
            normalizer = tl.load(normalizers + place, mask=is_head, other=0.0)
            part = tl.load(outputs + place[:, None] * width + dim[None, :], mask=is_read, other=0.0)
            new_peak = tl.maximum(peak, normalizer)
            kept, share = tl.exp2(peak - new_peak), tl.exp2(normalizer - new_peak)
            total = total * kept + share
            result = result * kept[:, None] + part * share[:, None]
            peak = new_peak
    result = result / tl.where(total > 0, total, 1.0)[:, None]
    place = (row * (kv_heads * repeat) + head) * width
    tl.store(merged + place[:, None] + dim[None, :], result.to(merged.dtype.element_ty), mask=is_read)


def options_of(queries: int, block: int, width: int) -> dict[str, int]:
    """Sizes of `attend_to_items` for some queries, with `block` numbers of `width` bytes in each key.

    Products in float32 are computed without tensor cores: with larger sizes their numbers would not fit into registers.
    """
    num_queries, is_half = max(LEAST_QUERIES, triton.next_power_of_2(queries)), width == 2
    key_bytes = KEY_BYTES if is_half else KEY_BYTES // 2
    return {
        "num_queries": num_queries,
        "num_keys": max(16, min(64, key_bytes // (block * width))),
        "num_warps": max(4, num_queries * width // 32),
        "num_stages": 3 if block <= 128 and is_half else 2,
    }


def attend_with_kernels(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cached: tuple[Tensor, Tensor],
    plan: PagedPlan,
    scale: float,
    rotation: Rotation | None = None,
) -> Tensor:
    """Do what `attend_with_torch` does with four kernels, and no copy of what is in the pages."""
    keys, values = cached
    query, key, value = (_with_whole_heads(tensor) for tensor in (query, key, value))
    num_rows, num_heads, width = query.shape
    kv_heads = keys.shape[1]
    repeat, block = num_heads // kv_heads, max(LEAST_WIDTH, triton.next_power_of_2(width))
    heads = triton.next_power_of_2(repeat)
    sizes = {"kv_heads": kv_heads, "repeat": repeat, "width": width, "block": block}
    strides = query.stride(0), key.stride(0), value.stride(0)
    is_rotated = rotation is None
    cosine, sine = (query, query) if rotation is None else (one.contiguous() for one in rotation)
    asked = query.contiguous() if is_rotated else query.new_empty(query.shape)
    rotate_and_write[num_rows, kv_heads](
        *(query, key, value, cosine, sine, asked, keys, values, plan.places, *strides),
        **sizes,
        heads=heads,
        is_rotated=is_rotated,
        num_warps=1 if repeat * block <= 512 else 4,
    )
    outputs, normalizers = plan.room(num_heads, width)

    def attend(work: WorkItems) -> None:
        attend_to_items[len(work.items), kv_heads](
            *(asked, keys, values, work.items, work.rows, plan.pages, outputs, normalizers, scale * LOG2E),
            **sizes,
            **options_of(work.most_rows * repeat, block, keys.dtype.itemsize),
            page_size=plan.page_size,
            numbers=ITEM_NUMBERS,
            is_widened=IS_INTERPRETED,
        )

    attend(plan.own)
    attend(plan.shared)
    merged = query.new_empty(query.shape)
    merge_items[num_rows, kv_heads](outputs, normalizers, plan.runs, merged, **sizes, heads=heads)
    return merged


def _with_whole_heads(tensor: Tensor) -> Tensor:
    """A tensor [n, heads, width] whose rows are contiguous; between rows there may be other numbers."""
    return tensor if tensor.stride()[1:] == (tensor.shape[2], 1) else tensor.contiguous()
