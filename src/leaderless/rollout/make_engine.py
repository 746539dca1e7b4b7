"""Makes the engine of a role on this rank."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import cast

import psutil
import torch

from leaderless.base.tokens import TOKEN_VARIABLE
from leaderless.config import RecipeError
from leaderless.config.low_precision import DRAFTS, formats_of, num_drafts
from leaderless.config.models import ModelConfig
from leaderless.config.rollout import RolloutConfig
from leaderless.data.prompts.encode import Tokenizer
from leaderless.distributed.meeting import are_together, choose_meeting
from leaderless.distributed.remote.child_server import ChildServer
from leaderless.distributed.remote.elsewhere import ServerElsewhere
from leaderless.distributed.remote.messages import Settings
from leaderless.distributed.transport import ProcessGroup
from leaderless.models.attention.recurrence_kernels import try_kernels
from leaderless.models.causal_lm import CausalLM, empty_causal_lm
from leaderless.models.decoder import load_model_config, reserved_tokens
from leaderless.models.loading.sharded_loading import fill_buffers, open_model
from leaderless.models.loading.support import reads_both_ways
from leaderless.models.loading.tokenizer import end_tokens
from leaderless.models.loading.weight_sources import form_of
from leaderless.models.lora.linear import share_weights
from leaderless.models.lora.nf4 import pack_layers
from leaderless.models.routers import Routers
from leaderless.models.vision.vision_models import VisionLM
from leaderless.planner import Layout, format_ranks
from leaderless.planner.checks.capabilities import check_sendable
from leaderless.planner.engines import engine_of
from leaderless.planner.graph.adapters import describe, lora_of
from leaderless.planner.memory.layers import TEXT_PART
from leaderless.planner.memory.limits import CachePool
from leaderless.planner.memory.model_size import read_model_size
from leaderless.rollout.engine import RolloutEngine, make_probe, probe_tolerance
from leaderless.rollout.external.engine import Driver, ExternalEngine
from leaderless.rollout.external.lora_slots import AdapterDriver, Host, LoraSlot
from leaderless.rollout.external.sglang_engine import SglangServer
from leaderless.rollout.external.vllm_engine import InProcessVllm, VllmElsewhere, VllmServer
from leaderless.rollout.native.client_engine import ClientEngine
from leaderless.rollout.native.engine import NativeEngine
from leaderless.rollout.native.paged_check import paged_attention, token_drawing
from leaderless.rollout.native.paged_engine import PagedEngine, PagedOptions

LEAST_TOKENS = 8
"""Shortest context; engines refuse shorter ones."""
CPU_BLOCK_TOKENS = 128
"""Tokens of a block of vLLM's KV cache on the CPU."""


@dataclass(frozen=True)
class RolloutSetup:
    """Arguments for making a rollout engine on one of the ranks that generate with a model.

    Attributes:
        role: Role of the model.
        rollout: Settings of generation.
        model: Model, and how it computes; its weights come later.
        max_tokens: Most tokens of a prompt with its response.
        tokenizer: Tokenizer of the model.
        layout: Ranks that generate with it; the ranks of one shard make one engine together.
        shard: Ranks of the shard of this one, for what their engines agree on.
        world_size: Number of ranks of the run.
        device: Device that computes.
        logs: Folder for the output of other processes.
        report: Function that shows a message to the user.
        records_experts: Whether choices of experts are recorded for the role.
        records_support: Whether the tokens that could be drawn are recorded where others are left out.
        donor: Model of another role's native engine, whose weights this one may use under its own adapters.
        host: Engine outside of this package that is shared with other roles, which have adapters on the same model.
        pool: Memory of a native engine on an accelerator for keys and values, as planned.
        has_clients: Whether clients of a served model ask it, who may want more than samples.
    """

    role: str
    rollout: RolloutConfig
    model: ModelConfig
    max_tokens: int
    tokenizer: Tokenizer
    layout: Layout
    shard: ProcessGroup
    world_size: int
    device: torch.device
    logs: Path
    report: Callable[[str], None]
    records_experts: bool = False
    records_support: bool = False
    donor: CausalLM | None = None
    host: Host | None = None
    pool: CachePool | None = None
    has_clients: bool = False

    @property
    def rank(self) -> int:
        """This rank."""
        return self.shard.rank

    @property
    def end_tokens(self) -> frozenset[int]:
        """Tokens that end a response."""
        return end_tokens(self.model, self.tokenizer)

    @property
    def probe(self) -> list[int]:
        """A text that fits, for the log-probabilities that show that an engine has the right weights."""
        return probe_text(self.tokenizer, self.max_tokens, self.reserved_tokens)

    @property
    def reserved_tokens(self) -> frozenset[int]:
        """Tokens that are never drawn."""
        return reserved_tokens(self.model, self.role)


