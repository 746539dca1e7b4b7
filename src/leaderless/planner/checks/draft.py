"""A plan that is being made."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from leaderless.config import Recipe
from leaderless.planner.layout import Cluster
from leaderless.planner.memory.model_size import ModelSize
from leaderless.planner.plan_parts import PlannedNode, RoleInstance
from leaderless.planner.workflow import Workflow


@dataclass(frozen=True)
class Draft:
    """Known facts of a plan so far: the settings and the nodes, then the models, then their sizes."""

    recipe: Recipe
    workflow: Workflow
    cluster: Cluster
    nodes: Sequence[PlannedNode]
    instances: Sequence[RoleInstance] = ()
    sizes: Mapping[str, ModelSize | None] = field(default_factory=dict)

    def seen(self) -> Iterator[tuple[RoleInstance, Recipe]]:
        """The models, each with the recipe as its role sees it."""
        return ((instance, self.recipe.as_seen_by(instance.role)) for instance in self.instances)

    def node_of(self, instance: RoleInstance) -> str:
        """Name of the node that gives a model its layout."""
        return next(one.name for one in self.nodes if one.layout == instance.layout and instance.role in dict(one.uses))
