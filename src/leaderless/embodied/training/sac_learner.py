"""SAC and RLPD: a learner, which improves critics, policy and temperature on transitions, and the engine around it."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from leaderless.algorithms.sac import targets
from leaderless.algorithms.settings import SacConfig
from leaderless.config import RecipeError
from leaderless.config.models import OptimizerConfig
from leaderless.distributed.in_flight import MESSAGES_AHEAD
from leaderless.distributed.transport import ProcessGroup
from leaderless.distributed.weights.blocks import LocalWeight
from leaderless.embodied.data.replay_buffer import Transitions
from leaderless.embodied.policies.loading import LoadedPolicy, open_model
from leaderless.embodied.policies.protocol import Observed
from leaderless.embodied.policies.squashed import Critics, Squashed, check_policy
from leaderless.embodied.rollout.vector_envs import spaces_of
from leaderless.embodied.training.sharded_replay import Drawn, TransitionMemory
from leaderless.models.uploads import one_copy, placed
from leaderless.training.engine import EngineSetup
from leaderless.training.optimizers.adamw import may_be_fused
from leaderless.training.optimizers.make_optimizer import make_optimizer
from leaderless.training.optimizers.optimizer import TrainedWeight, learning_rate_at

WEIGHTS, CRITICS, POLICY = range(3)
"""Uses of random numbers; each has its own stream."""
Draw = Callable[[int, int, int], Drawn]
"""Function of the size of a batch, a seed and the number of an update: this rank's part of the batch."""


@dataclass(frozen=True)
class SacBatch:
    """Transitions that one rank computes: [n, ...], with the heads of the subset."""

    seen: Observed
    next_seen: Observed
    actions: Tensor
    rewards: Tensor
    num_steps: Tensor
    is_terminated: Tensor
    slots: NDArray[np.int64]
    noise: Tensor
    heads: Tensor


