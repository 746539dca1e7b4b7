"""Fully distributed reinforcement-learning post-training: every worker computes the plan, none leads.

The names below are what recipes and user code need. They are loaded on first use, so that the planner and the
command line start without importing torch.
"""

from __future__ import annotations

import sys
from importlib import import_module
from typing import TYPE_CHECKING

from leaderless.base.moved_modules import MovedModules
from leaderless.base.versions import VERSION

if TYPE_CHECKING:
    from leaderless.config import Recipe as Recipe
    from leaderless.data.batch import Batch as Batch
    from leaderless.data.batch import Jagged as Jagged
    from leaderless.environments.programs import AskRefusedError as AskRefusedError
    from leaderless.environments.programs import Chat as Chat
    from leaderless.environments.protocol import Environment as Environment
    from leaderless.environments.protocol import EpisodeFailed as EpisodeFailed
    from leaderless.environments.protocol import Turn as Turn
    from leaderless.environments.tools import ToolError as ToolError
    from leaderless.environments.tools import tool as tool
    from leaderless.planner import Cluster as Cluster
    from leaderless.planner import make_plan as make_plan
    from leaderless.planner import rollout_engine as rollout_engine
    from leaderless.planner import train_backend as train_backend
    from leaderless.planner.workflow import Workflow as Workflow
    from leaderless.planner.workflow import load_recipe as load_recipe
    from leaderless.planner.workflow import stage as stage
    from leaderless.rewards.protocol import RewardInput as RewardInput
    from leaderless.rewards.protocol import RewardResult as RewardResult
    from leaderless.rewards.protocol import batch_reward as batch_reward
    from leaderless.rollout.make_engine import RolloutSetup as RolloutSetup
    from leaderless.run.run import Run as Run
    from leaderless.stages.context import StageContext as StageContext
    from leaderless.training.engine import EngineSetup as EngineSetup

__version__ = VERSION

_HOME = {
    "AskRefusedError": "leaderless.environments.programs",
    "Batch": "leaderless.data.batch",
    "Chat": "leaderless.environments.programs",
    "Cluster": "leaderless.planner",
    "EngineSetup": "leaderless.training.engine",
    "Environment": "leaderless.environments.protocol",
    "EpisodeFailed": "leaderless.environments.protocol",
    "Jagged": "leaderless.data.batch",
    "Recipe": "leaderless.config",
    "RewardInput": "leaderless.rewards.protocol",
    "RewardResult": "leaderless.rewards.protocol",
    "RolloutSetup": "leaderless.rollout.make_engine",
    "Run": "leaderless.run.run",
    "StageContext": "leaderless.stages.context",
    "ToolError": "leaderless.environments.tools",
    "Turn": "leaderless.environments.protocol",
    "Workflow": "leaderless.planner.workflow",
    "batch_reward": "leaderless.rewards.protocol",
    "load_recipe": "leaderless.planner.workflow",
    "make_plan": "leaderless.planner",
    "rollout_engine": "leaderless.planner",
    "stage": "leaderless.planner.workflow",
    "tool": "leaderless.environments.tools",
    "train_backend": "leaderless.planner",
}

__all__ = [
    "AskRefusedError",
    "Batch",
    "Chat",
    "Cluster",
    "EngineSetup",
    "Environment",
    "EpisodeFailed",
    "Jagged",
    "Recipe",
    "RewardInput",
    "RewardResult",
    "RolloutSetup",
    "Run",
    "StageContext",
    "ToolError",
    "Turn",
    "Workflow",
    "batch_reward",
    "load_recipe",
    "make_plan",
    "rollout_engine",
    "stage",
    "tool",
    "train_backend",
]


if not any(isinstance(finder, MovedModules) for finder in sys.meta_path):
    # First: an update in place leaves folders of earlier packages behind, which Python takes for packages.
    sys.meta_path.insert(0, MovedModules())


def __getattr__(name: str) -> object:
    """Import a public name from the module that owns it."""
    if name not in _HOME:
        raise AttributeError(f"module 'leaderless' has no attribute {name!r}")
    return getattr(import_module(_HOME[name]), name)
