"""The kinds of runs, and facts about what a recipe names, by functions of rooms above. Imports no torch.

Functions are named as `package.module:function`, and only what calls one imports it: nothing imports policies and
simulators, or a server, but the runs that need them. Environments are classes and functions of users, and so is the
knowledge of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

from leaderless.base.named_functions import load_function
from leaderless.config.environment import EnvironmentConfig

if TYPE_CHECKING:
    from leaderless.config.recipe import Product


@dataclass(frozen=True)
class ProductFunctions:
    """The functions of a kind of run; an empty name stands for what other runs do.

    Attributes:
        check: Function of a recipe that tries what it names before anything starts.
        memory: Function that estimates the memory of a rank; see `estimate_memory`.
        rollout_engine: Function that makes what generates; see
            `leaderless.embodied.rollout.policy_rollout.make_engine`.
        weight_shapes: Function that finds the shapes of the weights that are sent to it; see `body_shapes`.
        evaluation: Function that grades episodes of held-out tasks; see `evaluate_bodies`.
        evaluation_metrics: Metrics of an evaluation about the length of responses.
        clients: Function that reserves the address at which clients ask a rank; see `Entrance`.
        reads_text: Whether its models have layers that read text, whose matrices are known by their names.
    """

    check: str = ""
    memory: str = ""
    rollout_engine: str = ""
    weight_shapes: str = ""
    evaluation: str = ""
    evaluation_metrics: tuple[str, ...] = ("evaluation/truncated", "evaluation/response_tokens")
    clients: str = ""
    reads_text: bool = True


PRODUCTS: Mapping[Product, ProductFunctions] = {
    "text": ProductFunctions(),
    "episodes": ProductFunctions(),
    "online": ProductFunctions(clients="leaderless.serving.online.server:OnlineEntrance"),
    "bodies": ProductFunctions(
        check="leaderless.embodied.simulators.registry:check_recipe",
        memory="leaderless.embodied.planning.memory:estimate_body_memory",
        rollout_engine="leaderless.embodied.rollout.policy_rollout:make_engine",
        weight_shapes="leaderless.embodied.rollout.policy_rollout:body_shapes",
        evaluation="leaderless.embodied.stages.rollout:evaluate_bodies",
        evaluation_metrics=(),
        reads_text=False,
    ),
}
"""The functions of each kind of run; the functions of its stages are in their contracts."""


FACTS = "leaderless.environments.registry"
"""Module whose functions say what the environment of a recipe is like, each from the recipe's section."""


def agents_of(config: EnvironmentConfig) -> tuple[str, ...]:
    """Names of the agents of an environment; none of a program, which has one without a name.

    Raises:
        RecipeError: There is no such environment, or its constructor does not take the options.
    """
    return _ask("named_agents", config)


def tools_of(config: EnvironmentConfig) -> tuple[str, ...]:
    """Names of the tools of an environment, and of tools that the recipe adds, without tools of servers.

    Raises:
        RecipeError: As of `agents_of`; or a tool cannot be described, or two have the same name.
    """
    return _ask("named_tools", config)


def _ask(name: str, config: EnvironmentConfig) -> tuple[str, ...]:
    return cast("tuple[str, ...]", load_function(f"{FACTS}:{name}", "environment.type", 1)(config))
