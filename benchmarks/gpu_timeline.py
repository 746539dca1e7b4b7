"""A part of `benchmarks/gpu.py`: a timeline of decoding and training; and pictures of timelines.

    python benchmarks/gpu_timeline.py TRACE [PICTURE]

draws any Chrome trace of torch's profiler, such as those of `run.profiled_step`. Operations are sorted by their names
into a few kinds. The upper lanes show what the device does, by stream, and the lowest one what the host does meanwhile:
it starts work, or waits. In a trace without a device the operations of the CPU are shown instead.
"""

from __future__ import annotations

import json
import math
import re
import sys
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from gpu_machine import Machine, Result

KINDS = {
    "communication": r"nccl|hccl|c10d",
    "copies": r"memcpy|memset|^aten::(copy_|clone|to$|_to_copy|cat|index_copy_)",
    "attention": r"flash|fmha|attend|attention|paged",
    "products": r"gemm|cutlass|cublas|xmma|wgmma|nvjet|splitk|matmul|^aten::(mm|addmm|bmm|baddbmm|linear|matmul)$",
    "optimizer": r"adam|multi_tensor|_foreach_",
    "other operations": "",
}
"""Kinds of a device's operations by a part of their names; the first that fits counts, and the last fits all."""
COLORS = {
    "products": "#4269d0",
    "attention": "#efb118",
    "other operations": "#6cc5b0",
    "optimizer": "#a463f2",
    "copies": "#ff725c",
    "communication": "#9c6b4e",
    "starts work": "#3d4048",
    "waits": "#cdd1d8",
}
ON_DEVICE = {"kernel", "gpu_memcpy", "gpu_memset"}
STARTS, WAITS = r"launch", r"synchronize"
"""Calls of CUDA's runtime by which the host starts work, and by which it waits."""
MOST_GAPS = 4000
"""Parts into which a picture is divided: operations of a kind that are closer together are drawn as one."""


class Operation(NamedTuple):
    """Something that a device or the host does.

    Attributes:
        lane: Stream of the device, or `host`.
        kind: Key of `COLORS`.
        name: Name in the trace.
        begin: Its begin in µs.
        length: Its length in µs.
    """

    lane: str
    kind: str
    name: str
    begin: float
    length: float


def kind_of(name: str) -> str:
    return next(kind for kind, pattern in KINDS.items() if re.search(pattern, name, re.IGNORECASE))


def operations_of(events: Iterable[Mapping[str, Any]]) -> list[Operation]:
    """What devices and the host do by a Chrome trace, in the order of begins, from 0 on.

    Args:
        events: Events of a trace of torch's profiler.
    """
    spans = [event for event in events if event.get("ph") == "X"]
    found = []
    for event in spans:
        category, name = event.get("cat", ""), event["name"]
        if category in ON_DEVICE:
            stream = event.get("args", {}).get("stream", event.get("tid"))
            found.append(Operation(f"stream {stream}", kind_of(name), name, event["ts"], event["dur"]))
        elif category in {"cuda_runtime", "cuda_driver"}:
            kind = "waits" if re.search(WAITS, name, re.IGNORECASE) else "starts work"
            if kind == "waits" or re.search(STARTS, name, re.IGNORECASE):
                found.append(Operation("host", kind, name, event["ts"], event["dur"]))
    if not any(operation.lane != "host" for operation in found):
        found = list(own_spans(spans))
    begin = min((operation.begin for operation in found), default=0.0)
    return sorted((one._replace(begin=one.begin - begin) for one in found), key=lambda one: one.begin)