def probe_text(tokenizer: Tokenizer, max_tokens: int, reserved: Container[int]) -> list[int]:
    """Make the text whose log-probabilities show whether an engine has the right weights; it fits into the engine."""
    return make_probe(len(tokenizer), max(max_tokens, LEAST_TOKENS), reserved)


def make_engine(name: str, setup: RolloutSetup) -> RolloutEngine:
    """Make an engine; one in another process starts when it is needed.

    Raises:
        RecipeError: There is no such engine, it is not installed here, or what is made is no `RolloutEngine`.
    """
    module, _, function = engine_of(name).implementation.partition(":")
    engine: object = getattr(import_module(module), function)(setup)
    missing = sorted(member for member in vars(RolloutEngine) if member[0] != "_" and not hasattr(engine, member))
    if missing:
        raise RecipeError.at(
            "rollout.engine",
            f"'{name}' made {type(engine).__name__} for role '{setup.role}', which is no RolloutEngine: it lacks "
            f"{', '.join(missing)}",
        )
    return cast("RolloutEngine", engine)


def make_native(setup: RolloutSetup) -> RolloutEngine:
    """Make the native engine."""
    model = _native_model(setup).requires_grad_(False)
    try_kernels(model.model, setup.device, getattr(torch, setup.model.compute_dtype))
    if any(kind.is_indexed for kind in model.attention_kinds):
        raise RecipeError.at(
            "rollout.engine",
            f"native: layers with an indexer, which chooses keys, are not supported (models.{setup.role}): choose vllm",
        )
    ends, most = setup.end_tokens, setup.rollout.max_sequences
    routers = Routers.required(model, f"models.{setup.role}") if setup.records_experts else None
    engine: NativeEngine | None = None
    if setup.pool is not None and model.is_plain:
        dtype = getattr(torch, setup.model.compute_dtype)
        if (attend := paged_attention(model, dtype, setup.device, setup.shard)) is not None:
            draw = token_drawing(model, setup.device, setup.shard)
            options = PagedOptions(
                attend, setup.pool.tokens, setup.max_tokens, keeps_memory=setup.pool.stays, draw=draw
            )
            device, records = setup.device, setup.records_support
            engine = PagedEngine(model, setup.tokenizer, ends, most, device, options, routers, records_support=records)
    if engine is None:
        device, records = setup.device, setup.records_support
        made = ClientEngine if setup.has_clients else NativeEngine
        engine = made(model, setup.tokenizer, ends, most, device, routers, records_support=records)
    engine.sleep(keep_weights=False)  # the trainer's adapters come first
    return engine


def _native_model(setup: RolloutSetup) -> CausalLM:
    """A model without weights; under adapters, with the weights of its folder, or of a donor."""
    if setup.model.lora is None:
        return _empty_model(setup)
    if setup.donor is not None and not isinstance(setup.donor, VisionLM):
        model = empty_causal_lm(setup.model, setup.role, has_adapters=True)
        pack_layers(model)
        share_weights(model.model, setup.donor.model)
        return model
    model = cast("CausalLM", open_model(setup.model, setup.role).decoder)
    pack_layers(model)
    for parameter in model.parameters():  # without values yet, except for adapters
        if parameter.is_floating_point():
            parameter.data = parameter.data.to(getattr(torch, setup.model.compute_dtype))
    model.complete(lambda _, weight: weight, setup.device)
    return model


def _empty_model(setup: RolloutSetup) -> CausalLM:
    """A model without weights, but with all that its files have besides."""
    model = empty_causal_lm(setup.model, setup.role)
    fill_buffers(model, setup.model, setup.role)
    return model


def make_vllm(setup: RolloutSetup) -> RolloutEngine:
    """Make an engine with vLLM."""
    return _make_external("vllm", "vLLM", setup)


