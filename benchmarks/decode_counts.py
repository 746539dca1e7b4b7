"""Counts what a decoding step starts on an accelerator, in slots and in pages: `python benchmarks/decode_counts.py`.

The device is one without values, of which tests make use, too (`tests/fake_accelerator.py`). Kernels and copies are
counted; nothing is timed. The model is a Qwen2 with two layers, in bfloat16, or a Qwen3 with four experts in each,
whose choices are recorded. Where passes are recorded, the host starts a pass as a whole, and only what is counted as
outside of it by itself.
"""
# ruff: noqa: ANN401, SLF001 - engines and dispatchers are watched from within

from __future__ import annotations

import argparse
import json
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils import _pytree as pytree

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "docs/performance/decode_counts.json"
GROUPS, SIBLINGS = 16, 8
KERNELS, DRAW_KERNELS = 4, 2
"""Kernels of a call of `attend_with_kernels`, and of one of `draw_with_kernels`."""
FREE = {
    *("slice", "view", "unsqueeze", "select", "_unsafe_view", "alias", "detach", "t", "transpose", "as_strided"),
    *("expand", "empty", "permute", "split", "squeeze", "unbind", "split_with_sizes", "empty_like", "new_empty"),
    *("lift_fresh", "empty_strided", "unfold", "diagonal", "_local_scalar_dense", "device", "is_pinned", "layout"),
    *("numel", "sym_size", "sym_stride", "sym_numel", "size", "stride"),
}
"""Operations that start nothing on a device."""

EXPERTS = ", with experts"
"""End of the name of a way in which choices of experts are recorded."""

Counts = dict[str, float]
Maker = Callable[..., Any]
"""Function of a model, its device, what counts, and its routers if their choices are recorded; makes an engine."""


class Counting:
    """Counts operations on the device of `tests.fake_accelerator`."""

    def __init__(self, kind: str) -> None:
        self.kind, self.counts, self.is_inside = kind, Counter[str](), False

    def note(self, name: str, arguments: object, result: object, *, is_async: bool) -> None:
        given, found = (
            [one for one in pytree.tree_leaves(tree) if isinstance(one, Tensor)] for tree in (arguments, result)
        )
        here = [tensor.device.type == self.kind for tensor in given]
        there = [tensor.device.type == self.kind for tensor in found]
        if name in {"_to_copy", "copy_"} and given and found:
            source = given[-1] if name == "copy_" else given[0]
            if there[0] and source.device.type == "cpu":
                self.counts["copies in" if is_async else "waiting copies in"] += 1
                return
            if source.device.type == self.kind and not there[0]:
                self.counts["reads back" if is_async else "waiting reads back"] += 1
                return
        if (any(here) or any(there)) and name not in FREE:
            self.add(1)
            self.counts["clones of keys or values"] += name == "clone" and found[0].ndim > 2

    def add(self, kernels: int) -> None:
        self.counts["kernels"] += kernels
        self.counts["kernels outside of the pass"] += kernels * (not self.is_inside)

    @contextmanager
    def inside(self) -> Iterator[None]:
        self.is_inside = True
        try:
            yield
        finally:
            self.is_inside = False

    def of(self, work: Callable[[], object], steps: int = 1) -> Counts:
        """Counts per step of some work."""
        self.counts.clear()
        for _ in range(steps):
            work()
        names = ("kernels", "kernels outside of the pass", "clones of keys or values")
        names += ("copies in", "waiting copies in", "reads back", "waiting reads back")
        return {name: self.counts[name] / steps for name in names}


