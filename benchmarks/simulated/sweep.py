"""Many simulated steps, one for each number of ranks, batch or context."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Literal

from benchmarks.simulated.controllers import OURS, ComparedCluster, estimate_ways

from leaderless.base.values import Json
from leaderless.config import Recipe
from leaderless.planner import Plan
from leaderless.planner.simulate.cluster import GIB
from leaderless.planner.simulate.rows import sample_workload
from leaderless.planner.simulate.step import Estimate

AxisName = Literal["world_size", "prompts_per_step", "context_tokens"]

AXES: Mapping[AxisName, str] = {
    "world_size": "ranks",
    "prompts_per_step": "prompts",
    "context_tokens": "context",
}
"""Title of each axis."""

PlanFor = Callable[[Sequence[str], int], tuple[Recipe, Plan]]
"""Plans the recipe with additional settings on a number of ranks."""


@dataclass(frozen=True)
class Settings:
    """One point of a sweep.

    Attributes:
        world_size: Number of ranks.
        overrides: `section.key=value` each.
    """

    world_size: int
    overrides: tuple[str, ...]


@dataclass(frozen=True)
class Point:
    """A simulated step.

    Attributes:
        world_size: Number of ranks.
        prompts_per_step: Prompts per step of the recipe.
        context_tokens: Length of the longest sequence.
        plan_seconds: Time that the planner took on this machine.
        device_bytes: Memory that the planner expects on the fullest device.
        fits_device: Whether that memory is available.
        estimates: Estimate for each data path.
    """

    world_size: int
    prompts_per_step: int
    context_tokens: int
    plan_seconds: float
    device_bytes: int
    fits_device: bool
    estimates: Mapping[str, Estimate]

    def tokens_per_rank(self, way: str) -> float:
        """Tokens per second of each rank.

        Args:
            way: Data path.
        """
        return self.estimates[way].tokens_per_s / self.world_size

    def gain(self, way: str) -> float:
        """Throughput of the project's own data path, as a multiple of another's.

        Args:
            way: The other.
        """
        return self.estimates[OURS].tokens_per_s / self.estimates[way].tokens_per_s


@dataclass(frozen=True)
class Sweep:
    """Simulated steps that differ in one thing.

    Attributes:
        recipe: Name of the recipe.
        cluster: Constants of the cluster.
        axis: Quantity that varies.
        points: Simulated steps in the requested order, at least one.
    """

    recipe: str
    cluster: ComparedCluster
    axis: AxisName
    points: tuple[Point, ...]

    @property
    def ways(self) -> tuple[str, ...]:
        """The data paths, the project's own first."""
        return tuple(self.points[0].estimates)

    def place(self, point: Point) -> int:
        """Where a point is on the axis.

        Args:
            point: Point of the sweep.
        """
        places: Mapping[AxisName, int] = {
            "world_size": point.world_size,
            "prompts_per_step": point.prompts_per_step,
            "context_tokens": point.context_tokens,
        }
        return places[self.axis]

    def efficiency(self, point: Point, way: str) -> float:
        """Tokens per second of each rank, as a share of those at the first point.

        Args:
            point: Point of the sweep.
            way: Data path.
        """
        return point.tokens_per_rank(way) / self.points[0].tokens_per_rank(way)

    def to_json(self) -> Json:
        """All results as JSON-able values."""
        return {
            "recipe": self.recipe,
            "cluster": self.cluster.model_dump(mode="json"),
            "axis": self.axis,
            "points": [asdict(point) for point in self.points],
        }


def settings_of(
    recipe: Recipe,
    world_sizes: Sequence[int],
    prompts: Sequence[int],
    contexts: Sequence[int],
    prompts_per_rank: int | None,
) -> tuple[AxisName, tuple[Settings, ...]]:
    """The axis that varies, and the settings of each point.

    A context is a prompt of the longest allowed length and its response; a micro-batch has room for it.

    Args:
        recipe: Recipe without further settings.
        world_sizes: Numbers of ranks, at least one.
        prompts: Numbers of prompts per step; empty for the recipe's.
        contexts: Lengths of prompt and response together; empty for the recipe's.
        prompts_per_rank: Prompts per step for each rank, where the batch grows with the ranks.

    Raises:
        ValueError: More than one thing varies, the batch is given twice, or a context leaves no room for responses.
    """
    given: Mapping[AxisName, Sequence[int]] = {
        "world_size": world_sizes,
        "prompts_per_step": prompts,
        "context_tokens": contexts,
    }
    several = [name for name, values in given.items() if len(values) > 1]
    if len(several) > 1:
        raise ValueError(
            f"{' and '.join(AXES[name] for name in several)} both have several values: vary one of them, and run again "
            "for the other"
        )
    if prompts and prompts_per_rank is not None:
        raise ValueError(f"a step cannot have {prompts[0]} prompts and {prompts_per_rank} for each rank: give one")
    longest_prompt = recipe.data.max_prompt_tokens
    for context in contexts:
        if context <= longest_prompt:
            raise ValueError(
                f"a context of {context} tokens leaves no room for a response behind a prompt of {longest_prompt} "
                "(data.max_prompt_tokens): give a longer one, or shorten prompts"
            )
    points: list[Settings] = []
    for size in world_sizes:
        batches = [prompts_per_rank * size] if prompts_per_rank is not None else prompts
        for batch in [[f"batch.prompts_per_step={count}"] for count in batches] or [[]]:
            points += [Settings(size, (*batch, *_context(recipe, tokens))) for tokens in contexts]
            points += [Settings(size, tuple(batch))] * (not contexts)
    return several[0] if several else "world_size", tuple(points)


def _context(recipe: Recipe, tokens: int) -> tuple[str, str]:
    """Settings that give sequences this number of tokens, and a micro-batch room for one."""
    response = f"rollout.max_response_tokens={tokens - recipe.data.max_prompt_tokens}"
    return response, f"batch.micro_batch_tokens={max(tokens, recipe.batch.first_micro_batch_tokens(tokens))}"


def simulate(points: Sequence[Settings], plan_for: PlanFor, cluster: ComparedCluster) -> Iterator[Point]:
    """Simulate one step at each point.

    Args:
        points: Settings of each.
        plan_for: Plans the recipe.
        cluster: Constants of the cost model.

    Raises:
        RecipeError: A recipe cannot be planned, or a step cannot be simulated.
    """
    for point in points:
        begin = time.perf_counter()
        recipe, plan = plan_for(point.overrides, point.world_size)
        plan_seconds = time.perf_counter() - begin
        estimates = estimate_ways(plan, recipe, sample_workload(recipe, cluster.workload), cluster)
        assert plan.memory is not None, "a step whose models have no known size is refused"
        yield Point(
            world_size=point.world_size,
            prompts_per_step=recipe.batch.prompts_per_step,
            context_tokens=recipe.data.max_prompt_tokens + recipe.rollout.max_response_tokens,
            plan_seconds=plan_seconds,
            device_bytes=plan.memory.accelerator.peak,
            fits_device=plan.memory.accelerator.peak <= cluster.device.memory_gib * GIB,
            estimates=estimates,
        )