class SacLearner:
    """Critics, policy and temperature.

    Ranks compute the transitions of a batch that they hold. Gradients are summed over ranks, so that their number
    changes nothing but rounding. All randomness follows from the seed and the number of the update.

    Source: Haarnoja et al., arXiv 1812.05905, for losses and temperature; Ball et al., arXiv 2302.02948, for the many
    critics, subsets of them, layer normalization, and demonstrations in half of each batch. Policy and critics see
    images with eyes of their own, and images are not shifted at random, as they are there.

    Attributes:
        policy: The policy.
        num_updates: Updates of the policy that were made.
    """

    def __init__(
        self,
        policy: Squashed,
        config: SacConfig,
        optimizer: OptimizerConfig,
        *,
        seed: int = 0,
        device: torch.device | None = None,
        sum_over_ranks: Callable[[Tensor], Tensor] = lambda tensor: tensor,
        is_fused: bool = True,
        offload_folder: Path | None = None,
    ) -> None:
        """Make critics with random weights, the same on every rank.

        By default it computes on the CPU, and alone. `is_fused` says whether the devices of all ranks compute a step of
        the optimizer in one kernel, and `offload_folder` is for files of what optimizers keep, if these are offloaded.
        """
        self.config, self.num_updates = config, 0
        self._seed, self._sum, self._device = seed, sum_over_ranks, device or torch.device("cpu")
        self._optimizer_config = optimizer
        self.policy = policy.to(self._device)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(int(self._chance(WEIGHTS).integers(2**63)))
            self.critics = Critics(policy, config).to(self._device)
        self.slow_critics = copy.deepcopy(self.critics).requires_grad_(requires_grad=False)
        start = torch.tensor([float(np.log(config.first_temperature))], device=self._device)
        self.log_temperature = nn.Parameter(start)
        self._target_entropy = config.target_entropy * policy.choice_size
        self._norms: list[tuple[str, Tensor]] = []  # of the gradients of an update
        self._trained = {
            "critics": [*self.critics.named_parameters()],
            "policy": [*self.policy.named_parameters()],
            "temperature": [("log_temperature", self.log_temperature)],
        }
        self._optimizers = {
            part: make_optimizer(
                [TrainedWeight(*one) for one in weights], optimizer, is_fused=is_fused, folder=offload_folder
            )
            for part, weights in self._trained.items()
        }

    def update(self, draw: Draw) -> Mapping[str, float]:
        """Improve the critics `critic_updates` times, and the policy and the temperature once.

        Returns:
            Numbers to report, over all ranks.

        Raises:
            RuntimeError: A gradient is not finite.
        """
        config, critic_loss = self.config, torch.zeros((), device=self._device)
        self._norms.clear()
        for number in range(config.critic_updates):
            now = self.num_updates * config.critic_updates + number
            batch = self._batch(draw(config.batch_size, self._seed, now), now)
            critic_loss = self._update_critics(batch)
        actor_loss, entropy = self._update_policy(batch)
        sums = self._sum(torch.stack([critic_loss, actor_loss, entropy]))
        temperature = self.log_temperature.detach().exp()
        names = ("critic_loss", "actor_loss", "entropy", "temperature")
        # All that the host asks of the device, which has not had to wait for the host before.
        numbers = torch.cat([sums, temperature, *(norm[None] for _, norm in self._norms)]).cpu().tolist()
        for (name, _), norm in zip(self._norms, numbers[len(names) :], strict=True):
            if not np.isfinite(norm):
                raise RuntimeError(
                    f"the gradient of the {name} has the norm {norm} in update {self.num_updates}: lower "
                    "optimizer.learning_rate, or look at the rewards"
                )
        self.num_updates += 1
        return dict(zip(names, numbers, strict=False))

    def state(self) -> dict[str, Tensor]:
        """Weights except the policy's, and what optimizers keep of all, in the memory that training changes."""
        found = {f"critics.{name}": one.detach() for name, one in self.critics.named_parameters()}
        found |= {f"slow_critics.{name}": one.detach() for name, one in self.slow_critics.named_parameters()}
        found["log_temperature"] = self.log_temperature.detach()
        for part, optimizer in self._optimizers.items():
            for name, parameter in self._trained[part]:
                states = optimizer.states(parameter).items()
                found |= {f"optimizer.{kind}.{part}.{name}": kept for kind, kept in states}
        return found

    def state_loaded(self, num_updates: int) -> None:
        """Take over tensors of `state` that were written to, and the number of updates."""
        self.num_updates = num_updates
        for part, optimizer in self._optimizers.items():
            optimizer.resume(num_updates * (self.config.critic_updates if part == "critics" else 1))

    def _chance(self, stream: int, number: int = 0) -> np.random.Generator:
        return np.random.Generator(np.random.PCG64(np.random.SeedSequence([self._seed, 1 + stream, number])))

    def _batch(self, drawn: Drawn, number: int) -> SacBatch:
        """This rank's part of a batch; noise and heads belong to the whole one."""
        kept, policy, chance = drawn.transitions, self.policy, self._chance(CRITICS, number)
        noise = chance.standard_normal((self.config.batch_size, policy.choice_size)).astype(np.float32)
        heads = chance.permutation(self.config.num_heads)[: self.config.subset_size]
        executed = torch.arange(policy.chunk) < torch.from_numpy(kept.num_steps)[:, None]
        actions = policy.squash(torch.from_numpy(kept.actions)).view(-1, policy.chunk, policy.score_dim)
        on_device = self._tensor
        with one_copy(self._device):
            return SacBatch(
                seen=observed_of(kept.images, kept.state, self._device),
                next_seen=observed_of(kept.next_images, kept.next_state, self._device),
                actions=placed((actions * executed[..., None]).flatten(1), self._device),
                rewards=on_device(kept.rewards),
                num_steps=on_device(kept.num_steps),
                is_terminated=on_device(kept.terminated),
                slots=drawn.slots,
                noise=on_device(noise[drawn.slots]),
                heads=on_device(heads),
            )

    def _tensor(self, values: NDArray[np.generic]) -> Tensor:
        return placed(torch.from_numpy(np.ascontiguousarray(values)), self._device)

    def _update_critics(self, batch: SacBatch) -> Tensor:
        config = self.config
        with torch.no_grad():
            actions, log_probs = self.policy.draw(batch.next_seen, batch.noise)
            following = self.slow_critics(batch.next_seen, actions)[batch.heads].min(0).values
            if config.is_entropy_valued:
                following = following - self.log_temperature.exp() * log_probs
            aims = targets(batch.rewards, batch.num_steps, batch.is_terminated, following, config.discount)
        loss = (self.critics(batch.seen, batch.actions) - aims).square().mean(0).sum() / config.batch_size
        self._step("critics", loss, self.critics.parameters())
        with torch.no_grad():
            for slow, fast in zip(self.slow_critics.parameters(), self.critics.parameters(), strict=True):
                slow.lerp_(fast, config.target_rate)
        found: Tensor = loss.detach()
        return found

    def _update_policy(self, batch: SacBatch) -> tuple[Tensor, Tensor]:
        size = self.config.batch_size
        noise = self._chance(POLICY, self.num_updates).standard_normal((size, self.policy.choice_size))
        with one_copy(self._device):
            mine = self._tensor(noise.astype(np.float32)[batch.slots])
        actions, log_probs = self.policy.draw(batch.seen, mine)
        temperature = self.log_temperature.exp()[0]
        values = self.critics(batch.seen, actions).mean(0)
        loss = (temperature.detach() * log_probs - values).sum() / size
        self._step("policy", loss, self.policy.parameters())
        surprise = (log_probs.detach() + self._target_entropy).sum() / size
        self._step("temperature", -temperature * surprise, [self.log_temperature])
        return loss.detach(), -log_probs.detach().sum() / size

    def _step(self, name: str, loss: Tensor, parameters: Iterable[nn.Parameter]) -> None:
        """Add up the gradients of all ranks, and let the optimizer use them."""
        given, config = list(parameters), self._optimizer_config
        found = torch.autograd.grad(loss, given)
        whole = self._sum(torch.cat([one.flatten() for one in found]))
        norm = torch.linalg.vector_norm(whole)
        self._norms.append((name, norm))
        whole *= (config.max_grad_norm / (norm.double() + 1e-6)).clamp(max=1.0)
        for parameter, gradient in zip(given, torch.split(whole, [one.numel() for one in given]), strict=True):
            parameter.grad = gradient.view_as(parameter).clone()
        optimizer = self._optimizers[name]
        optimizer.step(learning_rate_at(config, self.num_updates, self.num_updates))
        optimizer.zero_grad()


