"""The models of a rank: one instance for each role and layout that it belongs to."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

import torch

from leaderless.config import Recipe, RecipeError
from leaderless.data.encode import Tokenizer
from leaderless.data.transport import ProcessGroup, Transport
from leaderless.observability.run_directory import RunDirectory
from leaderless.planner import Layout, Plan, RoleInstance, SyncWeights
from leaderless.planner.backends import backend_of
from leaderless.rollout.make import Surroundings, make_engine
from leaderless.stages.context import ModelRole
from leaderless.supervision.limits import lower_limit, read_limits
from leaderless.training.engine import EngineSetup, Trainable, ValueEngine
from leaderless.training.registry import make_train_engine, make_value_engine
from leaderless.weights.blocks import HeldWeights, Pool, everything, shard_rows
from leaderless.weights.route import Route
from leaderless.weights.stream import fill_weights, send_weights

InstanceKey = tuple[str, tuple[int, ...]]
"""Role and ranks."""


class Roles:
    """The models of which this rank holds a part.

    Attributes:
        engines: Instances, by role and ranks.
    """

    def __init__(
        self,
        recipe: Recipe,
        plan: Plan,
        transport: Transport,
        device: torch.device,
        tokenizer: Tokenizer,
        logs: Path,
        report: Callable[[str], None],
    ) -> None:
        """Load and shard the models; engines print into `logs`."""
        beat = transport.activity.beat
        self._around = Surroundings(transport.rank, transport.world.size, device, logs, report, beat)
        self._recipe, self._plan, self._transport, self._tokenizer = recipe, plan, transport, tokenizer
        self.engines: dict[InstanceKey, Trainable] = {}
        self._models: dict[InstanceKey, ModelRole | ValueEngine] = {}
        self._routes: dict[SyncWeights, Route] = {}
        for instance in plan.instances:
            if transport.rank in instance.layout:
                self._add(instance)

    def adapt_to_memory(self, directory: RunDirectory, pass_tokens: int) -> None:
        """Lower the bound of a pass where memory runs out, and keep it in the folder of the run for later starts.

        The first start begins with `pass_tokens`; later ones keep that bound, whatever memory there is then.
        """
        limits = read_limits(directory)
        for (role, _), engine in self.engines.items():
            engine.micro_batch_tokens = min(engine.micro_batch_tokens, limits.get(role, pass_tokens))
            if role not in limits and self._transport.rank == engine.process_group.ranks[0]:
                lower_limit(directory, role, engine.micro_batch_tokens)
            engine.adapt_to_memory(partial(lower_limit, directory, role))

    def _add(self, instance: RoleInstance) -> None:
        role, ranks = instance.role, instance.layout.ranks
        recipe = self._recipe.as_seen_by(role)
        config = recipe.model_of(role)
        assert config is not None
        setup = EngineSetup(
            role=role,
            model=config,
            is_critic=instance.is_critic,
            layout=instance.layout,
            process_group=self._transport.process_group(ranks),
            axis_groups={
                axis: self._transport.process_group(instance.layout.peers(self._transport.rank, axis))
                for axis in instance.layout.axes
            },
            device=self._around.device,
            optimizer=recipe.optimizer if instance.is_trained else None,
            num_updates=instance.num_updates,
            micro_batch_tokens=self._plan.batch.micro_batch_tokens,
        )
        if instance.is_critic:
            critic = make_value_engine(recipe.training.backend, setup)
            check_vocabulary(critic, self._tokenizer, role)
            self.engines[role, ranks] = self._models[role, ranks] = critic
            return
        engine = make_train_engine(recipe.training.backend, setup)
        check_vocabulary(engine, self._tokenizer, role)
        max_tokens = recipe.data.max_prompt_tokens + recipe.rollout.max_response_tokens
        generator = make_engine(
            self._plan.engine, recipe.rollout, config, role, max_tokens, engine.model, self._tokenizer, self._around
        )
        self.engines[role, ranks], self._models[role, ranks] = engine, ModelRole(engine, generator)

    def close(self) -> None:
        """End the engines, and with them their servers."""
        for model in self._models.values():
            if isinstance(model, ModelRole) and model.rollout_engine is not None:
                model.rollout_engine.close()

    def of(self, role: str, layout: Layout) -> ModelRole | ValueEngine:
        """The instance of a role on a layout."""
        return self._models[role, layout.ranks]

    def trained(self) -> Mapping[str, Trainable]:
        """The trained instances that this rank holds a part of, by role, in the plan's order."""
        return {
            instance.role: self.engines[instance.role, instance.layout.ranks]
            for instance in self._plan.instances
            if instance.is_trained and self._transport.rank in instance.layout
        }

    def sync(self, action: SyncWeights, process_group: ProcessGroup | None = None) -> None:
        """Send new weights to a serving instance. All ranks of both layouts call it together.

        Without a process group of these ranks, that of the main thread is used.
        """
        source = self.engines.get((action.role, action.source_layout.ranks))
        target = self.engines.get((action.role, action.target_layout.ranks))
        held = HeldWeights.of(source.local_weights(), source.policy_version) if source else None
        process_group = process_group or self._transport.process_group(action.ranks)
        if target is not None:
            wanted = HeldWeights.of(target.local_weights(), target.policy_version)
            target.state_loaded(fill_weights(self._route(action, wanted), wanted, process_group, held))
        elif held is not None:
            send_weights(self._route(action, held), held, process_group)

    def copy_weights(self, action: SyncWeights) -> Callable[[ProcessGroup], None]:
        """Copy the weights of now to host memory; the function that is returned sends them, in any thread."""
        source = self.engines[action.role, action.source_layout.ranks]
        copied = HeldWeights.of(source.local_weights(), source.policy_version).copied()
        route = self._route(action, copied)
        return lambda process_group: send_weights(route, copied, process_group)

    def _route(self, action: SyncWeights, some: HeldWeights) -> Route:
        """The way of new weights, given what this rank has of old or new ones."""
        if action not in self._routes:
            backend = backend_of(self._recipe.as_seen_by(action.role).training.backend)
            placement = shard_rows if backend.shards_weights else everything
            pools = Pool(action.source_layout, placement), Pool(action.target_layout, placement)
            self._routes[action] = Route(action.role, some.shapes, *pools, torch.float32, self._transport.rank)
        return self._routes[action]

    def sync_all(self) -> None:
        """Send the trained weights to every serving instance, as after loading a checkpoint."""
        for action in self._plan.schedule:
            if isinstance(action, SyncWeights) and self._transport.rank in action.ranks:
                self.sync(action)
        for channel in self._plan.channels:
            if channel.sync is not None and self._transport.rank in channel.sync.ranks:
                self.sync(channel.sync, self._transport.lane(channel.name, channel.sync.ranks))


def check_vocabulary(engine: Trainable, tokenizer: Tokenizer, role: str) -> None:
    """Refuse a model that has no embedding for some of the tokens of the policy's tokenizer."""
    if len(tokenizer) > engine.vocab_size:
        raise RecipeError.at(
            f"models.{role}",
            f"has embeddings for {engine.vocab_size} tokens, but the policy's tokenizer has {len(tokenizer)}: "
            "all roles must share one tokenizer",
        )