def own_spans(spans: Iterable[Mapping[str, Any]]) -> Iterator[Operation]:
    """What operations of the CPU do themselves: the time in which they are in progress and none that they call."""
    by_thread: dict[object, list[Mapping[str, Any]]] = defaultdict(list)
    for span in spans:
        if span.get("cat") == "cpu_op":
            by_thread[span.get("tid")].append(span)
    for thread in by_thread.values():
        calls: list[tuple[str, float]] = []  # names and ends of those in progress, the innermost last
        now = 0.0
        for span in [
            *sorted(thread, key=lambda span: (span["ts"], -span["dur"])),
            {"name": "", "ts": math.inf, "dur": 0},
        ]:
            while calls and calls[-1][1] <= span["ts"]:
                name, end = calls.pop()
                if end > now:
                    yield Operation("CPU", kind_of(name), name, now, end - now)
                    now = end
            if calls and span["ts"] > now:
                yield Operation("CPU", kind_of(calls[-1][0]), calls[-1][0], now, span["ts"] - now)
            calls.append((span["name"], span["ts"] + span["dur"]))
            now = span["ts"]


def summary(operations: Sequence[Operation]) -> dict[str, Any]:
    """Lengths of a trace in ms, the share of it in which a device computes, and the time of each kind.

    Returns:
        `ms`, `busy`, `kinds` in ms by kind, the number of `operations`, and `lanes`: the begins and lengths in µs by
        lane and kind, with those joined that a picture cannot show apart.
    """
    own = [one for one in operations if one.lane != "host"]
    end = max((one.begin + one.length for one in operations), default=0.0)
    kinds: dict[str, float] = defaultdict(float)
    for one in operations:
        kinds[one.kind] += one.length
    streams = sorted({one.lane for one in own}, key=lambda lane: -covered([one for one in own if one.lane == lane]))
    spans: dict[str, dict[str, list[float]]] = {lane: defaultdict(list) for lane in (*streams, "host")}
    for lane, kind, *span in joined(operations, end / MOST_GAPS):
        spans[lane][kind] += span
    return {
        "ms": end / 1e3,
        "busy": covered(own) / end if end else 0.0,
        "kinds": {kind: kinds[kind] / 1e3 for kind in COLORS if kind in kinds},
        "operations": len(own),
        "lanes": {
            lane: {kind: " ".join(f"{x:g}" for x in xs) for kind, xs in own.items()}
            for lane, own in spans.items()
            if own
        },
    }


def covered(operations: Sequence[Operation]) -> float:
    """Microseconds in which at least one of some operations is in progress."""
    total, until = 0.0, 0.0
    for one in sorted(operations, key=lambda one: one.begin):
        end = one.begin + one.length
        total += max(0.0, end - max(until, one.begin))
        until = max(until, end)
    return total


def joined(operations: Sequence[Operation], gap: float) -> list[tuple[str, str, float, float]]:
    """Spans of each lane: neighbors of one kind, with a smaller gap between them, are one."""
    spans: list[tuple[str, str, float, float]] = []
    last: dict[str, int] = {}
    for one in operations:
        end, at = one.begin + one.length, last.get(one.lane)
        if at is not None and spans[at][1] == one.kind and one.begin - (spans[at][2] + spans[at][3]) < gap:
            lane, kind, begin, length = spans[at]
            spans[at] = (lane, kind, begin, round(max(begin + length, end) - begin, 1))
        else:
            last[one.lane] = len(spans)
            spans.append((one.lane, one.kind, round(one.begin, 1), round(one.length, 1)))
    return spans


def recorded(work: Callable[[], object], *, is_cuda: bool) -> list[Operation]:
    """What some work does under torch's profiler, which waits for the device at its end."""
    import torch
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA if is_cuda else ProfilerActivity.CPU]) as found:
        work()
        if is_cuda:
            torch.cuda.synchronize()
    with tempfile.TemporaryDirectory(prefix="gpu-timeline-") as folder:
        path = Path(folder) / "trace.json"
        found.export_chrome_trace(str(path))
        return operations_of(events_of(path))


def events_of(path: Path) -> list[Mapping[str, Any]]:
    """The events of a Chrome trace."""
    content = json.loads(path.read_text(encoding="utf-8"))
    events: list[Mapping[str, Any]] = content["traceEvents"] if isinstance(content, dict) else content
    return events


