"""Attention over pages for tests: random rows with their pages, and a naive loop in float64."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from random import Random

import numpy as np
import torch
from torch import Tensor

from leaderless.planner.cache_pool import bucket_of
from leaderless.rollout.kv_cache import Segment
from leaderless.rollout.paged_attention import PagedAttend, attend_with_torch
from leaderless.rollout.paged_plan import (
    TILE_ROWS,
    Arrangement,
    PagedPlan,
    Results,
    WorkItems,
    fields_of,
    num_bytes,
)
from leaderless.rollout.pages import Pages


class Rows:
    """Rows with segments of their own, and prompts that some of them share, in pages in any order."""

    def __init__(self, seed: int, owns: list[int], groups: list[tuple[int, int]], page_size: int) -> None:
        """`owns` are tokens of each row without the new one; `groups` are tokens of a prompt and its number of rows."""
        self.random, generator = Random(seed), torch.Generator().manual_seed(seed)
        self.generator = generator
        needed = sum(-(-(tokens + 1) // page_size) for tokens in owns) + sum(-(-n // page_size) for n, _ in groups)
        self.pages = Pages(needed + 3, page_size)
        self.random.shuffle(self.pages._free)
        shared = [segment for n, count in groups for segment in [self.pages.add(n)] * count]
        self.prompts: list[Segment | None] = [*shared, *[None] * (len(owns) - len(shared))]
        self.random.shuffle(self.prompts)
        self.owns = [self.pages.add(tokens, 1) for tokens in owns]

    def tensors(self, heads: int, kv_heads: int, width: int, dtype: torch.dtype) -> list[Tensor]:
        """Queries, keys and values of the new tokens, and what is in the pages; NaN where nothing was written."""
        bucket = bucket_of(len(self.owns))
        shapes = [(bucket, heads, width), *[(bucket, kv_heads, width)] * 2]
        query, key, value = (torch.randn(shape, generator=self.generator).to(dtype) for shape in shapes)
        size = (self.pages.num_pages + 1) * self.pages.page_size
        cached = [torch.full((size, kv_heads, width), torch.nan, dtype=dtype) for _ in range(2)]
        for segment in {*self.owns, *(one for one in self.prompts if one is not None)}:
            slots = self.pages.places(segment, 0, segment.length)
            for tensor in cached:
                tensor[slots] = torch.randn(len(slots), kv_heads, width, generator=self.generator).to(dtype)
        return [query, key, value, *cached]

    def plan(self, device: torch.device) -> PagedPlan:
        rows = len(self.owns)
        bucket = bucket_of(rows)
        data = torch.zeros(num_bytes(bucket, 100_000), dtype=torch.uint8)
        host = fields_of(data, bucket)
        host.places.zero_()
        for row, segment in enumerate(self.owns):
            host.places[row] = int(self.pages.places(segment, segment.length, 1)[0])
        lengths = np.array([segment.length + 1 for segment in self.owns])
        arrangement = Arrangement(self.owns, self.prompts)
        longest, shared, _ = arrangement.write(host, lengths, self.pages)
        there = fields_of(data.to(device), bucket)
        each = torch.arange(bucket, dtype=torch.int32, device=device)
        own = WorkItems(there.own, each, 1, longest)
        both = WorkItems(there.shared, there.rows, TILE_ROWS, shared)
        results = Results(bucket, device)
        return PagedPlan(*there[:4], own, both, there.runs, there.pages, self.pages.page_size, results)

    def expected(self, query: Tensor, key: Tensor, value: Tensor, keys: Tensor, values: Tensor, scale: float) -> Tensor:
        """The attention of each row, by a loop in float64."""
        found = torch.zeros(query.shape, dtype=torch.float64)
        repeat = query.shape[1] // key.shape[1]
        for row, (own, prompt) in enumerate(zip(self.owns, self.prompts, strict=True)):
            slots = [] if prompt is None else self.pages.places(prompt, 0, prompt.length).tolist()
            slots += self.pages.places(own, 0, own.length).tolist()
            k, v = (
                torch.cat([cached[slots], new[row : row + 1]]).double()
                for cached, new in ((keys, key), (values, value))
            )
            for head in range(query.shape[1]):
                weights = (k[:, head // repeat] @ query[row, head].double() * scale).softmax(0)
                found[row, head] = weights @ v[:, head // repeat]
        return found


CASES = {
    "siblings": ((1, 40, 9, 70, 3, 0, 16, 33, 5), [(37, 9)], 16, (4, 2, 64)),
    "groups of all sizes": ((5, 1, 20, 8, 0, 13, 2, 31, 9, 17, 4, 0, 1), [(1, 2), (65, 8), (16, 1)], 16, (6, 2, 80)),
    "one page, no prompt": ((3,), [], 16, (8, 1, 96)),
    "each head has its keys": ((0, 17, 64), [(270, 2)], 32, (3, 3, 128)),
    "nothing of its own": ((0, 0, 0, 0), [(33, 3)], 8, (14, 2, 64)),
    "many items": ((600, 3), [(500, 2)], 4, (2, 1, 16)),
    "narrow heads": ((5, 70), [(20, 2)], 16, (4, 2, 8)),
}
"""Own tokens of rows, prompts with their numbers of rows, tokens of a page; query heads, key heads and their width."""


def errors(function: PagedAttend, device: torch.device, dtype: torch.dtype) -> dict[str, float]:
    """Largest errors of a function, relative to the root mean square of the results, for each case."""
    found = {}
    for seed, (name, (owns, groups, page_size, sizes)) in enumerate(CASES.items()):
        rows = Rows(seed, list(owns), groups, page_size)
        inputs = rows.tensors(*sizes, dtype)
        scale = sizes[2] ** -0.5
        expected = rows.expected(*inputs, scale)
        query, key, value, *cached = (tensor.to(device) for tensor in inputs)
        result = function(query, key, value, tuple(cached), rows.plan(device), scale).cpu().double()
        assert not result[len(owns) :].any(), "rows that fill up a shape"
        found[name] = float((result - expected).abs().max() / expected.square().mean().sqrt())
        for own, new, there in ((key, inputs[1], cached[0]), (value, inputs[2], cached[1])):
            slots = [int(rows.pages.places(segment, segment.length, 1)[0]) for segment in rows.owns]
            assert torch.equal(there[slots].cpu(), new[: len(owns)]), own.shape
    return found


SHAPES = {
    torch.bfloat16: ((2, 6, 128), (4, 7, 128), (8, 1, 64), (2, 7, 80)),
    torch.float32: ((2, 2, 8), (2, 6, 128)),
}
"""Key heads, query heads of each, and their width, of models from 0.5B to 7B, and of tiny ones, by type."""


class _Absent:
    """A GPU that is not there, for which Triton compiles what is to be launched on it."""

    def __init__(self, capability: int) -> None:
        self.capability = capability

    def get_current_target(self) -> object:
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", self.capability, 32)

    def get_current_device(self) -> int:
        return self.capability  # what was compiled for one is not for another

    def get_current_stream(self, _: int) -> int:
        return 0


def launched_kernels() -> dict[str, dict[str, int]]:
    """Shared memory, tensor-core operations and stack of all kernels that are launched on GPUs that are not there."""
    from triton.compiler import CompiledKernel
    from triton.runtime import driver

    from leaderless.rollout.paged_kernels import attend_with_kernels

    found = {}
    launched = []
    CompiledKernel.run = property(lambda kernel: lambda *_: launched.append(kernel))
    CompiledKernel.launch_metadata = lambda *_: None
    for capability in (80, 90):
        driver.set_active(_Absent(capability))
        for dtype, shapes in SHAPES.items():
            for kv_heads, repeat, width in shapes:
                rows = Rows(0, [5, 40, 9], [(37, 2)], 64)
                query, key, value, *cached = rows.tensors(kv_heads * repeat, kv_heads, width, dtype)
                attend_with_kernels(query, key, value, tuple(cached), rows.plan(torch.device("cpu")), 1.0)
                for number, kernel in enumerate(launched):
                    name = f"{kernel.metadata.name} {number}: {capability}, {dtype}, {kv_heads}, {repeat}, {width}"
                    code = kernel.asm["ptx"]
                    products = code.count("mma.sync") + code.count("wgmma.mma")
                    stack = stack_of(kernel.asm["cubin"])
                    found[name] = {"shared": kernel.metadata.shared, "products": products, "stack": stack}
                launched.clear()
    return found


def stack_of(binary: bytes) -> int:
    """Bytes of memory for each thread of a kernel, whose numbers do not all fit into registers."""
    from triton import knobs

    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(binary)
        file.flush()
        command = [knobs.nvidia.cuobjdump.path, "-res-usage", file.name]
        said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return int(re.search(r"STACK:(\d+)", said)[1])


def main() -> None:
    """Errors of the kernels as Triton interprets them on the CPU: it has to know that before it is imported."""
    if sys.argv[1:] == ["compile"]:
        print(json.dumps(launched_kernels()))
        return
    assert os.environ["TRITON_INTERPRET"] == "1"
    from leaderless.rollout.paged_kernels import attend_with_kernels

    kinds = {"float32": torch.float32, "bfloat16": torch.bfloat16}
    both = {"kernels": attend_with_kernels, "torch": attend_with_torch}
    names = sys.argv[1:] or list(both)
    found = {n: {kind: errors(both[n], torch.device("cpu"), d) for kind, d in kinds.items()} for n in names}
    print(json.dumps(found))


if __name__ == "__main__":
    main()