def observed_of(images: Mapping[str, NDArray[np.uint8]], state: NDArray[np.float32], device: torch.device) -> Observed:
    """Observations, as policies take them; instructions are not kept."""
    num = len(state)
    pixels = {camera: torch.from_numpy(np.ascontiguousarray(one)) for camera, one in images.items()}
    nothing = torch.zeros(num, 1, dtype=torch.int64), torch.zeros(num, dtype=torch.int64)
    return Observed(pixels, torch.from_numpy(np.ascontiguousarray(state)), nothing).placed(device)


class SacEngine:
    """Train engine of SAC. All ranks hold the whole model; only the stage `update_sac` trains it.

    Attributes:
        learner: Policy, critics and temperature.
        memory: Transitions of all ranks; None before `open_memory`.
        micro_batch_tokens: Most tokens of one pass; no pass is cut.
        has_live_state: Always true: training changes the tensors of `state` in place.
    """

    is_value_model = False
    is_replica = False
    has_live_state = True
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
            offload_folder=setup.sharding.offload_folder,
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

    def discard_gradient(self) -> None:
        """Do nothing: no gradient outlives an update."""

    def __getattr__(self, name: str) -> Callable[..., NoReturn]:
        """A function that refuses what other stages ask of an engine that trains."""
        if name not in {"micro_batches", "passes", "log_probs", "forward", "optimizer_step"}:
            raise AttributeError(f"'{type(self).__name__}' object has no attribute '{name}'", name=name, obj=self)

        def refuse(*_: object, **__: object) -> NoReturn:
            raise RuntimeError(
                f"role '{self._role}' is trained by SAC, from transitions that are kept; `{name}` is for other stages: "
                "let nodes that run 'remember' and 'update_sac' alone use the role"
            )

        return refuse


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