def make_sglang(setup: RolloutSetup) -> RolloutEngine:
    """Make an engine with SGLang."""
    return _make_external("sglang", "SGLang", setup)


def _make_external(name: str, title: str, setup: RolloutSetup) -> RolloutEngine:
    if name == "sglang" and setup.reserved_tokens:
        raise RecipeError.at(
            "rollout.engine", "sglang: models that see images are not supported: choose native or vllm"
        )
    if setup.reserved_tokens and reads_both_ways(load_model_config(setup.model, setup.role)):
        raise RecipeError.at(
            "rollout.engine", f"{name}: models that read prompts in both directions are not supported: choose native"
        )
    if setup.layout.ep > 1 and setup.device.type == "cpu":
        raise RecipeError.at(
            "layout", f"ep={setup.layout.ep}: on a CPU, vLLM does not divide experts: leave it out of its layout"
        )
    settings = _settings(setup)
    if setup.rank == setup.layout.ranks[0]:
        setup.report(f"starting {title} for role '{setup.role}'")
    driver: Driver = _seat(name, setup, settings) if settings.adapters else _driver(name, setup, settings)
    if setup.reserved_tokens and num_drafts(name, setup.rollout.external.given_arguments):
        raise RecipeError.at(
            f"rollout.external.arguments.{DRAFTS}",
            f"is given, but the model of '{setup.role}' sees images, and vLLM cannot do both: leave it out",
        )
    tolerance = probe_tolerance(setup.model.compute_dtype, formats_of(name, setup.rollout.external.given_arguments))
    # A rank alone cannot start its part of an engine again.
    report = setup.report if setup.shard.size == 1 else None
    tokenizer, ends = setup.tokenizer, setup.end_tokens
    engine = ExternalEngine(title, driver, tokenizer, ends, tolerance, setup.device, report, setup.reserved_tokens)
    if setup.records_support:
        engine.most_support = engine_of(name).most_support or 0
    if setup.records_experts:
        engine.experts_per_token = len(settings.expert_layers) * settings.experts_per_token
    if not settings.adapters:  # else it reads its weights from the model's folder
        plain = _empty_model(replace(setup, model=setup.model.model_copy(update={"lora": None})))
        engine.form, own = form_of(plain.model), plain.saved_buffers
        engine.buffers = dict(part for name, value in own.items() for part in engine.form(name, value))
    return engine


def _seat(name: str, setup: RolloutSetup, settings: Settings) -> Driver:
    """A place for the adapters of a role in an engine, which the first of its roles makes."""
    host = setup.host or Host({setup.role: setup.model})
    if not hasattr(host, "driver"):
        host.driver = _driver(name, setup, settings)
    return LoraSlot(host, setup.role)


def _settings(setup: RolloutSetup) -> Settings:
    rollout, config, max_tokens = setup.rollout, setup.model, max(setup.max_tokens, LEAST_TOKENS)
    external, is_cpu = rollout.external, setup.device.type == "cpu"
    is_in_process, place = external.is_in_process, setup.layout.place_in_shard(setup.rank)
    adapters, matrices = _adapters(setup)
    expert_layers, experts_per_token = _experts(setup)
    return Settings(
        model=config.path,
        revision=config.revision,
        trust_remote_code=config.trust_remote_code,
        dtype=config.compute_dtype,
        max_tokens=max_tokens,
        max_sequences=rollout.max_sequences,
        memory_fraction=external.memory_fraction,
        kv_cache_bytes=_host_cache_bytes(setup, max_tokens) if is_cpu else None,
        enable_graphs=external.graphs,
        tensor_parallel_size=setup.layout.tp,
        num_stages=setup.layout.pp,
        divides_experts=setup.layout.ep > 1,
        meeting=_meeting(setup) if setup.shard.size > 1 or (is_in_process and setup.world_size > 1) else None,
        rank=setup.rank if is_in_process else place,
        device_index=(setup.device.index or 0) if is_in_process else 0,
        sees_images=bool(setup.reserved_tokens),
        adapters=adapters,
        matrices=matrices,
        expert_layers=expert_layers,
        experts_per_token=experts_per_token,
        most_support=(engine_of("vllm").most_support or 0) * setup.records_support,
        arguments=external.given_arguments,
        num_drafts=num_drafts("vllm", external.given_arguments),
    )


