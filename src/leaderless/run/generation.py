"""Responses of a run's model to a program's prompts."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

from leaderless.base.values import Json
from leaderless.config import Recipe, RecipeError
from leaderless.data.prompts.encode import RowEncoder
from leaderless.data.prompts.images import ImageReader
from leaderless.data.sources.row_sources import Row
from leaderless.models.vision.image_readers import open_reader
from leaderless.observability.console import print_line
from leaderless.rollout.engine import Request, SamplingParams, generate
from leaderless.run.standalone_model import ModelSource, Served, open_model
from leaderless.stages.reward import response_in, transcripts

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
    with open_model(source, None, None, print_line) as served:
        requests = _requests(recipe, prompts, served, longest, partial(open_reader, config, role, served.tokenizer))
        with served.serving.phase() as engine:
            groups = generate(engine, requests, params)
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
