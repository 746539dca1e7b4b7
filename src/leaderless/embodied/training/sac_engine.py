"""The engine of a policy that SAC trains: the learner, and the memory that it draws from."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import NoReturn

import torch
from torch import Tensor

from leaderless.config import RecipeError
from leaderless.data.batch import Batch, Jagged
from leaderless.distributed.in_flight import MESSAGES_AHEAD
from leaderless.distributed.transport import ProcessGroup
from leaderless.distributed.weights.blocks import LocalWeight
from leaderless.embodied.policies.loading import LoadedPolicy, open_model
from leaderless.embodied.policies.sac_critics import check_policy
from leaderless.embodied.policies.squashed import Squashed
from leaderless.embodied.robots.transitions import Transitions
from leaderless.embodied.rollout.vector_envs import spaces_of
from leaderless.embodied.training.sac_learner import Draw, SacLearner
from leaderless.embodied.training.sharded_replay import TransitionMemory
from leaderless.models.causal_lm import TokenOutputs
from leaderless.models.scoring import Entropy
from leaderless.training.engine import EngineSetup, UpdateInfo
from leaderless.training.forward_passes import Passes
from leaderless.training.micro_batches import MicroBatch
from leaderless.training.optimizer import may_be_fused


class SacEngine:
    """Train engine of SAC. All ranks hold the whole model; only the stage `update_sac` trains it.

    Attributes:
        learner: Policy, critics and temperature.
        memory: Transitions of all ranks; None before `open_memory`.
        micro_batch_tokens: Most tokens of one pass; no pass is cut.
    """

    is_value_model = False
    is_replica = False
    vocab_size = 1 << 62

    def __init__(self, opened: LoadedPolicy, policy: Squashed, setup: EngineSetup) -> None:
        """Take a policy that all ranks have with the same weights."""
        assert setup.body is not None
        assert setup.body.sac is not None
        assert setup.optimizer is not None
        self.process_group: ProcessGroup = setup.process_group
        self.micro_batch_tokens = setup.micro_batch_tokens
        self.memory: TransitionMemory | None = None
        self._describe, self._role = opened.describe, setup.role
        self.learner = SacLearner(
            policy,
            setup.body.sac,
            setup.optimizer,
            seed=setup.seed,
            device=setup.device,
            sum_over_ranks=self._sum,
            is_fused=may_be_fused(setup.device, setup.process_group),
        )

    def _sum(self, values: Tensor) -> Tensor:
        self.process_group.activity.beat()
        return self.process_group.sum(values, f"gradients of role '{self._role}'", most_ahead=MESSAGES_AHEAD)

    @property
    def policy(self) -> Squashed:
        """The policy."""
        return self.learner.policy

    @property
    def policy_version(self) -> int:
        """Number of updates of the policy."""
        return self.learner.num_updates

    def open_memory(self, folder: Path, demonstrations: Callable[[], Transitions]) -> TransitionMemory:
        """The memory of the run, which is opened at first; see `TransitionMemory`. All ranks call it together."""
        if self.memory is None:
            policy = self.policy
            self.memory = TransitionMemory(folder, policy.spaces, policy.chunk, self.process_group, demonstrations())
        return self.memory

    def improve(self, draw: Draw) -> Mapping[str, float]:
        """Make one update; see `SacLearner.update`."""
        return self.learner.update(draw)

    def full_weights(self) -> Iterator[tuple[str, Tensor]]:
        """Parameters of the policy, without a gradient."""
        yield from ((name, one.detach()) for name, one in self.policy.named_parameters())

    def weight_shapes(self) -> Mapping[str, torch.Size]:
        """Shapes of the parameters of the policy."""
        return {name: one.shape for name, one in self.policy.named_parameters()}

    def local_weights(self) -> Iterator[LocalWeight]:
        """Parameters of the policy, which every rank has whole."""
        yield from (LocalWeight.of(name, one) for name, one in self.policy.named_parameters())

    def write_description(self, folder: Path) -> None:
        """Write the description that came with the policy."""
        self._describe(folder)

    def state(self) -> dict[str, Tensor]:
        """Parameters of the policy, and the state of the learner."""
        weights = {f"weights.{name}": one.detach() for name, one in self.policy.named_parameters()}
        return {**weights, **self.learner.state()}

    def state_loaded(self, policy_version: int) -> None:
        """Let the learner continue from tensors that have been written to."""
        self.learner.state_loaded(policy_version)

    def adapt_to_memory(self, on_lowered: Callable[[int], None]) -> None:
        """Do nothing: a pass has the size of a batch, which the recipe gives."""

    def micro_batches(self, batch: Batch) -> list[MicroBatch]:
        """Refuse: SAC cuts no batches."""
        self._refuse("micro_batches", batch)

    def passes(self, batch: Batch) -> Passes:
        """Refuse: SAC cuts no batches."""
        self._refuse("passes", batch)

    def log_probs(self, batch: Batch) -> Jagged:
        """Refuse: SAC scores no batches."""
        self._refuse("log_probs", batch)

    def forward(self, micro_batch: MicroBatch, entropy: Entropy = "value") -> TokenOutputs:
        """Refuse: SAC scores no batches."""
        self._refuse("forward", micro_batch, entropy)

    def optimizer_step(self, allow: Callable[[float], bool] | None = None) -> UpdateInfo:
        """Refuse: `improve` changes the weights."""
        self._refuse("optimizer_step", allow)

    def discard_gradient(self) -> None:
        """Do nothing: no gradient outlives an update."""

    def _refuse(self, method: str, *given: object) -> NoReturn:
        raise RuntimeError(
            f"role '{self._role}' is trained by SAC, from transitions that are kept; `{method}` of {len(given)} "
            "arguments is for other stages: let nodes that run 'remember' and 'update_sac' alone use the role"
        )


def make_sac_engine(setup: EngineSetup) -> SacEngine:
    """Load a policy or make one, with critics that are new.

    Raises:
        RecipeError: It is not of the kind that SAC trains, or is to be divided along another axis than `dp`.
    """
    assert setup.body is not None
    key = f"models.{setup.role}"
    spaces = spaces_of(setup.body.config)
    opened = open_model(setup.model, key, spaces, is_critic=False)
    try:
        policy = check_policy(opened.model, spaces)
    except ValueError as error:
        raise RecipeError.at(f"{key}.body", str(error)) from error
    return SacEngine(opened, policy, setup)
