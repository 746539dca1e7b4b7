"""Responses of a run's model to prompts that a program gives."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from leaderless.config import Json, Recipe, RecipeError
from leaderless.config.data import DatasetConfig
from leaderless.data.encode import RowEncoder
from leaderless.data.rows import Row
from leaderless.observability.console import print_line
from leaderless.rollout.engine import Request, SamplingParams, generate
from leaderless.serve.load import Served, Source, open_model
from leaderless.stages.reward import decode_responses

Prompt = str | Sequence[Json] | Mapping[str, Json]
"""Text, chat messages, or a row of a dataset."""


def answer(
    recipe: Recipe,
    prompts: Sequence[Prompt],
    checkpoint: Path | None,
    role: str = "policy",
    temperature: float | None = None,
    max_tokens: int | None = None,
) -> list[str]:
    """Have a model answer prompts, which are written as those of the dataset are.

    Args:
        recipe: Recipe of the model, with the template of prompts and the sampling of evaluation.
        prompts: Any number.
        checkpoint: Checkpoint whose weights answer; None for those that the recipe names.
        role: Role that answers.
        temperature: Temperature of sampling; that of `evaluation` when None.
        max_tokens: Length at which a response is cut; `rollout.max_response_tokens` when None.

    Returns:
        One response for each prompt. Equal prompts have responses of their own where the temperature is above 0.

    Raises:
        RecipeError: A prompt cannot be written as the dataset's are, or is too long for the model.
    """
    config = recipe.model_of(role)
    if config is None:
        raise RecipeError.at("models", f"has no model for the role '{role}'")
    sampling = recipe.evaluation
    if temperature is not None:
        sampling = sampling.model_copy(update={"temperature": temperature})
    source = Source(recipe.name, role, config, recipe.rollout, checkpoint)
    longest = max_tokens or recipe.rollout.max_response_tokens
    params = SamplingParams(sampling, longest, recipe.rollout.stop, recipe.seed)
    with open_model(source, None, None, print_line) as served:
        requests = _requests(recipe, prompts, served, longest)
        with served.engine.serving(served.trainer):
            groups = generate(served.engine, requests, params)
        return decode_responses(served.tokenizer, [group[0].tokens for group in groups], recipe)


def _requests(recipe: Recipe, prompts: Sequence[Prompt], served: Served, longest: int) -> list[Request]:
    key, data = _dataset_of(recipe)
    asked = data.model_copy(update={"answer": None, "response": None, "source": None, "columns": None})
    encoder = RowEncoder(served.tokenizer, asked, key)
    requests: list[Request] = []
    for number, prompt in enumerate(prompts):
        row: Row = dict(prompt) if isinstance(prompt, Mapping) else {asked.prompt: prompt}
        tokens = encoder.encode(row, f"prompt {number}").prompt
        if len(tokens) + longest > served.max_context:
            reason = f"prompt {number} and its response may have {len(tokens)} + {longest} tokens, "
            raise RecipeError.at("", reason + f"but the model takes {served.max_context}: lower max_tokens")
        requests.append(Request(tokens, [number]))
    return requests


def _dataset_of(recipe: Recipe) -> tuple[str, DatasetConfig]:
    """The dataset whose template prompts have, with its key."""
    if recipe.data.evaluation is not None:
        return "data.evaluation", recipe.data.evaluation
    return next(iter(recipe.data.train_sets().items()))
