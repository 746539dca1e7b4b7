"""Loads the model of a training service, and takes its folder."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from leaderless.config import RecipeError
from leaderless.models.decoder import load_model_config
from leaderless.models.loading.support import sees_images
from leaderless.models.loading.tokenizer import check_vocabulary, end_tokens, load_tokenizer
from leaderless.observability.run_directory import RunDirectory
from leaderless.planner.memory.limits import CPU_PASS_TOKENS
from leaderless.run.standalone_model import ModelSource, alone_here, cache_pool, longest_context
from leaderless.serving.training.adapters import ROLE, AdaptedModel
from leaderless.serving.training.saved_states import StateFolder
from leaderless.serving.training.service import ClientLimits, TrainingService
from leaderless.worker.build.accelerator import warn_of_bfloat16

STATES = "training"
"""Folder of saved states within that of a run."""
PASS_TOKENS = 8192
"""Most tokens of a pass on an accelerator."""


@dataclass(frozen=True)
class ServiceOptions:
    """What a user says of a training service.

    Attributes:
        folder: Folder of the service, with its saved states.
        max_context: Most tokens of a sequence; as many as the model can take if None.
        pass_tokens: Most tokens of a pass; by default a few thousand.
        limits: Bounds of what clients use.
    """

    folder: Path
    max_context: int | None = None
    pass_tokens: int | None = None
    limits: ClientLimits = ClientLimits()  # noqa: RUF009 - it cannot be changed


@contextmanager
def open_service(source: ModelSource, options: ServiceOptions, say: Callable[[str], None]) -> Iterator[TrainingService]:
    """Load a model for clients to train, on this machine's first device.

    Args:
        source: Origin of the model.
        options: Options of the user.
        say: Function that shows a message to the user.

    Raises:
        RecipeError: The model cannot be loaded or trained, or another process has the folder.
    """
    if source.checkpoint is not None or source.config.lora is not None:
        raise RecipeError.at(
            "--train", f"{source.checkpoint or source.name} is a checkpoint: export it, and serve the exported folder"
        )
    described = load_model_config(source.config, source.role)
    if sees_images(described):
        raise RecipeError.at("--train", f"'{source.name}' sees images: clients can train models for text alone")
    with _held(options.folder), alone_here() as device, tempfile.TemporaryDirectory(prefix="leaderless-") as logs:
        if device.type == "cpu":
            warn_of_bfloat16({source.role: source.config}, say)
        tokenizer = load_tokenizer(source.config, source.role)
        longest = longest_context(described, options.max_context)
        model = AdaptedModel(
            name=source.name,
            config=source.config,
            tokenizer=tokenizer,
            end_tokens=end_tokens(source.config, tokenizer),
            max_context=longest,
            max_sequences=source.rollout.max_sequences,
            pass_tokens=options.pass_tokens or (CPU_PASS_TOKENS if device.type == "cpu" else PASS_TOKENS),
            device=device,
            logs=Path(logs),
            pool=cache_pool(source, longest, device),
            say=say,
            arch=described.model_type,
        )
        check_vocabulary(model.vocabulary, tokenizer, ROLE)
        yield TrainingService(model, StateFolder(options.folder / STATES), options.limits)


@contextmanager
def _held(folder: Path) -> Iterator[None]:
    """Keep other processes from using a folder."""
    try:
        with RunDirectory(folder).held():
            yield
    except BlockingIOError as error:
        raise RecipeError.at("--directory", f"{folder} is in use by {error}: name another folder") from error
