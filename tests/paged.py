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

from leaderless.config.rollout import SamplingConfig
from leaderless.planner.memory.limits import bucket_of
from leaderless.rollout.native.kv_cache import Segment
from leaderless.rollout.native.lean_forward import Rotation, rotate
from leaderless.rollout.native.paged_attention import PagedAttend, attend_with_torch
from leaderless.rollout.native.paged_plan import (
    TILE_ROWS,
    Arrangement,
    PagedPlan,
    Results,
    WorkItems,
    fields_of,
    num_bytes,
)
from leaderless.rollout.native.pages import PagePool


class Rows:
    """Rows with segments of their own, and prompts that some of them share, in pages in any order."""

    def __init__(self, seed: int, owns: list[int], groups: list[tuple[int, int]], page_size: int) -> None:
        """`owns` are tokens of each row without the new one; `groups` are tokens of a prompt and its number of rows."""
        self.random, generator = Random(seed), torch.Generator().manual_seed(seed)
        self.generator = generator
        needed = sum(-(-(tokens + 1) // page_size) for tokens in owns) + sum(-(-n // page_size) for n, _ in groups)
        self.pages = PagePool(needed + 3, page_size)
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

    def rotation(self, width: int, dtype: torch.dtype) -> Rotation:
        """Factors for queries and keys of the new tokens."""
        angles = torch.randn(1, bucket_of(len(self.owns)), width, generator=self.generator)
        return Rotation.of(angles.cos().to(dtype), angles.sin().to(dtype))

    def plan(self, device: torch.device) -> PagedPlan:
        rows = len(self.owns)
        bucket = bucket_of(rows)
        data = torch.zeros(num_bytes(bucket, 100_000), dtype=torch.uint8)
        host = fields_of(data, bucket)
        host.places.zero_()
        for row, segment in enumerate(self.owns):
            host.places[row] = int(self.pages.places(segment, segment.length, 1)[0])
        lengths = np.array([segment.length + 1 for segment in self.owns])
        arrangement = Arrangement.of(self.owns, self.prompts)
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
        # Triton's interpreter cuts bfloat16 off where a GPU rounds: there `check_rounding` does with float16.
        has_rotation = dtype != torch.bfloat16 or device.type != "cpu"
        for rotation in (None, rows.rotation(sizes[2], dtype)) if has_rotation else (None,):
            query, key, value, *cached = (tensor.clone() for tensor in inputs)
            turned = (query, key) if rotation is None else (rotate(query, *rotation), rotate(key, *rotation))
            expected = rows.expected(*turned, value, *cached, scale)
            if rotation is not None:  # as one product gives them
                joined = torch.cat([one.flatten(1) for one in (query, key, value)], 1).to(device)
                shapes = [one.shape for one in (query, key, value)]
                parts = joined.split([shape[1] * shape[2] for shape in shapes], 1)
                query, key, value = (part.view(shape) for part, shape in zip(parts, shapes, strict=True))
            way = rotation and Rotation(*(one.to(device) for one in rotation))
            there = [one.to(device) for one in (query, key, value, *cached)]
            result = function(*there[:3], tuple(there[3:]), rows.plan(device), scale, way).cpu().double()
            assert not result[len(owns) :].any(), "rows that fill up a shape"
            error = float((result - expected).abs().max() / expected.square().mean().sqrt())
            found[name] = max(error, found.get(name, 0.0))
            slots = [int(rows.pages.places(segment, segment.length, 1)[0]) for segment in rows.owns]
            for written, new in zip(there[3:], (turned[1], inputs[2]), strict=True):
                assert torch.equal(written[slots].cpu(), new[: len(owns)]), (name, rotation is None)
    return found


def check_rounding() -> None:
    """Check that the kernel rounds a rotation step by step: in float16, which Triton's interpreter rounds as a GPU."""
    from leaderless.rollout.native.paged_kernels import attend_with_kernels

    rows = Rows(0, [5, 40, 9], [], 16)
    for heads, kv_heads, width in ((4, 2, 8), (6, 2, 80)):
        query, key, value, *cached = rows.tensors(heads, kv_heads, width, torch.float16)
        rotation, plan = rows.rotation(width, torch.float16), rows.plan(torch.device("cpu"))
        expected = rotate(key, *rotation)
        in_float32 = rotate(key.float(), *(one.float() for one in rotation)).half()
        assert not torch.equal(expected, in_float32)
        attend_with_kernels(query, key, value, tuple(cached), plan, 1.0, rotation)
        assert torch.equal(cached[0][plan.places[:3]], expected[:3])


SHAPES = {
    torch.bfloat16: ((2, 6, 128), (4, 7, 128), (8, 1, 64), (2, 7, 80)),
    torch.float32: ((2, 2, 8), (2, 6, 128)),
}
"""Key heads, query heads of each, and their width, of models from 0.5B to 7B, and of tiny ones, by type."""


VOCABULARIES = 1000, 151_936, 262_144
"""Sizes of vocabularies."""


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
    """What all kernels that are launched take of GPUs that are not there: shared memory, registers, and so on."""
    from triton.compiler import CompiledKernel
    from triton.runtime import driver

    from leaderless.rollout.native.paged_kernels import attend_with_kernels
    from leaderless.rollout.native.sampling_kernels import draw_with_kernels

    found = {}
    launched = []
    CompiledKernel.run = property(lambda kernel: lambda *_: launched.append(kernel))
    CompiledKernel.launch_metadata = lambda *_: None

    def note(arguments: str) -> None:
        for number, kernel in enumerate(launched):
            code = kernel.asm["ptx"]
            products = code.count("mma.sync") + code.count("wgmma.mma")
            registers, stack = resources_of(kernel.asm["cubin"])
            found[f"{kernel.metadata.name} {number}: {arguments}"] = {
                "shared": kernel.metadata.shared,
                "products": products,
                "stack": stack,
                "registers": registers,
            }
        launched.clear()

    for capability in (80, 90):
        driver.set_active(_Absent(capability))
        for dtype, shapes in SHAPES.items():
            for kv_heads, repeat, width in shapes:
                rows = Rows(0, [5, 40, 9], [(37, 2)], 64)
                query, key, value, *cached = rows.tensors(kv_heads * repeat, kv_heads, width, dtype)
                rotation = rows.rotation(width, dtype)
                attend_with_kernels(query, key, value, tuple(cached), rows.plan(torch.device("cpu")), 1.0, rotation)
                note(f"{capability}, {dtype}, {kv_heads}, {repeat}, {width}")
        for vocabulary in VOCABULARIES:
            for temperature in (1.0, 0.0):
                logits, noise = torch.zeros(4, vocabulary), torch.zeros(4, dtype=torch.float64)
                drawn = torch.zeros(2, 4, dtype=torch.int64)
                draw_with_kernels(logits, noise, SamplingConfig(temperature=temperature), drawn)
                note(f"{capability}, {vocabulary}, {temperature}")
    return found


def resources_of(binary: bytes) -> tuple[int, int]:
    """Registers of each thread of a kernel, and bytes of memory for numbers that do not fit into them."""
    from triton import knobs

    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(binary)
        file.flush()
        command = [knobs.nvidia.cuobjdump.path, "-res-usage", file.name]
        said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    registers, stack = re.search(r"REG:(\d+) STACK:(\d+)", said).groups()
    return int(registers), int(stack)


def main() -> None:
    """Errors of the kernels as Triton interprets them on the CPU: it has to know that before it is imported."""
    if sys.argv[1:] == ["compile"]:
        print(json.dumps(launched_kernels()))
        return
    assert os.environ["TRITON_INTERPRET"] == "1"
    from leaderless.rollout.native.paged_kernels import attend_with_kernels

    check_rounding()
    kinds = {"float32": torch.float32, "bfloat16": torch.bfloat16}
    both = {"kernels": attend_with_kernels, "torch": attend_with_torch}
    names = sys.argv[1:] or list(both)
    found = {n: {kind: errors(both[n], torch.device("cpu"), d) for kind, d in kinds.items()} for n in names}
    print(json.dumps(found))


if __name__ == "__main__":
    main()
