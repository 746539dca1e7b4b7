"""The models of a rank: one instance for each role and layout that it belongs to."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import cast
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from leaderless.base.named_functions import load_own
from leaderless.config import Recipe
from leaderless.data.prompts.encode import Tokenizer
from leaderless.distributed.transport import ProcessGroup, Transport
from leaderless.distributed.weights.blocks import HeldWeights, Pool, Shape
from leaderless.distributed.weights.copies import begin_copy
from leaderless.distributed.weights.route import WeightRoute
from leaderless.distributed.weights.sent import Traffic
from leaderless.distributed.weights.stream import Probe, fill_weights, send_weights
from leaderless.environments.tools.sources import close_tools
from leaderless.models.causal_lm import CausalLM, empty_causal_lm
from leaderless.models.decoder import reserved_tokens
from leaderless.models.loading.tokenizer import check_vocabulary, load_chat_tokenizer, load_tokenizer
from leaderless.observability.run_directory import RunDirectory
from leaderless.planner import Layout, Plan, RoleInstance, SyncWeights, answering, trained_instance, trains_reward_model
from leaderless.planner.checks.model_files import players_of
from leaderless.planner.engines import engine_for, engine_of
from leaderless.planner.graph.adapters import base_of, companions_of, donor_of, optimizer_of
from leaderless.planner.graph.judges import as_judged
from leaderless.planner.memory.estimate import plan_pool
from leaderless.planner.workflow.columns import SUPPORT
from leaderless.planner.workflow.products import PRODUCTS
from leaderless.rollout.engine import RolloutEngine
from leaderless.rollout.external.engine import ExternalEngine
from leaderless.rollout.external.lora_slots import Hosts
from leaderless.rollout.make_engine import RolloutSetup, make_engine, probe_text
from leaderless.rollout.native.engine import NativeEngine
from leaderless.rollout.weight_sources import Colocated, Fed, Serving, held_by, probe_of, shapes_of, weights_of
from leaderless.rollout.wrapped_engine import SharedEngine
from leaderless.stages.context import ModelRole
from leaderless.stages.episode_rollout import check_policy, tools_of
from leaderless.training.engine import (
    AdaptedEngine,
    BodySetup,
    EngineSetup,
    Trainable,
    TrainEngine,
    ValueEngine,
    make_train_engine,
    make_value_engine,
    move_state,
)
from leaderless.worker.build.instances import (
    apart_setup,
    instances_of,
    is_merged,
    placement_of,
    sharding_setup,
    trains_like,
    type_of_engines,
    way_to_engines,
)
from leaderless.worker.build.memory_bounds import MemoryBounds
from leaderless.worker.device_sharing import DeviceSharing
from leaderless.worker.supervision.settled_memory import lower_limit, read_limits

InstanceKey = tuple[str, tuple[int, ...]]
"""Role and ranks."""


class Roles:
    """The models of which this rank holds a part.

    Attributes:
        engines: Instances, by role and ranks.
        seconds: Seconds in which they were made at the start.
        tokenizer: Tokenizer of the policy.
        tokenizers: Tokenizers of judges, and of teachers that are asked by text, by role.
        memory: Bounds of memory that all ranks have agreed on.
    """

    def __init__(
        self,
        recipe: Recipe,
        plan: Plan,
        transport: Transport,
        turns: DeviceSharing,
        tokenizer: Tokenizer,
        logs: Path,
        report: Callable[[str], None],
        memory: MemoryBounds | None = None,
    ) -> None:
        """Load and shard models on this rank's device, within bounds of memory; engines print into `logs`."""
        self._device, self._turns, self._logs, self._report = turns.device, turns, logs, report
        self._recipe, self._plan, self._transport, self.tokenizer = recipe, plan, transport, tokenizer
        self._product = PRODUCTS[recipe.product]
        self.engines: dict[InstanceKey, Trainable] = {}
        self._models: dict[InstanceKey, ModelRole | ValueEngine] = {}
        self._routes, self._hosts = dict[SyncWeights, WeightRoute](), Hosts()
        self.tokenizers: dict[str, Tokenizer] = {}
        self._native = WeakValueDictionary[InstanceKey, CausalLM]()  # models of engines, as long as these exist
        self._limits: RunDirectory | None = None
        self._check_players()
        self.memory = memory or MemoryBounds(0, is_cpu=True, pass_tokens=0)
        begin, self._room = time.monotonic(), self.memory.room
        own = [instance for instance in plan.instances if transport.rank in instance.layout]
        with ExitStack() as stack:
            # Engines with memory of their own that generate next to models that train or score.
            generating = [] if self._product.rollout_engine else self._generating
            beside = (one for one in own if one in generating and not (one.is_engine_only or one.is_critic))
            self._started = {one: self._start(one, stack) for one in beside if engine_of(one.engine).keeps_weights}
            for instance in sorted(own, key=lambda one: not one.is_trained):  # others may share their models
                self._add(instance)
            stack.pop_all()  # engines belong to models now
        self.seconds = time.monotonic() - begin

    @property
    def _generating(self) -> list[RoleInstance]:
        """The instances with engines: those that generate, and the one that answers held-out prompts."""
        instances = self._plan.instances
        return [*(one for one in instances if one.has_engine), answering(instances, self._recipe.evaluation.role)]

    def _check_players(self) -> None:
        """Find what is wrong with the tools and the models that play before any model is loaded."""
        here = {one.role for one in self._generating if self._transport.rank in one.layout}
        if here:
            tools_of(self._recipe, self.tokenizer)
        for role in players_of(self._recipe, self._plan.nodes, self._plan.instances):
            if role in here:
                check_policy(self._recipe, self.tokenizer, role)

    def adapt_to_memory(self, directory: RunDirectory) -> None:
        """Lower the bound of a pass where memory runs out, and keep it in the folder of the run for later starts.

        Later starts keep the bound with which the first one begins, whatever memory there is then.
        """
        self._limits = directory
        limits = read_limits(directory)
        for (role, _), engine in self.engines.items():
            engine.micro_batch_tokens = min(engine.micro_batch_tokens, limits.get(role, self.memory.pass_tokens))
            if role not in limits and self._transport.rank == engine.process_group.ranks[0]:
                lower_limit(directory, role, engine.micro_batch_tokens)
            engine.adapt_to_memory(partial(lower_limit, directory, role))

    def _start(self, instance: RoleInstance, stack: ExitStack) -> RolloutEngine:
        """Make an engine, and start it if it is one in another process or library, before models take memory.

        It is asleep then, and has given its memory back. In the first step, the trainer would be in its way, and all
        ranks would wait for it.
        """
        recipe = self._recipe_of(instance)
        engine = self._engine(instance, self._setup(instance, recipe))
        stack.callback(engine.close)
        if isinstance(engine, ExternalEngine):
            engine.start()
        return engine

    def _recipe_of(self, instance: RoleInstance) -> Recipe:
        """The recipe as an instance has to follow it; a tokenizer of its own is loaded."""
        role, load = instance.role, load_chat_tokenizer if instance.is_judge else load_tokenizer
        recipe = as_judged(self._recipe, role) if instance.is_judge else self._recipe.as_seen_by(role)
        if (instance.is_judge or role in self._asked_by_text) and role not in self.tokenizers:
            config = recipe.model_of(role)
            assert config is not None, "checked by the planner"
            self.tokenizers[role] = load(config, role)
        return recipe

    @property
    def _asked_by_text(self) -> set[str]:
        """Teachers whose words are known by their text."""
        teachers = {role for node in self._plan.nodes for _, role in node.node.teachers}
        return teachers if self._recipe.algorithm.distillation.align == "text" else set()

    def _add(self, instance: RoleInstance, trainer: Trainable | None = None) -> None:
        """Make an instance, with a trainer that is there already or with a new one."""
        role, ranks, recipe = instance.role, instance.layout.ranks, self._recipe_of(instance)
        config = recipe.model_of(role)
        assert config is not None
        if instance.is_engine_only:
            self._models[role, ranks] = ModelRole(None, self._fed(instance, recipe))
            return
        if (base := base_of(self._recipe, self._plan.instances, instance)) is not None:
            shared = cast("AdaptedEngine", self.engines[base.role, base.layout.ranks]).base()
            self._models[role, ranks] = ModelRole(shared, None)
            return
        donor = donor_of(self._recipe, self._plan.instances, instance)  # its weights lie under the adapters of this one
        lender = None if donor is None else self.engines.get((donor.role, donor.layout.ranks))
        body, algorithm = recipe.body, recipe.algorithm
        setup = EngineSetup(
            role=role,
            model=config,
            is_critic=instance.is_critic,
            layout=instance.layout,
            process_group=self._transport.process_group(ranks),
            axis_groups=self._transport.axis_groups(instance.layout),
            device=self._device,
            optimizer=optimizer_of(recipe, config) if instance.is_trained else None,
            num_updates=instance.num_updates,
            micro_batch_tokens=self._plan.batch.micro_batch_tokens,
            apart=apart_setup(recipe, self._logs),
            body=None if body is None else BodySetup(body, algorithm.sac, algorithm.advantage.values_steps),
            is_reward_model=trains_reward_model(self._plan, role),
            seed=recipe.seed,
            sharding=sharding_setup(self._recipe, self._plan, instance, self._room, lender),
        )
        if instance.is_critic:
            critic = cast("ValueEngine | None", trainer) or make_value_engine(recipe.training.backend, setup)
            self._say_speed(role, critic)
            check_vocabulary(critic.vocab_size, self.tokenizer, role)
            self.engines[role, ranks] = self._models[role, ranks] = critic
            return
        engine = cast("TrainEngine | None", trainer) or make_train_engine(recipe.training.backend, setup)
        self._say_speed(role, engine)
        check_vocabulary(engine.vocab_size, self.tokenizers.get(role, self.tokenizer), role)
        serving = self._colocated(instance, recipe, engine) if instance in self._generating else None
        self.engines[role, ranks], self._models[role, ranks] = engine, ModelRole(engine, serving)

    def _say_speed(self, role: str, engine: Trainable) -> None:
        """Say once, on the first rank of a role, that its layers are not compiled although they should be."""
        reason = getattr(engine, "why_not_compiled", "")
        if reason and self._transport.rank == engine.process_group.ranks[0]:
            self._report(f"layers of role '{role}' are not compiled, and so slower, since {reason}")

    def _engine(self, instance: RoleInstance, setup: RolloutSetup) -> RolloutEngine:
        """An engine that generates; a native one may use the weights of another."""
        key, donor = (instance.role, instance.layout.ranks), donor_of(self._recipe, self._plan.instances, instance)
        model = None if donor is None else self._native.get((donor.role, donor.layout.ranks))
        host = self._hosts.of(companions_of(self._recipe, self._plan.instances, instance), self._recipe)
        engine = make_engine(instance.engine, replace(setup, donor=model, host=host))
        if isinstance(engine, NativeEngine):
            self._native[key] = engine.model
        return engine

    def _setup(self, instance: RoleInstance, recipe: Recipe) -> RolloutSetup:
        config, layout = recipe.model_of(instance.role), instance.serving_layout
        assert config is not None, "checked by the planner"
        ranks, transport = layout.shard(self._transport.rank), self._transport
        alone = ProcessGroup(ranks, transport.rank, activity=transport.activity)
        return RolloutSetup(
            role=instance.role,
            rollout=recipe.rollout,
            model=config,
            max_tokens=recipe.longest_text(),
            tokenizer=self.tokenizers.get(instance.role, self.tokenizer),
            layout=layout,
            shard=transport.process_group(ranks) if len(ranks) > 1 else alone,
            world_size=transport.world.size,
            device=self._device,
            logs=self._logs,
            report=self._report,
            records_experts=recipe.algorithm.replay_experts,
            records_support=any(SUPPORT in node.reads for node in self._plan.nodes),
            pool=plan_pool(self._recipe, self._plan.instances, self._plan.sizes, instance, self._room.cache),
        )

    def _colocated(self, instance: RoleInstance, recipe: Recipe, trainer: TrainEngine) -> Serving:
        """An engine on ranks that also train or score the model."""
        setup, spec = self._setup(instance, recipe), engine_for(recipe.rollout, instance.engine)
        pool = Pool(instance.layout, placement_of(recipe, trainer.weight_shapes()))
        own, dtype = self._own_engine(setup, recipe), getattr(torch, setup.model.compute_dtype)
        if own is not None:
            return Colocated(own, trainer, pool, dtype)
        started = self._started.pop(instance, None)
        return Colocated(
            started or self._engine(instance, setup),
            trainer,
            pool,
            dtype,
            shard=setup.shard,
            probe=setup.probe if self._is_probed(instance.role) else (),
            may_restart=spec.restarts_on(setup.layout),
            is_merged=is_merged(instance, recipe),
        )

    def _fed(self, instance: RoleInstance, recipe: Recipe) -> Fed:
        """An engine on ranks that only generate."""
        layout, route, setup = instance.layout, self._way_to(instance, recipe), self._setup(instance, recipe)
        group = self._transport.process_group(layout.ranks)
        if (special := self._own_engine(setup, recipe)) is not None:
            return Fed(special, route, group)
        engine = self._engine(instance, setup)
        own, keep_cache = partial(weights_of, engine.model) if isinstance(engine, NativeEngine) else None, True
        if self._plan.loop_of(self._transport.rank).is_continuous:
            engine = SharedEngine(engine, self._turns.for_step)  # it continues while held-out prompts are answered
            keep_cache = next(iter(recipe.open_channels.values())).cache == "keep"
        may_restart = engine_of(instance.engine).restarts_on(layout)
        return Fed(engine, route, group, shard=setup.shard, may_restart=may_restart, keep_cache=keep_cache, own=own)

    def _own_engine(self, setup: RolloutSetup, recipe: Recipe) -> RolloutEngine | None:
        """The engine of a kind of run that does not generate text; None for those that do."""
        if not (name := self._product.rollout_engine):
            return None
        return cast("Callable[[RolloutSetup, Recipe], RolloutEngine]", load_own(name))(setup, recipe)

    def _way_to(self, instance: RoleInstance, recipe: Recipe) -> WeightRoute:
        """The way of weights to ranks that only generate."""
        role, config = instance.role, recipe.model_of(instance.role)
        assert config is not None, "checked by the planner"
        trained = trained_instance(self._plan, role)
        if name := self._product.weight_shapes:
            shapes = cast("Callable[[str, Recipe], Mapping[str, Shape]]", load_own(name))(role, recipe)
        else:
            shapes = shapes_of(empty_causal_lm(config, role), is_merged=is_merged(instance, recipe))
        assert trained is not None, "ranks only generate with a role that is trained elsewhere"
        return way_to_engines(instance, self._plan, recipe, trained.layout, shapes, self._transport.world)

    def adopt(self, plan: Plan) -> None:
        """Hold what another plan wants, with the state of the trained models. All ranks of the world call it together.

        Roles follow one another, so that at most one of them is here twice. What both plans have on the same ranks
        stays as it is. Instances that follow a trained one have to be sent its weights afterwards; see `sync_all`.
        """
        before, self._plan = self._plan, plan
        self._routes.clear()
        self._check_players()
        instances = sorted((*before.instances, *plan.instances), key=lambda one: not one.is_trained)
        for role in dict.fromkeys(one.role for one in instances):
            self._adopt_role(role, before)
        if self._limits is not None:
            self.adapt_to_memory(self._limits)

    def _adopt_role(self, role: str, before: Plan) -> None:
        old, new = (instances_of(role, plan, self._recipe) for plan in (before, self._plan))
        kept, rank = {one for one in old if new.get(one) == old[one]}, self._transport.rank
        kept = {one for one in kept if base_of(self._recipe, self._plan.instances, one) is None}
        left: dict[RoleInstance, Trainable] = {}
        for one in old:
            if rank not in one.layout or one in kept:
                continue
            model = self._models.pop((role, one.layout.ranks))
            if isinstance(model, ModelRole) and model.serving is not None:
                model.serving.close()  # before the next engine needs its memory
            if (engine := self.engines.pop((role, one.layout.ranks), None)) is not None:
                left[one] = engine
        for one in new:
            if rank in one.layout and one not in kept:
                self._add(one, next((engine for was, engine in left.items() if trains_like(was, one)), None))
            elif rank in one.layout and one.is_engine_only:
                serving = cast("ModelRole", self._models[role, one.layout.ranks]).serving
                cast("Fed", serving).reroute(self._way_to(one, self._recipe.as_seen_by(role)))
        self._move(role, before, left)

    def _move(self, role: str, before: Plan, left: Mapping[RoleInstance, Trainable]) -> None:
        """Send the state of a trained model to the ranks that train it now, if these divide it otherwise."""
        source, target = trained_instance(before, role), trained_instance(self._plan, role)
        if source is None or target is None or trains_like(source, target):
            return
        held, world = left.get(source), self._transport.world
        version = torch.tensor([held.policy_version if held else 0])
        version = world.max(version, f"the policy version of role '{role}'")
        wanted = self.engines[role, target.layout.ranks] if world.rank in target.layout else None
        placement = placement_of(self._recipe.as_seen_by(role), ())  # stages of a pipeline do not move
        pools = Pool(source.layout, placement), Pool(target.layout, placement)
        move_state(role, held, wanted, pools, world)
        if wanted is not None:
            wanted.state_loaded(int(version))

    def close(self) -> None:
        """End the engines that generate and the tools that they use, and with them their servers."""
        close_tools()
        for serving in self.servings():
            serving.close()

    def servings(self) -> list[Serving]:
        """The engines that generate on this rank, with the sources of their weights."""
        return [one.serving for one in self._models.values() if isinstance(one, ModelRole) and one.serving is not None]

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

        Without a process group of these ranks, the main thread's is used.
        """
        self._exchange(action, *self._offer(action), process_group or self._transport.process_group(action.ranks))

    def copy_weights(self, action: SyncWeights) -> Callable[[ProcessGroup], None]:
        """Begin to copy the weights of now to host memory; the function that is returned sends them, in any thread."""
        assert self._taker(action) is not None, "through a channel, weights go to ranks that only generate"
        held, log_probs = self._offer(action)
        assert held is not None, "only ranks that hold weights send them"
        copy = begin_copy(held, type_of_engines(action.role, self._recipe.as_seen_by(action.role)))
        return lambda process_group: self._exchange(action, copy.wait(), log_probs, process_group)

    def traffic(self, action: SyncWeights) -> Traffic:
        """The messages in which this rank has sent weights since the last call."""
        return self._routes[action].take_traffic() if action in self._routes else Traffic()

    def fetch(self, action: SyncWeights, lane: Callable[[tuple[int, ...]], ProcessGroup]) -> Callable[[], None]:
        """Receive new weights for an engine in any thread; the function that is returned gives them to the engine.

        The ranks that train send them together with this. `lane` finds the process group of some ranks, for this
        thread.
        """
        model = self._models[action.role, action.target_layout.ranks]
        assert isinstance(model, ModelRole), "only language models generate"
        assert isinstance(model.serving, Fed), "an instance that is only an engine is fed"
        recipe = self._recipe.as_seen_by(action.role)
        probe = self._probe(action, recipe, None, lane(action.ranks))
        return model.serving.fetch(lane(action.ranks), lane(action.target_layout.ranks), probe)

    def _exchange(
        self, action: SyncWeights, held: HeldWeights | None, log_probs: Tensor | None, process_group: ProcessGroup
    ) -> None:
        """Send, receive or both, as this rank is in one layout or the other."""
        role, target = action.role, self._models.get((action.role, action.target_layout.ranks))
        recipe = self._recipe.as_seen_by(role)
        if (taker := self._taker(action)) is None:
            copy = self.engines.get((role, action.target_layout.ranks))
            wanted = held_by(copy) if copy else None
            some = held or wanted
            assert some is not None, "a rank without any of these weights does not take part"
            placement = placement_of(recipe, some.shapes)
            pools = Pool(action.source_layout, placement), Pool(action.target_layout, placement)
            route = self._routes.setdefault(
                action,
                WeightRoute(f"weights of role '{role}'", some.shapes, *pools, torch.float32, self._transport.rank),
            )
            if copy is not None and wanted is not None:
                copy.state_loaded(fill_weights(route, wanted, process_group, held))
            elif held is not None:
                send_weights(route, held, process_group)
            return
        probe = self._probe(action, recipe, log_probs, process_group)
        if isinstance(target, ModelRole):
            assert isinstance(target.serving, Fed), "an instance that is only an engine is fed"
            self._routes[action] = target.serving.route
            target.serving.receive(process_group, held, probe)
        elif held is not None:
            if action not in self._routes:
                given = action.source_layout, held.shapes, self._transport.world
                self._routes[action] = way_to_engines(taker, self._plan, recipe, *given)
            send_weights(self._routes[action], held, process_group)

    def _offer(self, action: SyncWeights) -> tuple[HeldWeights | None, Tensor | None]:
        """What this rank sends: weights, and log-probabilities of a probe where an engine is asked for its own."""
        source = self.engines.get((action.role, action.source_layout.ranks))
        if source is None:
            return None, None
        role, taker = action.role, self._taker(action)
        recipe = self._recipe.as_seen_by(role)
        held = held_by(source, is_merged=taker is not None and is_merged(taker, recipe))
        if taker is None or not self._is_probed(role):
            return held, None
        return held, probe_of(cast("TrainEngine", source), self._probe_text(recipe, role)).log_probs

    def _taker(self, action: SyncWeights) -> RoleInstance | None:
        """The instance that gets weights, if its ranks only generate."""
        key = action.role, action.target_layout
        return next((one for one in self._plan.instances if one.is_engine_only and (one.role, one.layout) == key), None)

    def _is_probed(self, role: str) -> bool:
        """Whether the engines of a role compare the trainer's log-probabilities of a text with their own."""
        recipe = self._recipe.as_seen_by(role)
        if self._product.rollout_engine:  # it moves bodies, and scores no text
            return False
        name = next(one.engine for one in self._plan.instances if one.role == role)
        spec, model = engine_for(recipe.rollout, name), recipe.model_of(role)
        return spec.compares(has_adapters=model is not None and model.lora is not None)

    def _probe_text(self, recipe: Recipe, role: str) -> list[int]:
        config = recipe.model_of(role)
        assert config is not None, "checked by the planner"
        return probe_text(self.tokenizer, recipe.longest_text(), reserved_tokens(config, role))

    def _probe(
        self, action: SyncWeights, recipe: Recipe, log_probs: Tensor | None, process_group: ProcessGroup
    ) -> Probe | None:
        """The probe with the trainer's log-probabilities, on all ranks of both layouts."""
        if not self._is_probed(action.role):
            return None
        tokens = self._probe_text(recipe, action.role)
        known = torch.zeros(len(tokens) - 1) if log_probs is None else log_probs
        what = f"the probe of role '{action.role}'"
        return Probe(tokens, process_group.broadcast(known, action.source_layout.ranks[0], what))

    def sync_all(self) -> None:
        """Send the trained weights to every other instance of a role, as at the start."""
        for action in self._plan.schedule:
            if isinstance(action, SyncWeights) and self._transport.rank in action.ranks:
                self.sync(action)
        for channel in self._plan.channels:
            if channel.sync is not None and self._transport.rank in channel.sync.ranks:
                self.sync(channel.sync, self._transport.lane(channel.name, channel.sync.ranks))
