"""The models of a rank: one instance for each role and layout that it takes part in."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

import torch

from leaderless.config import Recipe, RecipeError
from leaderless.data.encode import Tokenizer
from leaderless.data.transport import Transport
from leaderless.models.causal_lm import load_causal_lm
from leaderless.models.decoder import Decoder
from leaderless.models.value_model import load_value_model
from leaderless.observability.run_directory import RunDirectory
from leaderless.planner import Layout, Plan, RoleInstance, SyncWeights
from leaderless.rollout.make import Surroundings, make_engine
from leaderless.stages.context import ModelRole
from leaderless.supervision.limits import lower_limit, read_limits
from leaderless.training.engine import ValueEngine
from leaderless.training.fsdp import FsdpEngine, FsdpValueEngine
from leaderless.training.sharded import ShardedModel
from leaderless.training.weight_sync import sync_weights

InstanceKey = tuple[str, tuple[int, ...]]
"""Role and ranks."""


class Roles:
    """The models of which this rank holds a part."""

    def __init__(
        self,
        recipe: Recipe,
        plan: Plan,
        transport: Transport,
        device: torch.device,
        tokenizer: Tokenizer,
        logs: Path,
        tell: Callable[[str], None],
    ) -> None:
        """Load and shard the models.

        Args:
            recipe: All settings.
            plan: Plan with the ranks of each model.
            transport: Process groups for the ranks of each model.
            device: Device of this rank.
            tokenizer: Tokenizer of the policy.
            logs: Folder for what engines print.
            tell: Function that prints a line for people.
        """
        beat = transport.activity.beat
        self._around = Surroundings(transport.rank, transport.world.size, device, logs, tell, beat)
        self.recipe, self.plan, self.transport = recipe, plan, transport
        self.device, self.tokenizer = device, tokenizer
        self.engines: dict[InstanceKey, ShardedModel[Decoder]] = {}
        self._models: dict[InstanceKey, ModelRole | ValueEngine] = {}
        for instance in plan.instances:
            if transport.rank in instance.layout:
                self._add(instance)

    def adapt_to_memory(self, directory: RunDirectory, pass_tokens: int) -> None:
        """Lower the bound of a pass where memory runs out, as it was lowered in earlier starts of the run.

        Args:
            directory: Folder of the run, which keeps lowered bounds.
            pass_tokens: Bound that the first start begins with; later ones keep it, whatever memory there is then.
        """
        limits = read_limits(directory)
        for (role, _), engine in self.engines.items():
            engine.micro_batch_tokens = min(engine.micro_batch_tokens, limits.get(role, pass_tokens))
            if role not in limits and self.transport.rank == engine.process_group.ranks[0]:
                lower_limit(directory, role, engine.micro_batch_tokens)
            engine.adapt_to_memory(partial(lower_limit, directory, role))

    def _add(self, instance: RoleInstance) -> None:
        config, key = self.recipe.model_of(instance.role), (instance.role, instance.layout.ranks)
        assert config is not None
        process_group, micro_batch_tokens = (
            self.transport.process_group(instance.layout.ranks),
            self.plan.batch.micro_batch_tokens,
        )
        optimizer = self.recipe.optimizer_of(instance.role) if instance.is_trained else None
        if instance.is_critic:
            critic = load_value_model(config, instance.role)
            check_vocabulary(critic, self.tokenizer, instance.role)
            self.engines[key] = self._models[key] = FsdpValueEngine(
                critic,
                config,
                process_group,
                self.device,
                micro_batch_tokens,
                optimizer=optimizer,
                num_updates=instance.num_updates,
            )
            return
        model = load_causal_lm(config, instance.role)
        check_vocabulary(model, self.tokenizer, instance.role)
        engine = FsdpEngine(
            model,
            config,
            process_group,
            self.device,
            micro_batch_tokens,
            optimizer=optimizer,
            num_updates=instance.num_updates,
        )
        rollout = self.recipe.rollout
        max_tokens = self.recipe.data.max_prompt_tokens + rollout.max_response_tokens
        generator = make_engine(
            self.plan.engine,
            rollout,
            config,
            instance.role,
            max_tokens,
            engine.model,
            self.tokenizer,
            self._around,
        )
        self.engines[key], self._models[key] = engine, ModelRole(engine, generator)

    def close(self) -> None:
        """End the engines, and with them their servers."""
        for model in self._models.values():
            if isinstance(model, ModelRole) and model.rollout_engine is not None:
                model.rollout_engine.close()

    def of(self, role: str, layout: Layout) -> ModelRole | ValueEngine:
        """The instance of a role on a layout.

        Args:
            role: Role of a node.
            layout: Layout of the node.
        """
        return self._models[role, layout.ranks]

    def trained(self) -> Mapping[str, ShardedModel[Decoder]]:
        """The trained instances that this rank holds a part of, by role, in the plan's order."""
        return {
            instance.role: self.engines[instance.role, instance.layout.ranks]
            for instance in self.plan.instances
            if instance.is_trained and self.transport.rank in instance.layout
        }

    def sync(self, action: SyncWeights) -> None:
        """Send new weights to a serving instance. All ranks of both layouts call it together.

        Args:
            action: Entry of the chain.
        """
        source = self.engines.get((action.role, action.source_layout.ranks))
        target = self.engines.get((action.role, action.target_layout.ranks))
        sync_weights(action, self.transport.process_group(action.ranks), source, target)

    def sync_all(self) -> None:
        """Send the trained weights to every serving instance, as after loading a checkpoint."""
        for action in self.plan.schedule:
            if isinstance(action, SyncWeights) and self.transport.rank in action.ranks:
                self.sync(action)


def check_vocabulary(model: Decoder, tokenizer: Tokenizer, role: str) -> None:
    """Refuse a model that has no embedding for some of the tokenizer's tokens.

    Args:
        model: Model of the role.
        tokenizer: Tokenizer of the policy.
        role: Name of the role, for the error.
    """
    rows = model.model.get_input_embeddings().weight.shape[0]
    if len(tokenizer) > rows:
        raise RecipeError.at(
            f"models.{role}",
            f"has embeddings for {rows} tokens, but the policy's tokenizer has {len(tokenizer)}: "
            "all roles must share one tokenizer",
        )
