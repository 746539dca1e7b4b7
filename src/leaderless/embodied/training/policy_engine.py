"""Engines of policies that move bodies, and of their critics: the back end `fsdp` without tokens."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import cast

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.utils.checkpoint import checkpoint

from leaderless.algorithms.body_decisions import Decisions
from leaderless.config import RecipeError
from leaderless.config.environment import Grain
from leaderless.data.batch import Batch, Jagged, ragged_index
from leaderless.embodied.policies.loading import open_model
from leaderless.embodied.policies.observations import StateNormalizer, images_of, joined, moments, padded
from leaderless.embodied.policies.protocol import BodyPolicy, BodyValue, DecisionScores, Observed
from leaderless.embodied.rollout.vector_envs import spaces_of
from leaderless.embodied.training.decision_units import grained
from leaderless.embodied.training.sac_learner import SacEngine, make_sac_engine
from leaderless.models.attention.shared_prompts import Family
from leaderless.models.causal_lm import TokenOutputs
from leaderless.models.decoder import Shardable
from leaderless.models.scoring import Entropy
from leaderless.models.uploads import one_copy, placed
from leaderless.training.engine import EngineSetup
from leaderless.training.micro_batches import TEMPERATURES, MicroBatch
from leaderless.training.sharded import ShardedModel
from leaderless.training.weight_sharding import WeightSharding, forget_order

NO_WORDS = 1 << 62
"""Size of the vocabulary of a model without one: any token fits."""


@dataclass(frozen=True, kw_only=True)
class BodyMicroBatch(MicroBatch):
    """Whole episodes that pass through a policy together, on the host.

    Attributes:
        observed: Observations before each of N decisions.
        choices: [N, choice_size] float32.
        decisions: [R] int64, the decision of each unit.
        places: [R] int64, see `grained`.
        steps: [R] int64, step of each unit in its decision; None where no critic asks for it.
        num_pieces: Pieces in which the decisions are computed, the same number on every rank.
    """

    observed: Observed
    choices: Tensor
    decisions: Tensor
    places: Tensor
    steps: Tensor | None = None
    num_pieces: int = 1


class HeldBody(Shardable):
    """A policy or a critic as an engine holds it; see `Shardable`.

    Attributes:
        piece: Most decisions that are computed together, and computed again in the backward pass, where a pass has
            several pieces.
    """

    model: BodyPolicy | BodyValue

    def __init__(self, model: BodyPolicy | BodyValue, description: Callable[[Path], None]) -> None:
        """Wrap a model; weights keep their names."""
        super().__init__(model, NO_WORDS)
        self.piece = 1
        self._describe = description
        self._frozen = {name for name, parameter in model.named_parameters() if not parameter.requires_grad}

    def forward(
        self, observed: Observed, choices: Tensor | None, temperature: float, num_pieces: int = 1
    ) -> DecisionScores | Tensor:
        """Scores of decisions, or values [n], computed in some pieces.

        Ranks gather layers together, once for each piece: one with fewer decisions computes its first one again, which
        has no effect.
        """
        if num_pieces == 1:
            return self._compute(observed, choices, temperature)
        found: list[DecisionScores | Tensor] = []
        parts = torch.split(torch.arange(len(observed), device=observed.state.device), self.piece)
        count = len(parts)
        for rows in [*parts, *[parts[0][:1]] * (num_pieces - count)]:
            arguments = observed.select(rows), None if choices is None else choices[rows], temperature
            if torch.is_grad_enabled():
                found.append(checkpoint(self._compute, *arguments, use_reentrant=False, preserve_rng_state=False))
            else:
                found.append(self._compute(*arguments))
        scores, values = (
            [one for one in found if isinstance(one, DecisionScores)],
            [x for x in found if isinstance(x, Tensor)],
        )
        if values:
            return _joined(values, count)
        return DecisionScores(
            _joined([one.log_probs for one in scores], count), _joined([one.entropies for one in scores], count)
        )

    def _compute(self, observed: Observed, choices: Tensor | None, temperature: float) -> DecisionScores | Tensor:
        if isinstance(self.model, BodyPolicy):
            assert choices is not None
            return self.model.score(observed, choices, temperature)
        return self.model.values(observed)

    def is_frozen(self, name: str) -> bool:
        """Whether the weight was named as frozen."""
        return name in self._frozen

    def trained_weights(self) -> Iterator[tuple[str, nn.Parameter]]:
        """All parameters of the wrapped model, under their names there."""
        yield from self.model.named_parameters()

    def write_description(self, folder: Path) -> None:
        """Write the description that came with the model."""
        self._describe(folder)


def _joined(pieces: Sequence[Tensor], count: int) -> Tensor:
    """The first pieces, one after the other; the others take part without an effect, so that they have a gradient."""
    whole = torch.cat([*pieces[:count]])
    return whole + 0.0 * torch.stack([one.sum() for one in pieces[count:]]).sum() if pieces[count:] else whole


class _Bodies(ShardedModel[HeldBody]):
    """Common part of the engines of policies and critics."""

    grain: Grain

    def micro_batches(self, batch: Batch) -> list[MicroBatch]:
        """Cut a batch between episodes. A pass has at most `micro_batch_tokens` steps, or one episode.

        With `gradient_checkpointing`, what is computed at once has at most as many, or one decision.
        """
        episodes = _Episodes.of(batch, self.model.model)
        packs: list[list[int]] = []
        filled = 0
        for row in torch.argsort(episodes.counts, descending=True, stable=True).tolist():
            size = int(episodes.counts[row]) * self.model.model.chunk
            if not packs or filled + size > self.micro_batch_tokens:
                packs.append([])
                filled = 0
            packs[-1].append(row)
            filled += size
        count = int(self.process_group.max(torch.tensor([len(packs)]), "the number of micro-batches"))
        packs += [[] for _ in range(count - len(packs))]
        cut = [episodes.pack(torch.tensor(rows, dtype=torch.int64)) for rows in packs]
        if not (self._config.gradient_checkpointing and cut):
            return [*cut]
        self.model.piece = max(1, self.micro_batch_tokens // self.model.model.chunk)
        pieces = torch.tensor([-(-len(one.observed) // self.model.piece) for one in cut])
        agreed = self.process_group.max(pieces, "the number of pieces of each micro-batch").tolist()
        return [replace(one, num_pieces=number) for one, number in zip(cut, agreed, strict=True)]

    @torch.no_grad()
    def add_states(self, batch: Batch, total: Callable[[Tensor], Tensor]) -> None:
        """Update the mean and the variance of every `StateNormalizer`."""
        states = batch.jagged("states").values
        for one in (module for module in self.model.modules() if isinstance(module, StateNormalizer)):
            mean, variance, count = (_whole(held).cpu() for held in (one.mean, one.variance, one.count))
            if float((added := total(moments(states, mean)))[0]) > 0:
                for held, value in zip(
                    (one.mean, one.variance, one.count), joined(mean, variance, count, added), strict=True
                ):
                    _assign(held, value.float())


def _whole(parameter: Tensor) -> Tensor:
    return parameter.full_tensor() if isinstance(parameter, DTensor) else parameter.detach()


def _assign(parameter: Tensor, value: Tensor) -> None:
    """Give a weight its value, of which each rank keeps its own part."""
    here = value.to(parameter.device)
    if isinstance(parameter, DTensor):
        here = distribute_tensor(here, parameter.device_mesh, parameter.placements, src_data_rank=None)
    parameter.copy_(here)


class BodyPolicyEngine(_Bodies):
    """Train engine of a policy, with decisions in the place of tokens."""

    @property
    def policy(self) -> BodyPolicy:
        """The policy, for what does not depend on its weights."""
        return cast("BodyPolicy", self.model.model)

    def log_probs(self, batch: Batch) -> Jagged:
        """Log-probabilities of decisions, without gradient."""
        return self.scores(batch, lambda micro_batch: self.forward(micro_batch, "none").log_probs)

    def forward(self, micro_batch: MicroBatch, entropy: Entropy = "value") -> TokenOutputs:
        """Log-probabilities and entropies of the decisions of a micro-batch, unit by unit."""
        assert isinstance(micro_batch, BodyMicroBatch)
        assert isinstance(micro_batch.temperature, float), "all decisions of a pass have the same temperature"
        self.process_group.activity.beat()
        with one_copy(self.device):
            observed = micro_batch.observed.placed(self.device)
            choices, decisions, places = (
                placed(one, self.device) for one in (micro_batch.choices, micro_batch.decisions, micro_batch.places)
            )
        scores = cast("DecisionScores", self.model(observed, choices, micro_batch.temperature, micro_batch.num_pieces))
        units = self.grain, decisions, places
        log_probs = grained(scores.log_probs.float(), *units)
        if entropy == "none":
            return TokenOutputs(log_probs, log_probs[:0])
        entropies = grained(scores.entropies.float(), *units)
        return TokenOutputs(log_probs, entropies if entropy == "gradient" else entropies.detach())


class BodyValueEngine(_Bodies):
    """Value engine of a critic, with decisions in the place of tokens: all units of a decision have its value."""

    @property
    def is_value_model(self) -> bool:
        """Always true."""
        return True

    def values(self, batch: Batch) -> Jagged:
        """Values of decisions, without gradient."""
        return self.scores(batch, self.forward)

    def forward(self, micro_batch: MicroBatch) -> Tensor:
        """Values at the decisions of a micro-batch, or at its steps if the critic has one for each."""
        assert isinstance(micro_batch, BodyMicroBatch)
        steps = micro_batch.steps
        with one_copy(self.device):
            observed = micro_batch.observed.placed(self.device)
            decisions = placed(micro_batch.decisions, self.device)
            there = None if steps is None else placed(steps, self.device)
        found = self._values(observed, micro_batch.num_pieces)
        if found.ndim == 1:
            return found[decisions]
        assert steps is not None
        if len(steps) and int(steps.max()) >= found.shape[1]:
            raise RuntimeError(
                f"the critic has values for {found.shape[1]} steps of a decision, but the policy's decisions have "
                "more: give both the same option chunk"
            )
        return found[decisions, there]

    @torch.no_grad()
    def final_values(self, batch: Batch) -> Tensor:
        """Value of what each episode saw at its end, [n] float32; 0 for failed ones, which saw nothing."""
        found = torch.zeros(len(batch))
        episodes = _Episodes.of(batch, self.model.model)
        rows = torch.nonzero(episodes.seen.lengths > 0)[:, 0]
        parts = list(torch.split(rows, max(1, self.micro_batch_tokens // self.model.model.chunk)))
        count = int(self.process_group.max(torch.tensor([len(parts)]), "the number of passes over last observations"))
        values: list[Tensor] = []
        for part in [*parts, *[rows[:0]] * (count - len(parts))]:
            with one_copy(self.device):
                ends = episodes.ends(part).placed(self.device)
            after = self._values(ends)[: len(part)]
            values.append(after if after.ndim == 1 else after[:, 0])
        if self.units:
            self.units[-1].reshard()
            forget_order(self.units)
        found[rows] = torch.cat(values).cpu()
        return found

    def _values(self, observed: Observed, num_pieces: int = 1) -> Tensor:
        self.process_group.activity.beat()
        return cast("Tensor", self.model(observed, None, 1.0, num_pieces)).float()


@dataclass(frozen=True)
class _Episodes:
    """The columns of a batch that passes need; a model always sees something, if only a blank."""

    model: BodyPolicy | BodyValue
    seen: Jagged  # pixels
    states: Jagged
    choices: Jagged
    tokens: Jagged
    turns: Jagged
    env_steps: Jagged | None
    instructions: list[list[int]]
    prompt_of_row: Tensor
    temperatures: Tensor | None

    @classmethod
    def of(cls, batch: Batch, model: BodyPolicy | BodyValue) -> _Episodes:
        """Take the columns of a batch."""
        prompts, prompt_of_row = batch.prompts, batch.prompt_index
        if prompts is None or prompt_of_row is None or "prompt_tokens" in batch.columns:
            prompts, prompt_of_row = batch, torch.arange(len(batch))
        return cls(
            model,
            seen=batch.jagged("frames"),
            states=batch.jagged("states"),
            choices=batch.jagged("choices"),
            tokens=batch.jagged("tokens"),
            turns=batch.jagged("turns"),
            env_steps=batch.jagged("env_steps") if getattr(model, "per_step", False) else None,
            instructions=prompts.jagged("prompt_tokens").to_lists(),
            prompt_of_row=prompt_of_row,
            temperatures=batch.jagged(TEMPERATURES).values if TEMPERATURES in batch else None,
        )

    @property
    def counts(self) -> Tensor:
        """[n] int64: number of decisions of each episode."""
        return self.choices.lengths

    def pack(self, rows: Tensor) -> BodyMicroBatch:
        """The passes of some episodes, [m] int64, in which each decision is computed once."""
        counts, units = self.counts[rows], self.tokens.select(rows)
        first = (counts.cumsum(0) - counts).repeat_interleave(units.lengths)
        index = ragged_index(self.seen.offsets[:-1][rows], counts)
        unit_index = ragged_index(self.tokens.offsets[:-1][rows], units.lengths)
        temperatures = None if self.temperatures is None else self.temperatures[unit_index]
        if temperatures is not None and bool((temperatures != temperatures[:1]).any()):
            raise RuntimeError("decisions of a pass were made at several temperatures: score them in batches of one")
        none = torch.empty(0, dtype=torch.int64)
        return BodyMicroBatch(
            tokens=torch.zeros(max(1, int(counts.sum()) * self.model.chunk), dtype=torch.int64),
            positions=none,
            families=[Family(1, tuple(counts.tolist()))],
            select=none,
            targets=none,
            response_index=unit_index,
            response_lengths=units.lengths,
            temperature=1.0 if temperatures is None or not len(temperatures) else float(str(temperatures[0].numpy())),
            observed=self._observed(index, rows.repeat_interleave(counts)),
            choices=_some(self.choices.select(rows).values),
            decisions=first + self.turns.select(rows).values.long(),
            places=units.values,
            steps=None if self.env_steps is None else self._steps(self.env_steps, rows),
        )

    def _steps(self, env_steps: Jagged, rows: Tensor) -> Tensor:
        """[R] int64: step of each unit in its decision."""
        steps, turns = (one.select(rows) for one in (env_steps, self.turns))
        return Decisions.of(turns.values.long(), steps.values.long(), steps.lengths).within

    def ends(self, rows: Tensor) -> Observed:
        """Last observations of some episodes, [m] int64."""
        return self._observed(self.seen.offsets[1:][rows] - 1, rows)

    def _observed(self, index: Tensor, rows: Tensor) -> Observed:
        pixels, states = _some(self.seen.values[index]), _some(self.states.values[index])
        ids = [self.instructions[prompt] for prompt in self.prompt_of_row[rows].tolist()] or [[0]]
        return Observed(images_of(pixels, self.model.spaces), states, padded(ids, torch.device("cpu")))


def _some(values: Tensor) -> Tensor:
    """Values, or zeros for one decision if there are none."""
    return values if len(values) else values.new_zeros(1, *values.shape[1:])


def make_body_engine(setup: EngineSetup) -> BodyPolicyEngine | BodyValueEngine | SacEngine:
    """Load a policy or a critic of a body, or make one, and shard it over the ranks of its layout.

    Raises:
        RecipeError: It cannot be loaded or made, or is to be divided along another axis than `dp`.
    """
    assert setup.body is not None
    key = f"models.{setup.role}"
    if wrong := [axis for axis in setup.layout.axes if axis != "dp"]:
        raise RecipeError.at(key, f"a policy of a body cannot be divided along {', '.join(wrong)}: use dp alone")
    if setup.body.sac is not None and setup.optimizer is not None:
        return make_sac_engine(setup)
    opened = open_model(setup.model, key, spaces_of(setup.body.config), is_critic=setup.is_critic)
    if isinstance(opened.model, BodyValue) and opened.model.per_step != setup.body.values_steps:
        has, wants, remedy = (
            ("one value", "reward=action", "true")
            if setup.body.values_steps
            else ("a value for each step", "reward=chunk", "false")
        )
        raise RecipeError.at(
            f"{key}.body",
            f"the critic has {has} of a decision, which does not go with algorithm.advantage.{wants}: set its option "
            f"per_step to {remedy}",
        )
    make = BodyValueEngine if setup.is_critic else BodyPolicyEngine
    engine = make(
        HeldBody(opened.model, opened.describe),
        setup.model,
        setup.process_group,
        setup.device,
        setup.micro_batch_tokens,
        optimizer=setup.optimizer,
        num_updates=setup.num_updates,
        division=WeightSharding(offload_folder=setup.sharding.offload_folder),
    )
    engine.grain = setup.body.config.log_prob
    return engine