def measure(ways: Sequence[str]) -> dict[str, dict[str, Counts]]:
    """Counts of each kind of step, in some ways."""
    from tests import fake_accelerator as fake
    from tests.tiny import mixture_model

    from leaderless.models.routers import Routers

    paths = fake.tiny_model(), mixture_model(fake.tiny_model("qwen3"))  # made on the host
    fake.register()
    counting = Counting(fake.KIND)
    dispatch = fake.Accelerator.__torch_dispatch__

    def counted(self: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = dispatch(self, func, types, args, kwargs)
        is_async = bool((kwargs or {}).get("non_blocking")) or (len(args) > 2 and args[2] is True)
        counting.note(func.overloadpacket.__name__, (args, kwargs or {}), result, is_async=is_async)
        return result

    def listed(self: Any) -> Any:
        counting.counts["waiting reads back"] += self.device.type == fake.KIND
        return to_list(self)

    to_list, FakeTensor.tolist = FakeTensor.tolist, listed  # type: ignore[method-assign]
    fake.Accelerator.__torch_dispatch__ = counted
    warnings.filterwarnings("ignore", "Accessing the data pointer of FakeTensor")  # its addresses are all the same
    with fake.Accelerator():
        found = {}
        for name in ways:
            make, has_experts = MAKERS[name.removesuffix(EXPERTS)], name.endswith(EXPERTS)
            config = fake.ModelConfig(path=paths[has_experts])
            model: Any = fake.moved(fake.load_causal_lm(config, "policy").eval(), torch.bfloat16)
            routers = Routers.of(model) if has_experts else None

            def begin(make: Maker = make, model: Any = model, routers: Any = routers) -> Any:
                return make(model, fake.DEVICE, counting, routers)

            found[name] = steps_of(begin, counting)
        return found


def with_slots(model: Any, device: torch.device, counting: Counting, routers: Any) -> Any:
    from leaderless.rollout.native.engine import NativeEngine

    engine: Any = NativeEngine(model, None, frozenset(), 512, device, routers=routers)  # type: ignore[arg-type]
    run = engine._pass

    def passed(*args: object, **kwargs: object) -> object:
        with counting.inside():
            return run(*args, **kwargs)

    engine._pass = passed
    return engine


def with_pages(model: Any, device: torch.device, counting: Counting, routers: Any) -> Any:
    from leaderless.distributed.weights.stream import WeightStream
    from leaderless.rollout.native.paged_engine import PagedEngine, PagedOptions

    def attend(query: Tensor, *_: object) -> Tensor:
        counting.add(KERNELS)
        return query.new_empty(query.shape)

    def draw(*_: object) -> None:
        counting.add(DRAW_KERNELS)

    options = PagedOptions(attend, 1 << 18, 512, keeps_memory=True, draw=draw)
    engine: Any = PagedEngine(model, None, frozenset(), 512, device, options, routers)  # type: ignore[arg-type]
    engine.load_weights(WeightStream(iter([(name, one.detach()) for name, one in model.trained_weights()]), 1))
    compute = engine._compute

    def passed(*args: object) -> None:
        with counting.inside():
            compute(*args)

    engine._compute = passed
    return engine


MAKERS: dict[str, Maker] = {"slots": with_slots, "pages": with_pages}


def steps_of(make: Callable[[], Any], counting: Counting) -> dict[str, Counts]:
    """Counts of several kinds of steps."""
    from leaderless.config.rollout import SamplingConfig
    from leaderless.rollout.engine import Request, SamplingParams

    def begun(shorter: int) -> Any:
        engine = make()
        for group in range(GROUPS):
            request = Request([5] * (20 + 7 * group), [group << 16 | sibling for sibling in range(SIBLINGS)])
            engine.submit(request, SamplingParams(SamplingConfig(), shorter if group % 2 else 200, (), seed=1))
        found[f"{GROUPS} prompts are read"] = counting.of(engine.step)
        for _ in range(9):
            engine.step()
        return engine

    def until(engine: Any, is_over: Callable[[], bool]) -> Counts:
        """Counts of the step by which something is so."""
        while True:
            counts = counting.of(engine.step)
            if is_over():
                return counts

    found = dict[str, Counts]()
    engine = begun(200)
    found["128 responses"] = counting.of(engine.step, 5)
    active: Callable[[], Any] = lambda: engine._active  # noqa: E731
    shortest: Callable[[], int] = lambda: min(len(one.completion.tokens) for one in active().values())  # noqa: E731
    found["all of them outgrow 64 tokens"] = until(engine, lambda: shortest() > 65)
    engine = begun(20)
    found["half of them end"] = until(engine, lambda: len(active()) <= GROUPS * SIBLINGS // 2)
    engine.step()
    found["64 are left"] = counting.of(engine.step, 5)
    return found


def table(results: dict[str, dict[str, Counts]]) -> str:
    """A table in Markdown."""
    kinds = list(next(iter(next(iter(results.values())).values())))
    lines = [f"| step | in | {' | '.join(kinds)} |", f"| --- | --- | {' | '.join('---:' for _ in kinds)} |"]
    for step in next(iter(results.values())):
        for way, steps in results.items():
            lines.append(f"| {step} | {way} | {' | '.join(f'{steps[step][kind]:g}' for kind in kinds)} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--ways", nargs="+", default=[*MAKERS, *(name + EXPERTS for name in MAKERS)])
    options = parser.parse_args()
    sys.path.insert(0, str(ROOT))
    results = measure(options.ways)
    options.results.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    print(table(results))


if __name__ == "__main__":
    main()