def timeline(machine: Machine) -> Result:
    """Three steps of decoding and one pass of training with its optimizer step, by what the device does when."""
    from gpu_machine import samples
    from leaderless.config.rollout import SamplingConfig
    from leaderless.rollout.engine import SamplingParams

    is_cuda = machine.device.type == "cuda"
    with machine.model_folder() as folder:
        engine = machine.native(machine.sampler(folder), "pages")
        for request in machine.requests():
            engine.submit(request, SamplingParams(SamplingConfig(), 100))
        for _ in range(20):
            engine.step()
        decoding = recorded(lambda: [engine.step() for _ in range(3)], is_cuda=is_cuda)
        engine.close()
        with machine.trainer(folder) as trainer:
            batch = samples(machine.preset, machine.preset.vocabulary)

            def update() -> None:
                for micro_batch in trainer.micro_batches(batch):
                    trainer.forward(micro_batch, "value").log_probs.mean().backward()
                trainer.optimizer_step()

            update()  # compilers work in the first one
            training = recorded(update, is_cuda=is_cuda)
    panels = {
        "three steps of decoding": decoding,
        "their middle third": middle_third(decoding),
        "a pass of training and its optimizer step": training,
    }
    return {"panels": {title: summary(found) for title, found in panels.items()}}


def middle_third(operations: Sequence[Operation]) -> list[Operation]:
    """What happens in the middle third of a trace, from 0 on; of three steps that is about one."""
    end = max((one.begin + one.length for one in operations), default=0.0)
    kept = []
    for one in operations:
        begin, until = max(one.begin, end / 3), min(one.begin + one.length, 2 * end / 3)
        if begin < until:
            kept.append(one._replace(begin=begin - end / 3, length=until - begin))
    return kept


def draw(panels: Mapping[str, Mapping[str, Any]], path: Path) -> None:
    """A panel for each summary by its title: lanes from top to bottom, time from left to right, kinds as colors."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt
    from matplotlib.patches import Patch

    heights = [0.55 + 0.42 * len(found["lanes"]) for found in panels.values()]
    legend = 0.45
    size = 11, sum(heights) + 0.5 * len(panels) + legend
    figure, rows = plt.subplots(len(panels), 1, figsize=size, squeeze=False, height_ratios=heights)
    for (title, found), panel in zip(panels.items(), rows[:, 0], strict=True):
        _draw_lanes(panel, found)
        panel.set_title(f"{title}: {found['ms']:,.2f} ms, {found['busy']:.0%} busy", loc="left", fontsize=11)
    present = {kind for found in panels.values() for kind in found["kinds"]}
    patches = [Patch(color=color, label=kind) for kind, color in COLORS.items() if kind in present]
    figure.legend(handles=patches, loc="lower center", ncols=len(patches), frameon=False, fontsize=9, columnspacing=1.2)
    figure.tight_layout(rect=(0, legend / size[1], 1, 1), h_pad=1.2)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)
    plt.close(figure)


def _draw_lanes(panel: Axes, found: Mapping[str, Any]) -> None:
    lanes = found["lanes"]
    for place, kinds in enumerate(lanes.values()):
        for kind, text in kinds.items():
            spans = [(begin / 1e3, length / 1e3) for begin, length in _pairs(text)]
            panel.broken_barh(spans, (place - 0.38, 0.76), facecolors=COLORS[kind], linewidth=0)
    panel.set_yticks(range(len(lanes)), list(lanes), fontsize=9)
    panel.set_ylim(len(lanes) - 0.45, -0.55)
    panel.set_xlim(0, found["ms"])
    panel.xaxis.set_major_formatter(lambda value, _: f"{value:g} ms")
    panel.tick_params(axis="x", labelsize=9)
    panel.tick_params(axis="y", length=0)
    panel.set_facecolor("#f6f6f4")
    for side in ("top", "right", "left"):
        panel.spines[side].set_visible(False)


def _pairs(text: str) -> Iterator[tuple[float, float]]:
    numbers = [float(number) for number in text.split()]
    return zip(numbers[::2], numbers[1::2], strict=True)


def main() -> None:
    trace = Path(sys.argv[1])
    picture = Path(sys.argv[2]) if len(sys.argv) > 2 else trace.with_suffix(".png")
    draw({trace.stem: summary(operations_of(events_of(trace)))}, picture)
    print(picture)


if __name__ == "__main__":
    main()
