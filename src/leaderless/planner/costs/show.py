"""A simulated step for a reader at a terminal, or for a program."""

from __future__ import annotations

from dataclasses import asdict

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from leaderless.config import Json
from leaderless.planner import Plan, format_bytes
from leaderless.planner.costs.cluster import GIB, ClusterConfig
from leaderless.planner.costs.step import Estimate


def print_estimate(plan: Plan, estimate: Estimate, cluster: ClusterConfig, console: Console) -> None:
    """Print what a step would take, and what does not fit.

    Args:
        plan: Plan of the recipe.
        estimate: Estimate of one of its steps.
        cluster: Constants of the machines.
        console: Console, which folds lines at its width.
    """
    head = f"  on {plan.world_size:,} ranks of {cluster.name}: a model, not a measurement\n"
    console.print(Text.assemble((plan.recipe_name, "bold"), head), highlight=False)
    rows = {
        "a step": f"{estimate.seconds:.1f} s",
        "tokens per second": f"{estimate.tokens_per_s:,.0f}, {estimate.tokens_per_s / plan.world_size:,.0f} a rank",
        "moving rows": f"{estimate.transition_seconds:.2f} s, over all reshards of the step",
        "network": f"{format_bytes(estimate.interface_bytes)} through the busiest interface in the largest reshard",
        "rows in memory": f"{format_bytes(estimate.process_bytes)} in the busiest process",
    }
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, show_header=False, padding=(0, 1))
    for title, value in rows.items():
        table.add_row(Text(title, "bold"), Text(value))
    console.print(table, highlight=False)
    held = plan.memory.accelerator.peak if plan.memory else 0
    for what, needed, part, there in (
        ("models and activations", held, "device", cluster.device.memory_gib),
        ("rows", estimate.host_bytes, "host", cluster.host.memory_gib),
    ):
        if needed > there * GIB:
            line = f"{what} take {format_bytes(needed)} of a {part}, which has {there:g} GiB"
            console.print(Text(line, "yellow"), highlight=False)


def to_json(plan: Plan, estimate: Estimate, cluster: ClusterConfig) -> Json:
    """The same as JSON-able values, with every constant of the model.

    Args:
        plan: Plan of the recipe.
        estimate: Estimate of one of its steps.
        cluster: Constants of the machines.
    """
    return {
        "recipe": plan.recipe_name,
        "world_size": plan.world_size,
        "cluster": cluster.model_dump(mode="json"),
        "device_bytes": plan.memory.accelerator.peak if plan.memory else None,
        "estimate": asdict(estimate),
    }
