"""Finds and loads a model to serve, of a folder, the hub, a checkpoint or a run, and lets it answer prompts."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Self, cast

import torch
import torch.distributed as dist
from transformers import PreTrainedConfig

from leaderless.base.devices import setup_device
from leaderless.base.values import Json
from leaderless.config import Recipe, RecipeError, load_recipe, nearest
from leaderless.config.models import ComputeType, ModelConfig, TrainingConfig
from leaderless.config.rollout import RolloutConfig
from leaderless.config.run import RunConfig
from leaderless.data.prompts.encode import RowEncoder, Tokenizer
from leaderless.data.prompts.images import ImageReader
from leaderless.data.sources.row_sources import Row
from leaderless.distributed.weights.blocks import Pool, everything
from leaderless.models.decoder import load_model_config
from leaderless.models.loading.support import sees_images
from leaderless.models.loading.tokenizer import check_vocabulary, load_tokenizer
from leaderless.models.vision.image_readers import open_reader
from leaderless.observability.console import Display, errors, print_line
from leaderless.observability.run_directory import list_checkpoints
from leaderless.planner import Layout
from leaderless.planner.engines import choose_engine, engine_for
from leaderless.planner.memory.limits import CachePool, pool_tokens
from leaderless.planner.memory.model import number_bytes
from leaderless.planner.memory.model_size import read_model_size
from leaderless.rollout.engine import Request, SamplingParams, generate
from leaderless.rollout.external.arguments import check_device, check_installed
from leaderless.rollout.make_engine import RolloutSetup, make_engine
from leaderless.rollout.weight_sources import Colocated, Serving
from leaderless.rollout.wrapped_engine import ALONE
from leaderless.run.settings import INPUTS, gguf_folder, is_gguf, unpack_gguf
from leaderless.stages.reward import response_in, transcripts
from leaderless.training.engine import EngineSetup, TrainEngine, make_train_engine
from leaderless.worker.build.accelerator import warn_of_bfloat16
from leaderless.worker.build.join import join_nobody
from leaderless.worker.build.memory_bounds import available_memory
from leaderless.worker.checkpoint.reader import STATE_FILE, find_damage, load_checkpoint, read_role_state

POOL_SHARE = 0.7
"""Share of the free memory of an accelerator for an engine's weights, and for its keys and values."""


@dataclass(frozen=True)
class ModelSource:
    """Origin of a model."""

    name: str  # name of the model for clients
    role: str  # role of the model in its run; `policy` if there is no run
    config: ModelConfig
    rollout: RolloutConfig  # rollout config of its run; the defaults if there is no run
    checkpoint: Path | None = None  # checkpoint with its weights; those that `config` names if None

    def changed(
        self,
        name: str | None,
        compute_dtype: ComputeType | None,
        max_sequences: int | None,
        engine_python: str | None,
    ) -> Self:
        """Apply the options of a user, each if it is given."""
        config = self.config.model_copy(update={"compute_dtype": compute_dtype or self.config.compute_dtype})
        rollout: dict[str, object] = {} if max_sequences is None else {"max_sequences": max_sequences}
        if engine_python is not None:
            rollout["external"] = self.rollout.external.model_copy(update={"python": engine_python})
        return replace(self, name=name or self.name, config=config, rollout=self.rollout.model_copy(update=rollout))

    def without_arguments(self) -> Self:
        """Leave out arguments for the engine, which are those of the run's engine."""
        external = self.rollout.external.model_copy(update={"arguments": {}})
        return replace(self, rollout=self.rollout.model_copy(update={"external": external}))


@dataclass(frozen=True)
class Served:
    """A loaded model, and its engine with the source of its weights."""

    name: str
    tokenizer: Tokenizer
    vocabulary: int  # tokens with an embedding
    max_context: int  # tokens of prompt and response together
    serving: Serving
    reader: ImageReader | None = None  # what the model says of images, if it sees them
    end_tokens: frozenset[int] = frozenset()  # tokens that end a response


def find_model(target: str, role: str, say: Callable[[str], None]) -> ModelSource:
    """Find the model of a role in the folder, or with the name on the hub, that a user named.

    Damaged checkpoints of a run are reported and skipped.

    Raises:
        RecipeError: There is no such model, or it is damaged.
    """
    path = Path(target)
    if is_gguf(path):
        unpack_gguf(path, folder := gguf_folder(path, Path(RunConfig().directory) / INPUTS), say)
        return ModelSource(path.stem, "policy", ModelConfig(path=str(folder)), RolloutConfig())
    if (path / STATE_FILE).exists():
        damage = find_damage(path, ALONE)
        if damage:
            raise RecipeError.at("", f"checkpoint {path} is damaged: {damage}; take another one")
        return _of_checkpoint(path, role)
    if (path / "config.json").exists():
        return ModelSource(path.resolve().name, "policy", ModelConfig(path=target), RolloutConfig())
    if (path / "checkpoints").is_dir():
        return _of_checkpoint(_newest_good(path, say), role)
    if path.exists():
        raise RecipeError.at("", f"{path} is neither a model, nor a checkpoint, nor the folder of a run that has one")
    if path.is_absolute() or target.startswith(".") or len(path.parts) > 2:
        raise RecipeError.at("", f"folder {path} does not exist (looked for from {Path.cwd()})")
    return ModelSource(target, "policy", ModelConfig(path=target), RolloutConfig())