def _experts(setup: RolloutSetup) -> tuple[Sequence[int], int]:
    """The layers of a model whose choices of experts are recorded, and how many each of them chooses."""
    if not (setup.records_experts or (setup.host is not None and setup.host.records_experts)):
        return (), 0
    routers = Routers.required(empty_causal_lm(setup.model, setup.role), f"models.{setup.role}")
    return routers.layers, routers.num_chosen


def _adapters(setup: RolloutSetup) -> tuple[dict[str, Mapping[str, object]], dict[str, Sequence[str]]]:
    """Description of each role's adapters for an engine that takes them, and the names of their matrices."""
    said, matrices = dict[str, Mapping[str, object]](), dict[str, Sequence[str]]()
    models = {setup.role: setup.model} if setup.host is None else setup.host.models
    for role, model in models.items():
        lora = lora_of(model, f"models.{role}")
        if lora is None or setup.rollout.external.merge_adapters:
            continue
        check_sendable(lora, f"models.{role}")
        names = [name for name, _ in empty_causal_lm(model, role).trained_weights()]
        if lost := [name for name in names if not name.startswith(TEXT_PART)] if setup.reserved_tokens else []:
            raise RecipeError.at(
                f"models.{role}.lora.targets",
                f"names {lost[0].rpartition('.')[0]}, but vLLM adds adapters to the layers for text "
                "alone: name layers of these, or set rollout.external.merge_adapters",
            )
        targets = sorted({name.split(".")[-2] for name in names})
        said[role], matrices[role] = describe(model.model_copy(update={"lora": lora}), targets), names
    return said, matrices


def _meeting(setup: RolloutSetup) -> str:
    """Choose where the processes of an engine find each other. All ranks of the shard call it together."""
    shard, what = setup.shard, f"where the engine of ranks {format_ranks(setup.shard.ranks)} meets"
    place = choose_meeting(shard, shard.ranks[0], "leaderless-engine", what)
    # On the CPU, parts with one name of their meeting share memory, which those of other machines do not see.
    return place if are_together(shard) else f"{place}?machine={shard.hosts.get(setup.rank, setup.rank)}"


def _host_cache_bytes(setup: RolloutSetup, max_tokens: int) -> int:
    """Compute the memory that the longest sequences need, up to the recipe's share of the host's memory."""
    rollout, config = setup.rollout, setup.model
    most = int(rollout.external.memory_fraction * psutil.virtual_memory().total)
    size = read_model_size(config)
    if size is None or size.layers:  # whose layers may have blocks of several sizes
        return most
    # vLLM keeps one block for itself.
    num_blocks = rollout.max_sequences * -(-max_tokens // CPU_BLOCK_TOKENS) + 1
    width = 2 if config.compute_dtype == "bfloat16" else 4
    cache = num_blocks * CPU_BLOCK_TOKENS * size.kv_values_per_token * width
    return min(most, cache // size.num_kv_parts(setup.layout))


def _driver(name: str, setup: RolloutSetup, settings: Settings) -> AdapterDriver:
    rollout, external, beat = setup.rollout, setup.rollout.external, setup.shard.activity.beat
    limits = external.start_timeout_s, external.answer_timeout_s
    if external.addresses:
        address, token = external.addresses[setup.layout.place(setup.rank)], os.environ.get(TOKEN_VARIABLE, "")
        title = f"rank {setup.rank}: the engine of role '{setup.role}'"
        return VllmElsewhere(settings, setup.device, ServerElsewhere(title, address, token, *limits, beat))
    if external.python is None:
        if name == "sglang":
            raise RecipeError.at("rollout.external.python", "must name the interpreter of an environment with SGLang")
        if find_spec("vllm") is None:
            raise RecipeError.at(
                "rollout.engine",
                f"{rollout.engine}: vLLM cannot be imported here: install it, or name the interpreter of an "
                "environment that has it in rollout.external.python",
            )
        return InProcessVllm(settings, setup.device)
    python = shutil.which(external.python)
    if python is None:
        raise RecipeError.at("rollout.external.python", f"'{external.python}' is not a program on this machine")
    log = setup.logs / f"{name}-{setup.role}-rank-{setup.rank}.log"
    title = f"rank {setup.rank}: the {name} server of role '{setup.role}'"
    server = ChildServer(title, log, *limits, beat)
    kind = SglangServer if name == "sglang" else VllmServer
    return kind(python, settings, setup.device, server)
