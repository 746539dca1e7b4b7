"""A plan, and the estimate of a step, as text for a terminal or a file."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING

from rich import box
from rich.console import Console, JustifyMethod
from rich.table import Table
from rich.text import Text

from leaderless.base.values import Json
from leaderless.config import Recipe
from leaderless.planner.entries import Action, Pull, Push, Repeat, Reshard, SyncWeights, Windowed
from leaderless.planner.layout import format_ranks
from leaderless.planner.memory.decoder_size import ModelSize
from leaderless.planner.memory.layers import layers_of_stage
from leaderless.planner.memory.rank import COMMANDS, MemoryEstimate, format_bytes
from leaderless.planner.plan import Plan
from leaderless.planner.plan_parts import PlannedNode, RoleInstance
from leaderless.planner.simulate.cluster import GIB, ClusterConfig

if TYPE_CHECKING:
    from leaderless.planner.simulate.step import Estimate

UNKNOWN_MEMORY = (
    "unknown: the config.json of the model is not on this machine,\n"
    "or it is no language model whose weights are counted;\n"
    "of a body, its environment or a model cannot be made here"
)


def print_plan(
    plan: Plan,
    console: Console,
    lowered: Mapping[str, int] | None = None,
    doors: Sequence[tuple[str, str]] = (),
    judges: Sequence[tuple[str, str]] = (),
    precision: Sequence[tuple[str, str]] = (),
) -> None:
    """Print what runs where, what is sent, and what it takes.

    Args:
        plan: The plan.
        console: Terminal or file.
        lowered: Bounds of a pass that earlier starts have lowered, by role.
        doors: Ranks that clients ask, with their addresses.
        judges: Judges by name, with what they are asked.
        precision: Engines that compute in low precision or with drafts, and corrections of their samples.
    """
    title = Text.assemble((plan.recipe_name, "bold"), f"  workflow {plan.workflow}, {_count(plan.world_size, 'rank')}")
    _print(console, title.append(f", plan {plan.hash()[:12]}", "dim"))
    _section(console, "Batch", _batch(plan, lowered or {}))
    _section(console, "Nodes, in order", _nodes(plan))
    if plan.pruned:
        reason = "nobody reads what it writes with these settings"
        _section(console, "Nodes that do not run", _table("", "", rows=[(name, reason) for name in plan.pruned]))
    if plan.repeat:
        _section(console, "Repeated nodes", _repeat(plan.repeat))
    if len(plan.loops) > 1:
        loops = [(Text(x.name, "bold"), format_ranks(x.ranks), x.pace, ", ".join(x.nodes)) for x in plan.loops]
        _section(console, "Loops", _table("loop", "ranks", "", "nodes", rows=loops))
    if plan.channels:
        _section(console, "Channels", _channels(plan))
        for line in _costs(plan):
            _print(console, Text(line, "dim"))
    _section(console, "Columns between nodes", _edges(plan))
    each = "a step" if len(plan.loops) == 1 else "an iteration of its loop"
    _section(console, f"What each rank does in {each}", _chains(plan))
    if doors:
        _section(console, "Where clients ask", _table("", "", rows=doors))
    if judges:
        _section(console, "Judges", _table("", "", rows=judges))
    if precision:
        _section(console, "Low precision and drafts", _table("", "", rows=precision))
    models = [(Text(one.role, "bold"), str(one.layout), _use(one, plan.sizes.get(one.role))) for one in plan.instances]
    _section(console, "Models", _table("role", "layout", "use", rows=models))
    if plan.memory is None:
        _section(console, "Memory of the fullest rank", _table("", rows=[(UNKNOWN_MEMORY,)]))
    else:
        _section(console, "Memory of the fullest rank, estimated", _memory(plan.memory))


def door_lines(recipe: Recipe, plan: Plan) -> list[tuple[str, str]]:
    """Rank and address of each replica that clients of an online run ask."""
    if (config := recipe.online) is None:
        return []
    ranks = next(node for node in plan.nodes if node.spec.samples).layout.representatives
    host = f"[{config.host}]" if ":" in config.host else config.host
    if not config.port:
        return [(f"rank {rank}", f"{host}, any free port") for rank in ranks]
    return [(f"rank {rank}", f"http://{host}:{port}/v1") for port, rank in enumerate(ranks, start=config.port)]


def print_estimate(plan: Plan, estimate: Estimate, cluster: ClusterConfig, console: Console) -> None:
    """Print what a step would take, and what does not fit."""
    head = f"  on {plan.world_size:,} ranks of {cluster.name}: a model, not a measurement\n"
    _print(console, Text.assemble((plan.recipe_name, "bold"), head))
    rows = {
        "a step": f"{estimate.seconds:.1f} s",
        "tokens per second": f"{estimate.tokens_per_s:,.0f}, {estimate.tokens_per_s / plan.world_size:,.0f} a rank",
        "moving rows": f"{estimate.transition_seconds:.2f} s, over all reshards of the step",
        "network": f"{format_bytes(estimate.interface_bytes)} through the busiest interface in the largest reshard",
        "rows in memory": f"{format_bytes(estimate.process_bytes)} in the busiest process",
    }
    _print(console, _table("", "", rows=[(Text(title, "bold"), value) for title, value in rows.items()]))
    _print_what_is_too_large(plan, estimate, cluster, console)


def print_estimates(found: Sequence[tuple[Plan, Estimate]], cluster: ClusterConfig, console: Console) -> None:
    """Print what a step would take on different numbers of ranks, and the tokens of a rank compared with the first."""
    head = f"  on {cluster.name}: a model, not a measurement\n"
    _print(console, Text.assemble((found[0][0].recipe_name, "bold"), head))
    speeds = [estimate.tokens_per_s / plan.world_size for plan, estimate in found]
    rows = [
        (
            f"{plan.world_size:,}",
            f"{estimate.seconds:.1f} s",
            f"{estimate.tokens_per_s:,.0f}",
            f"{speed:,.0f}",
            f"{speed / speeds[0]:.1%}",
            f"{estimate.transition_seconds:.2f} s",
            format_bytes(estimate.process_bytes),
        )
        for (plan, estimate), speed in zip(found, speeds, strict=True)
    ]
    titles = ("ranks", "a step", "tokens/s", "a rank", "share", "moving rows", "rows in memory")
    _print(console, _table(*titles, rows=rows, right=range(len(titles))))
    for plan, estimate in found:
        _print_what_is_too_large(plan, estimate, cluster, console, f"{plan.world_size:,} ranks: ")


def _print_what_is_too_large(
    plan: Plan, estimate: Estimate, cluster: ClusterConfig, console: Console, head: str = ""
) -> None:
    held = plan.memory.accelerator.peak if plan.memory else 0
    for what, needed, part, there in (
        ("models and activations", held, "device", cluster.device.memory_gib),
        ("rows", estimate.host_bytes, "host", cluster.host.memory_gib),
    ):
        if needed > there * GIB:
            line = f"{head}{what} take {format_bytes(needed)} of a {part}, which has {there:g} GiB"
            _print(console, Text(line, "yellow"))


def estimate_to_json(plan: Plan, estimate: Estimate, cluster: ClusterConfig) -> Json:
    """An estimate as JSON-able values, with every constant of the model."""
    return {
        "recipe": plan.recipe_name,
        "world_size": plan.world_size,
        "cluster": cluster.model_dump(mode="json"),
        "device_bytes": plan.memory.accelerator.peak if plan.memory else None,
        "estimate": asdict(estimate),
    }


def print_section(console: Console, title: str, rows: Iterable[Sequence[str | Text]]) -> None:
    """Print rows under a title."""
    _section(console, title, _table("", "", rows=rows))


def _section(console: Console, title: str, content: Table | Text) -> None:
    _print(console, Text(f"\n{title}", "bold"))
    _print(console, content)


def _print(console: Console, content: Table | Text) -> None:
    """Print as it is: names that users chose are no markup."""
    console.print(content, markup=False, highlight=False, emoji=False, overflow="fold")


def _table(*titles: str, rows: Iterable[Sequence[str | Text]], right: Sequence[int] = ()) -> Table:
    """A table whose cells fold; columns in `right` are aligned to the right."""
    made = Table(box=box.SIMPLE_HEAD, show_edge=False, show_header=any(titles), padding=(0, 1))
    for number, title in enumerate(titles):
        side: JustifyMethod = "right" if number in right else "left"
        made.add_column(Text(title), overflow="fold", justify=side, header_style="dim")
    for row in rows:
        made.add_row(*(Text(cell) if isinstance(cell, str) else cell for cell in row))
    return made


def _batch(plan: Plan, lowered: Mapping[str, int]) -> Table:
    batch = plan.batch
    is_sampled = batch.samples_per_step != batch.prompts_per_step
    samples = f", {batch.samples_per_step:,} samples" if is_sampled else ""
    per_update = f", {batch.samples_per_update:,} samples" if is_sampled else ""
    per_rank = _count(batch.max_prompts_per_rank, "prompt")
    auto = " to begin with (auto), lowered where memory is short"
    rows = [
        ("a step", f"{_count(batch.prompts_per_step, 'prompt')}{samples}; at most {per_rank} a rank"),
        ("an update", f"at most {_count(batch.prompts_per_update, 'prompt')}{per_update}"),
        ("the run", _count(batch.optimizer_steps, "update")),
        ("a pass", f"at most {_count(batch.micro_batch_tokens, 'token')} a rank" + auto * batch.adapts_to_memory),
        *((f"a pass of {role}", f"{_count(tokens, 'token')}: more did not fit") for role, tokens in lowered.items()),
    ]
    return _table("", "", rows=rows)


def _nodes(plan: Plan) -> Table:
    rows = [
        (Text(node.name, "bold"), node.node.run, ", ".join(dict(node.uses)) or "-", str(node.layout), _columns(node))
        for node in plan.nodes
    ]
    return _table("node", "run", "role", "layout", "columns", rows=rows)


def _columns(node: PlannedNode) -> Text:
    """Columns that a node reads, by the node that they come from, and columns that it writes."""
    by_source: dict[str, list[str]] = {}
    for column, source in node.reads.items():
        by_source.setdefault(source, []).append(column)
    lines = [
        Text.assemble(("reads ", "dim"), ", ".join(columns), (" <- ", "dim"), (source, "cyan"))
        for source, columns in by_source.items()
    ]
    if node.writes:
        lines.append(Text.assemble(("writes ", "dim"), ", ".join(node.writes)))
    return Text("\n").join(lines or [Text("reads and writes none", "dim")])


def _repeat(repeat: Repeat) -> Table:
    rows = [
        ("repeats", ", ".join(repeat.nodes)),
        ("until", f"{_count(repeat.num_groups, 'group')} have come out of {repeat.last}"),
        ("at most", f"{_count(repeat.max_rounds, 'round')} of {_count(repeat.num_groups, 'prompt')} a step"),
    ]
    if repeat.num_groups > 1:
        rows.append(("left over", f"at most {_count(repeat.num_groups - 1, 'group')}, for the next step"))
    return _table("", "", rows=rows)


def _costs(plan: Plan) -> Iterator[str]:
    """Cost of continuous generation where lengths differ much."""
    for rank, owner in plan.helpers.items():
        yield f"Rank {rank} generates on the device of rank {owner}, while that one does not use it."
    for loop in plan.continuous_loops:
        rows = next(channel for channel in plan.channels if channel.kind == "rows" and channel.source == loop.name)
        bound = _count(rows.max_staleness, "update")
        if loop.stragglers == "wait":
            yield f"A response that takes longer than {_count(loop.lag + 1, 'step')} of training holds it up."
        elif loop.stragglers == "defer":
            yield f"Finished groups overtake others; training waits for one whose tokens would be over {bound} old."
        else:
            yield f"Finished groups overtake others; one whose tokens would be over {bound} old is dropped."
            yield "Such prompts are begun again after all others, so that long responses are trained late."


def _channels(plan: Plan) -> Table:
    rows = [
        (
            Text(channel.name, "magenta" if channel.kind == "weights" else "yellow"),
            channel.kind,
            _count(channel.capacity, "iteration"),
            _count(channel.max_staleness, "update"),
            ", ".join(map(str, channel.transfers)) or "nothing: surplus stays on its ranks",
        )
        for channel in plan.channels
    ]
    return _table("channel", "carries", "in flight", "oldest", "sends", rows=rows)


def _edges(plan: Plan) -> Table:
    rows = [
        (
            f"{edge.source} -> {edge.target}",
            Text(edge.kind, "" if edge.kind == "local" else "bold yellow"),
            format_bytes(edge.max_bytes),
            ", ".join(edge.columns),
        )
        for edge in plan.edges
    ]
    return _table("edge", "kind", "at most", "columns", rows=rows, right=(2,))


def _chains(plan: Plan) -> Table:
    rows = [
        (format_ranks(ranks) + (f" ({len(ranks):,} ranks)" if len(ranks) > 1 else ""), _chain(chain))
        for ranks, chain in plan.chains().items()
    ]
    return _table("ranks", "chain", rows=rows)


def _chain(actions: Iterable[Action]) -> Text:
    return Text(" -> ").join(map(_action, actions))


def _action(action: Action) -> Text:
    if isinstance(action, Repeat | Windowed):
        name = "repeat" if isinstance(action, Repeat) else f"{action.num_windows} windows"
        return Text.assemble(f"{name}(", _chain(action.body), ")")
    style = "yellow" if isinstance(action, Reshard | Push | Pull) else ""
    style = "magenta" if isinstance(action, SyncWeights) else style
    return Text(str(action), style)


def _use(instance: RoleInstance, size: ModelSize | None) -> str:
    num_adapted = size.num_adapter_parameters if size else 0
    own = instance.engine_layout if instance.engine_layout != instance.layout else None
    uses = {
        "is a critic": instance.is_critic,
        f"{'judges' if instance.is_judge else 'generates'} with {instance.engine}"
        f"{f' on {own}' if own else ''}": instance.has_engine,
        "scores": instance.scores,
        f"trains adapters ({num_adapted:,} weights)" if num_adapted else "is trained": instance.is_trained,
        f"has {_stages(instance.layout.pp, size)}": instance.layout.pp > 1 and not instance.is_engine_only,
    }
    return ", ".join(use for use, is_so in uses.items() if is_so)


def _stages(pp: int, size: ModelSize | None) -> str:
    """The stages of a pipeline: `2 stages of 13 and 12 layers`."""
    if size is None:
        return f"{pp} stages"
    counts = [len(layers_of_stage(size.num_layers, pp, stage)) for stage in range(pp)]
    return f"{pp} stages of {' and '.join(str(count) for count in dict.fromkeys(counts))} layers"


def _memory(estimate: MemoryEstimate) -> Table:
    """Every part of every phase, and the peak that follows, on a CPU and on an accelerator."""
    kinds = (estimate.cpu, estimate.accelerator)
    rows: list[tuple[Text | str, ...]] = []

    def add(title: str, parts: Sequence[Mapping[str, int]]) -> None:
        if any(any(part.values()) for part in parts):
            rows.append((Text(title, "bold"), *(_bytes(sum(part.values())) for part in parts)))
            for name in dict.fromkeys(name for part in parts for name in part):
                sizes = [part.get(name, 0) for part in parts]
                if any(sizes):
                    rows.append((f"  {name}", *map(_bytes, sizes)))

    add("all the time", [memory.resident for memory in kinds])
    for phase in dict.fromkeys(name for memory in kinds for name in memory.phases):
        add(f"while {phase}" if " " in phase else phase, [memory.phases.get(phase, {}) for memory in kinds])
    rows.append((Text("peak", "bold"), *(_bytes(memory.peak) for memory in kinds)))
    add("in the memory of the host", [memory.host for memory in kinds])
    add("on the disk", [memory.disk for memory in kinds])
    for phase in dict.fromkeys(name for memory in kinds for name in memory.apart):
        title = Text(f"to {phase}" if phase in COMMANDS else phase, "bold")
        rows += [(title, *(_bytes(memory.totals.get(phase, 0)) for memory in kinds))]
    return _table("", "on a CPU", "on an accelerator", rows=rows, right=(1, 2))


def _bytes(size: int) -> str:
    return format_bytes(size) if size else "-"


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}" + ("" if number == 1 else "s")
