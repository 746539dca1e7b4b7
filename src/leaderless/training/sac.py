"""The learner of SAC and RLPD: it draws transitions, and improves critics, policy and temperature."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from leaderless.algorithms.sac import Actor, Ensemble, targets
from leaderless.data.replay import ReplayBuffer
from leaderless.environments.bodies.protocol import Continuous, Spaces
from leaderless.robots.transitions import Transitions

WEIGHTS, CRITICS, POLICY, ACTING = range(4)
"""What random numbers are for; each has a stream of its own."""
DEMONSTRATIONS = 1 << 64
"""Distance between the seeds of transitions and of demonstrations."""


@dataclass(frozen=True)
class SacConfig:
    """Settings of SAC; with demonstrations it is RLPD.

    Attributes:
        batch_size: Transitions of an update, on all ranks together; half of them demonstrations, if there are any.
        critic_updates: Updates of the critics for one of the policy.
        num_heads: Number of critics.
        subset_size: Critics whose least value is the target of all.
        discount: Gamma, per step of the environment.
        target_rate: Share of the critics that goes into the slow ones at each update.
        learning_rate: Learning rate of all optimizers.
        first_temperature: Weight of the entropy at first.
        target_entropy: Entropy that the temperature is tuned for, per number of an action.
        is_entropy_valued: Whether entropy to come is part of the critics' values.
        hidden_size: Width of hidden layers.
        num_layers: Number of hidden layers.
    """

    batch_size: int = 256
    critic_updates: int = 4
    num_heads: int = 10
    subset_size: int = 2
    discount: float = 0.97
    target_rate: float = 0.01
    learning_rate: float = 3e-4
    first_temperature: float = 0.01
    target_entropy: float = -0.5
    is_entropy_valued: bool = False
    hidden_size: int = 64
    num_layers: int = 2

    def __post_init__(self) -> None:
        if not 1 <= self.subset_size <= self.num_heads:
            raise ValueError(f"subset_size={self.subset_size}: must be from 1 to num_heads={self.num_heads}")
        if self.batch_size < 2 or self.critic_updates < 1 or not 0 < self.discount <= 1:
            shown = f"batch_size={self.batch_size}, critic_updates={self.critic_updates}, discount={self.discount:g}"
            raise ValueError(f"{shown}: must be at least 2, at least 1, and above 0 up to 1")


class SacLearner:
    """Critics, policy and temperature of a body whose state is known.

    Every rank draws the same transitions and takes its own share of them. Gradients are summed over ranks, so that
    their number changes nothing but rounding. All randomness follows from the seed and the number of the update.

    Source: Haarnoja et al., arXiv 1812.05905, for losses and temperature; Ball et al., arXiv 2302.02948, for the many
    critics, subsets of them, layer normalization, and demonstrations in half of each batch.
    """

    def __init__(
        self,
        spaces: Spaces,
        chunk: int,
        config: SacConfig,
        *,
        seed: int = 0,
        rank: int = 0,
        num_ranks: int = 1,
        sum_over_ranks: Callable[[Tensor], Tensor] = lambda tensor: tensor,
    ) -> None:
        """Make a learner with random weights.

        Args:
            spaces: What the environment shows and takes.
            chunk: Steps of a decision.
            config: Settings.
            seed: Seed of everything.
            rank: Number of this rank.
            num_ranks: Number of ranks.
            sum_over_ranks: Function that sums a tensor over all ranks.

        Raises:
            ValueError: There is no state, or actions are choices.
        """
        if not spaces.state_size or not isinstance(spaces.actions, Continuous):
            raise ValueError("SAC needs a state and actions of real numbers: use a workflow such as ppo for this body")
        self.config, self.num_updates = config, 0
        self._seed, self._rank, self._num_ranks, self._sum = seed, rank, num_ranks, sum_over_ranks
        self._shape = (chunk, spaces.actions.dim)
        self._low, self._high = (np.array(one, np.float32) for one in (spaces.actions.low, spaces.actions.high))
        num = chunk * spaces.actions.dim
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(int(self._chance(WEIGHTS).integers(2**63)))
            self.actor = Actor(spaces.state_size, num, config.hidden_size, config.num_layers)
            self.critics = Ensemble(spaces.state_size + num, config.hidden_size, config.num_layers, config.num_heads)
        self.slow_critics = copy.deepcopy(self.critics).requires_grad_(requires_grad=False)
        self.log_temperature = nn.Parameter(torch.tensor(float(np.log(config.first_temperature))))
        self._target_entropy = config.target_entropy * num
        self._critic_optimizer, self._actor_optimizer, self._temperature_optimizer = (
            torch.optim.Adam(parameters, config.learning_rate)
            for parameters in (self.critics.parameters(), self.actor.parameters(), [self.log_temperature])
        )

    def act(self, state: NDArray[np.float32], step: int | None) -> NDArray[np.float32]:
        """Actions [n, chunk, dim] in states [n, state_size].

        Args:
            state: What is seen.
            step: Number from which the noise follows; None for no noise.
        """
        noise = None if step is None else self._noise(len(state), ACTING, step)
        with torch.no_grad():
            squashed, _ = self.actor(torch.from_numpy(state), noise)
        shares = (squashed.numpy().reshape(-1, *self._shape) + 1) / 2
        actions: NDArray[np.float32] = (self._low + shares * (self._high - self._low)).astype(np.float32)
        return actions

    def update(self, online: ReplayBuffer, demonstrations: ReplayBuffer | None = None) -> Mapping[str, float]:
        """Improve the critics `critic_updates` times, and the policy and the temperature once.

        Args:
            online: Transitions of the policy.
            demonstrations: Transitions of experts, of which half of each batch is then made.

        Returns:
            Numbers to report, over all ranks.
        """
        loss = torch.zeros(())
        for _ in range(self.config.critic_updates):
            batch = self._batch(online, demonstrations)
            loss = self._update_critics(batch)
            self.num_updates += 1
        actor_loss, entropy = self._update_actor(batch.states)
        sums = self._sum(torch.stack([loss, actor_loss, entropy]))
        names = ("critic_loss", "actor_loss", "entropy")
        temperature = float(self.log_temperature.detach().exp())
        return {**dict(zip(names, sums.tolist(), strict=True)), "temperature": temperature}

    def state(self) -> dict[str, object]:
        """All that a checkpoint has to hold; see `load_state`."""
        return {
            "num_updates": self.num_updates,
            "log_temperature": self.log_temperature.detach().clone(),
            **{name: copy.deepcopy(one.state_dict()) for name, one in self._parts().items()},
        }

    def load_state(self, state: Mapping[str, object]) -> None:
        """Continue from what `state` returned."""
        for name, one in self._parts().items():
            one.load_state_dict(copy.deepcopy(state[name]))  # type: ignore[arg-type]
        with torch.no_grad():
            self.log_temperature.copy_(state["log_temperature"])  # type: ignore[arg-type]
        self.num_updates = int(state["num_updates"])  # type: ignore[call-overload]

    def _parts(self) -> dict[str, nn.Module | torch.optim.Optimizer]:
        return {
            "actor": self.actor,
            "critics": self.critics,
            "slow_critics": self.slow_critics,
            "actor_optimizer": self._actor_optimizer,
            "critic_optimizer": self._critic_optimizer,
            "temperature_optimizer": self._temperature_optimizer,
        }

    def _chance(self, stream: int, step: int | None = None) -> np.random.Generator:
        number = self.num_updates if step is None else step
        return np.random.Generator(np.random.PCG64(np.random.SeedSequence([self._seed, stream, number])))

    def _noise(self, num: int, stream: int, step: int) -> Tensor:
        numbers = self._chance(stream, step).standard_normal((num, int(np.prod(self._shape))))
        return torch.from_numpy(numbers.astype(np.float32))

    def _batch(self, online: ReplayBuffer, demonstrations: ReplayBuffer | None) -> _Share:
        size, now = self.config.batch_size, self.num_updates
        half = size // 2 if demonstrations is not None else 0
        drawn = [online.sample(size - half, seed=self._seed, step=now)]
        if demonstrations is not None:
            drawn.append(demonstrations.sample(half, seed=self._seed + DEMONSTRATIONS, step=now))
        chance = self._chance(CRITICS)
        noise = chance.standard_normal((2, size, int(np.prod(self._shape)))).astype(np.float32)
        heads = chance.permutation(self.config.num_heads)[: self.config.subset_size]
        return self._share(drawn, torch.from_numpy(noise), torch.from_numpy(heads))

    def _share(self, drawn: Iterable[Transitions], noise: Tensor, heads: Tensor) -> _Share:
        """What this rank computes of a batch."""
        own = slice(self._rank, None, self._num_ranks)

        def of(name: str) -> Tensor:
            return torch.from_numpy(np.concatenate([getattr(one, name) for one in drawn])[own])

        span = torch.from_numpy(self._high - self._low)
        executed = torch.arange(self._shape[0]) < of("num_steps")[:, None]
        actions = (of("actions") - torch.from_numpy(self._low)) / span * 2 - 1
        return _Share(
            states=of("state"),
            next_states=of("next_state"),
            actions=(actions * executed[..., None]).flatten(1),
            rewards=of("rewards"),
            num_steps=of("num_steps"),
            is_terminated=of("terminated"),
            noise=noise[0, own],
            heads=heads,
        )

    def _update_critics(self, batch: _Share) -> Tensor:
        config = self.config
        with torch.no_grad():
            actions, log_probs = self.actor(batch.next_states, batch.noise)
            following = self.slow_critics(batch.next_states, actions)[batch.heads].min(0).values
            if config.is_entropy_valued:
                following = following - self.log_temperature.exp() * log_probs
            aims = targets(batch.rewards, batch.num_steps, batch.is_terminated, following, config.discount)
        loss = (self.critics(batch.states, batch.actions) - aims).square().mean(0).sum() / config.batch_size
        self._step(self._critic_optimizer, loss)
        with torch.no_grad():
            for slow, fast in zip(self.slow_critics.parameters(), self.critics.parameters(), strict=True):
                slow.lerp_(fast, config.target_rate)
        found: Tensor = loss.detach()
        return found

    def _update_actor(self, states: Tensor) -> tuple[Tensor, Tensor]:
        size = self.config.batch_size
        own = slice(self._rank, None, self._num_ranks)
        noise = self._noise(size, POLICY, self.num_updates)[own]
        actions, log_probs = self.actor(states, noise)
        temperature = self.log_temperature.exp()
        values = self.critics(states, actions).mean(0)
        loss = (temperature.detach() * log_probs - values).sum() / size
        self._step(self._actor_optimizer, loss)
        surprise = (log_probs.detach() + self._target_entropy).sum() / size
        self._step(self._temperature_optimizer, -temperature * surprise)
        return loss.detach(), -log_probs.detach().sum() / size

    def _step(self, optimizer: torch.optim.Optimizer, loss: Tensor) -> None:
        """Add up the gradients of all ranks, and let the optimizer use them."""
        parameters = [one for group in optimizer.param_groups for one in group["params"]]
        found = torch.autograd.grad(loss, parameters)
        whole = self._sum(torch.cat([one.flatten() for one in found]))
        sizes = [one.numel() for one in parameters]
        for parameter, gradient in zip(parameters, torch.split(whole, sizes), strict=True):
            parameter.grad = gradient.view_as(parameter).clone()
        optimizer.step()


@dataclass(frozen=True)
class _Share:
    """Transitions that one rank computes: [n, ...], with the heads of the subset."""

    states: Tensor
    next_states: Tensor
    actions: Tensor
    rewards: Tensor
    num_steps: Tensor
    is_terminated: Tensor
    noise: Tensor
    heads: Tensor