def _of_checkpoint(path: Path, role: str) -> ModelSource:
    try:
        recipe = load_recipe(path / "recipe.yaml").recipe
    except RecipeError as error:
        remedy = "; if the checkpoint is of another version, export it, and serve the exported folder"
        raise error.noted(remedy) from error
    if recipe.body is not None:
        raise RecipeError.at("body", f"the policy of {path} moves a body, and writes no text that could be served")
    state, config = read_role_state(path, role), recipe.model_of(role)
    if state is None or config is None:
        roles = [folder.name for folder in path.iterdir() if folder.is_dir()]
        raise RecipeError.at("--role", f"checkpoint {path} has no role '{role}'{nearest(role, roles)}")
    if state.is_value_model:
        raise RecipeError.at("--role", f"'{role}' is a value model, which writes no text")
    return ModelSource(recipe.name, role, config, recipe.as_seen_by(role).rollout, path)


def _newest_good(run: Path, say: Callable[[str], None]) -> Path:
    """Find the newest undamaged checkpoint of a run. The run may still be training, so nothing is changed."""
    for path in reversed(list_checkpoints(run / "checkpoints")):
        damage = find_damage(path, ALONE)
        if not damage:
            return path
        say(f"checkpoint {path} is damaged and skipped: {damage}")
    raise RecipeError.at("", f"{run} has no undamaged checkpoint")


@contextmanager
def open_model(
    source: ModelSource,
    engine: str | None,
    max_context: int | None,
    say: Callable[[str], None],
    *,
    is_full: bool = False,
) -> Iterator[Served]:
    """Load a model on this machine's first device.

    Args:
        source: Origin of the model.
        engine: Engine that generates; the choice of `rollout.engine: auto` if None.
        max_context: Most tokens of prompt and response together; as many as the model can take if None.
        say: Function that shows a message to the user.
        is_full: Whether the native engine does all that clients may ask on an accelerator, too, more slowly.

    Raises:
        RecipeError: The model cannot be loaded, or takes fewer tokens than `max_context`.
    """
    name = engine or choose_engine(source.rollout)
    if name != source.rollout.engine and (name, source.rollout.engine) != ("vllm", "auto"):
        source = source.without_arguments()
    if said := check_installed(name, source.rollout.external, source.role):
        say(said)
    with alone_here() as device, tempfile.TemporaryDirectory(prefix="leaderless-") as logs:
        check_device(name, source.rollout.external, device, source.config.compute_dtype, source.role)
        if device.type == "cpu":
            warn_of_bfloat16({source.role: source.config}, say)
        tokenizer = load_tokenizer(source.config, source.role)
        trainer = _load(source, device)
        check_vocabulary(trainer.vocab_size, tokenizer, source.role)
        described = load_model_config(source.config, source.role)
        longest = longest_context(described, max_context)
        reader = open_reader(source.config, source.role, tokenizer) if sees_images(described) else None
        if source.checkpoint is not None:
            load_checkpoint(source.checkpoint, {source.role: trainer})
        setup = RolloutSetup(
            role=source.role,
            rollout=source.rollout,
            model=source.config,
            max_tokens=longest,
            tokenizer=tokenizer,
            layout=Layout((0,), 1),
            shard=ALONE,
            world_size=1,
            device=device,
            logs=Path(logs),
            report=say,
            pool=None if is_full else cache_pool(source, longest, device),
            has_clients=True,
        )
        spec, dtype = engine_for(source.rollout, name), getattr(torch, source.config.compute_dtype)
        has_adapters = source.config.lora is not None
        serving = Colocated(
            make_engine(name, setup),
            trainer,
            Pool(Layout((0,), 1), everything),
            dtype,
            probe=setup.probe if spec.compares(has_adapters=has_adapters) else (),
            may_restart=spec.may_restart,
            is_merged=has_adapters and not spec.takes_adapters,
        )
        try:
            yield Served(source.name, tokenizer, trainer.vocab_size, longest, serving, reader, setup.end_tokens)
        finally:
            serving.close()


