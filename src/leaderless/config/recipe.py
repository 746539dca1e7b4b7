"""The recipe: everything a user may set."""

from __future__ import annotations

from collections.abc import Mapping

from pydantic import Field, field_validator, model_validator

from leaderless.config.algorithm import AlgorithmConfig
from leaderless.config.base import Section
from leaderless.config.data import DataConfig
from leaderless.config.layout import LayoutConfig
from leaderless.config.models import ModelConfig, OptimizerConfig
from leaderless.config.rewards import RewardsConfig
from leaderless.config.rollout import BatchConfig, EvaluationConfig, RolloutConfig
from leaderless.config.run import CheckpointConfig, GuardsConfig, RunConfig

DERIVED_ROLES = ("reference", "critic")
"""Roles that start from the policy's model if the recipe gives them none."""


class Recipe(Section):
    """What to train, on which data, and how; the planner decides on which ranks."""

    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")
    """Name of the run and of its folder."""
    workflow: str
    """A built-in workflow, a YAML file, or `package.module:function` that returns a `Workflow`."""
    models: Mapping[str, ModelConfig]
    """Model of each role, such as `policy`; by default, `reference` and `critic` start from the policy's model."""
    data: DataConfig
    """Training and held-out data."""
    reward: RewardsConfig = RewardsConfig()
    """Rewards of responses."""
    batch: BatchConfig = BatchConfig()
    """Batch sizes."""
    rollout: RolloutConfig = RolloutConfig()
    """Generation of responses."""
    algorithm: AlgorithmConfig = AlgorithmConfig()
    """Advantage, loss, penalty, averaging."""
    optimizer: OptimizerConfig = OptimizerConfig()
    """Optimizer of every trained role whose model has none."""
    layout: Mapping[str, LayoutConfig] = {}
    """Ranks and parallel sizes by node. A node without an entry runs where its role is trained, if the node that trains
    it has an entry; else where the first node that it comes after runs; else data-parallel on all ranks."""
    evaluation: EvaluationConfig = EvaluationConfig()
    """Accuracy on held-out prompts."""
    checkpoint: CheckpointConfig = CheckpointConfig()
    """When checkpoints are written, and which are kept."""
    guards: GuardsConfig = GuardsConfig()
    """Reactions to bad numbers."""
    run: RunConfig = RunConfig()
    """Folder, time limits and records of the run."""
    steps: int = Field(ge=1)
    """Number of steps, each one pass through the workflow."""
    seed: int = Field(default=0, ge=0, lt=2**31)
    """Seed of the data order and of sampling."""

    @field_validator("workflow")
    @classmethod
    def _workflow_is_named(cls, value: str) -> str:
        if not value.strip():
            raise ValueError("must name a workflow")
        return value

    @model_validator(mode="after")
    def _sections_agree(self) -> Recipe:
        if self.evaluation.every_steps and self.data.evaluation is None:
            raise ValueError("evaluation.every_steps needs data.evaluation, the held-out prompts")
        if self.evaluation.every_steps and not self.reward.options():
            raise ValueError("evaluation.every_steps needs a reward, to tell whether a response is correct")
        metric = self.evaluation.metric
        if metric is not None and metric not in self.reward.options():
            known = ", ".join(self.reward.options()) or "none"
            raise ValueError(f"evaluation.metric='{metric}' is not one of the recipe's rewards ({known})")
        if self.evaluation.temperature == 0 and self.evaluation.responses_per_prompt > 1:
            raise ValueError(
                "evaluation.responses_per_prompt > 1 needs evaluation.temperature > 0: "
                "greedy decoding gives the same response every time"
            )
        return self

    def model_of(self, role: str) -> ModelConfig | None:
        """The model of a role of the workflow, or None if the recipe names none."""
        return self.models.get(role) or (self.models.get("policy") if role in DERIVED_ROLES else None)

    def optimizer_of(self, role: str) -> OptimizerConfig:
        """The optimizer settings of a trained role."""
        model = self.models.get(role)
        return (model.optimizer if model else None) or self.optimizer