def _load(source: ModelSource, device: torch.device) -> TrainEngine:
    """Load the model as a single frozen instance, whichever back end has trained it."""
    setup = EngineSetup(
        role=source.role,
        model=source.config,
        is_critic=False,
        layout=Layout((0,), 1),
        process_group=ALONE,
        axis_groups={"dp": ALONE},
        device=device,
        optimizer=None,
        num_updates=0,
        micro_batch_tokens=1,  # nothing is scored or trained here
    )
    return make_train_engine(TrainingConfig().backend, setup)


def cache_pool(source: ModelSource, longest: int, device: torch.device) -> CachePool | None:
    """The pool of a native engine on an accelerator: for all sequences, or what there is room for next to weights."""
    size = read_model_size(source.config)
    if device.type == "cpu" or size is None or not size.is_plain:
        return None
    width = number_bytes(source.config)
    free = int(POOL_SHARE * available_memory(device, 1)) - size.num_parameters * width
    most = max(longest, free // (size.kv_values_per_token * width))
    return CachePool(pool_tokens(source.rollout.max_sequences, longest, 0, 0, most), stays=True)


def longest_context(described: PreTrainedConfig, wanted: int | None) -> int:
    """Return the number of tokens that the model takes or the user wants, and refuse to exceed the model's."""
    config = described.get_text_config()
    longest: int | None = getattr(config, "max_position_embeddings", None)
    if longest is None and wanted is None:
        raise RecipeError.at("--max-context", f"is needed, since models of type {config.model_type} name no limit")
    if longest is not None and wanted is not None and wanted > longest:
        raise RecipeError.at("--max-context", f"is {wanted}, but the model takes at most {longest} tokens: lower it")
    return wanted or cast("int", longest)


@contextmanager
def alone_here() -> Iterator[torch.device]:
    """Join a process group of one rank; yields the device."""
    setup = setup_device(0, 1)
    join_nobody(setup)
    try:
        yield setup.device
    finally:
        dist.destroy_process_group()


Prompt = str | Sequence[Json] | Mapping[str, Json]
"""Text, chat messages, or a row of a dataset."""


def answer(
    recipe: Recipe,
    prompts: Sequence[Prompt],
    checkpoint: Path | None,
    role: str,
    temperature: float | None,
    max_tokens: int | None,
) -> list[str]:
    """Have a model answer prompts, as described at `Run.generate`; without a checkpoint it is untrained."""
    config = recipe.model_of(role)
    if config is None:
        raise RecipeError.at("models", f"has no model for the role '{role}'")
    recipe = recipe.as_seen_by(role)
    sampling = recipe.evaluation
    if temperature is not None:
        sampling = sampling.model_copy(update={"temperature": temperature})
    source = ModelSource(recipe.name, role, config, recipe.rollout, checkpoint)
    longest = max_tokens or recipe.rollout.max_response_tokens
    params = SamplingParams(sampling, longest, recipe.rollout.stop, recipe.seed)
    num_ended = num_tokens = 0

    def report(ended: int, tokens: int) -> None:
        nonlocal num_ended, num_tokens
        num_ended, num_tokens = num_ended + ended, num_tokens + tokens

    loading = Display(errors, status=lambda: f"loading {checkpoint or config.path}")
    with loading as display, open_model(source, None, None, print_line) as served:
        requests = _requests(recipe, prompts, served, longest, partial(open_reader, config, role, served.tokenizer))
        display.status = lambda: f"generating {num_ended}/{len(requests)}, {num_tokens:,} tokens"
        with served.serving.phase() as engine:
            groups = generate(engine, requests, params, report)
        texts = transcripts(served.tokenizer, [group[0].tokens for group in groups], recipe)
        return [response_in(text) for text in texts]


def _requests(
    recipe: Recipe, prompts: Sequence[Prompt], served: Served, longest: int, reader: Callable[[], ImageReader]
) -> list[Request]:
    # Prompts have the template of the held-out ones, if there are any.
    held_out = {"data.evaluation": recipe.data.evaluation} if recipe.data.evaluation else {}
    key, data = next(iter({**held_out, **recipe.data.train_sets()}.items()))
    asked = data.model_copy(update={"answer": None, "response": None, "source": None, "columns": None})
    encoder = RowEncoder(served.tokenizer, asked, key, reader=reader)
    requests: list[Request] = []
    for number, prompt in enumerate(prompts):
        row: Row = dict(prompt) if isinstance(prompt, Mapping) else {asked.prompt: prompt}
        if asked.images is not None:
            row.setdefault(asked.images, None)
        encoded = encoder.encode(row, f"prompt {number}")
        tokens = encoded.prompt
        if len(tokens) + longest > served.max_context:
            reason = f"prompt {number} and its response may have {len(tokens)} + {longest} tokens, "
            raise RecipeError.at("", reason + f"but the model takes {served.max_context}: lower max_tokens")
        requests.append(Request(tokens, [number], images=tuple(encoded.images)))
    return requests
