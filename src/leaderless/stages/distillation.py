"""The stages of distillation: what a teacher finds likely, and updates of a student on the divergence from it."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping
from contextlib import nullcontext
from functools import lru_cache
from typing import cast

import torch
from torch import Tensor

from leaderless.algorithms import repeat_per_token
from leaderless.base.values import Json
from leaderless.config import Recipe, RecipeError
from leaderless.data.batch import Batch, Jagged
from leaderless.data.prompts.encode import RowEncoder, Tokenizer
from leaderless.data.prompts.token_text import TokenText
from leaderless.observability.metrics import Mean
from leaderless.planner.workflow.columns import TEACHER_LOG_PROBS, TEACHER_SIZES, TEACHER_TOKENS
from leaderless.stages.context import StageContext
from leaderless.stages.episodes import Counted
from leaderless.stages.mini_batches import (
    Loss,
    MiniBatch,
    OptimizerUpdate,
    counted_samples,
    metric_name,
    mini_batches,
    take,
)
from leaderless.stages.teacher_server import TeacherServer
from leaderless.stages.update import check_versions, report_size, with_temperatures
from leaderless.stages.words_by_text import WordsByText
from leaderless.training.engine import DistillingEngine, ReadTeacher
from leaderless.training.micro_batches import MicroBatch, response_lengths


def teach(batch: Batch, context: StageContext) -> Batch:
    """Add the likeliest words of each row's teacher at each sampled token, and their log-probabilities.

    Raises:
        ValueError: A row is of a source without a teacher.
        RuntimeError: A server that is the teacher has not answered.
    """
    config = context.recipe.algorithm.distillation
    assert config.top_k is not None, "the planner runs this node where the teacher gives words"
    lengths = response_lengths(batch.jagged("response_mask"))
    found = torch.full((int(lengths.sum()), 2, config.top_k + 1), -1.0)
    if config.align == "text":
        for name, role, is_own in _by_teacher(batch, context):
            chosen, by_text = _asked_by_text(batch, is_own, name, role, context)
            found[repeat_per_token(chosen, lengths)] = by_text
        context.metrics.mean("teacher/aligned", (found[:, 0] >= 0).any(dim=1).sum(), len(found))
        return batch.with_columns(words_as_columns(Jagged(found, lengths, "response_tokens")))
    asked, has_teacher = _questions(batch, context)
    if config.server is not None:
        words = TeacherServer(config.server).likeliest_words(
            asked.select(has_teacher), config.top_k, config.temperature
        )
        found[repeat_per_token(has_teacher, lengths)] = words.values
        return batch.with_columns(words_as_columns(Jagged(found, lengths, "response_tokens")))
    for name, _, is_own in _by_teacher(batch, context):
        # Ranks ask each teacher together, also about no rows.
        chosen = is_own & has_teacher
        teacher = cast("DistillingEngine", context.language_model(name).train_engine)
        words = teacher.likeliest_words(asked.select(chosen), config.top_k, config.temperature)
        found[repeat_per_token(chosen, lengths)] = words.values
    return batch.with_columns(words_as_columns(Jagged(found, lengths, "response_tokens")))


def _by_teacher(batch: Batch, context: StageContext) -> Iterator[tuple[str, str, Tensor]]:
    """The name of each teacher, its role, and which rows are its own, [n] bool."""
    teachers, data = context.recipe.algorithm.distillation.teachers, context.recipe.data
    if not teachers:
        ((name, role),) = context.node.node.teachers
        yield name, role, torch.ones(len(batch), dtype=torch.bool)
        return
    sources = [data.source_of(row) for row in batch.objects("rows") if isinstance(row, Mapping)]
    for source in sources:
        if source not in teachers:
            raise ValueError(
                f"node '{context.node.name}': a row is of the source '{source}', which has no teacher "
                f"(algorithm.distillation.teachers: {', '.join(teachers)}): name one, or leave such rows out"
            )
    for name, role in context.node.node.teachers:
        yield name, role, torch.tensor([teachers[str(source)] == role for source in sources], dtype=torch.bool)


def _asked_by_text(batch: Batch, is_own: Tensor, name: str, role: str, context: StageContext) -> tuple[Tensor, Tensor]:
    """Words of a teacher with a tokenizer of its own: which rows have them, [n] bool, and [tokens, 2, k + 1] words."""
    config, tokenizer = context.recipe.algorithm.distillation, context.tokenizers[role]
    words = words_by_text(cast("Hashable", context.tokenizer), cast("Hashable", tokenizer), role)
    prompts, responses, own = list[list[int]](), list[list[int]](), list[list[int]]()
    teacher, chosen = cast("DistillingEngine", context.language_model(name).train_engine), torch.zeros_like(is_own)
    rows, tokens = batch.objects("rows"), batch.jagged("tokens").to_lists()
    for place in is_own.nonzero().flatten().tolist():
        row = rows[place]
        assert isinstance(row, Mapping), "no images, and no tasks"
        prompt, response = teacher_prompt(row, context.recipe, tokenizer), words.read(tokens[place])
        is_short = config.context is None or len(prompt) <= config.context.max_prompt_tokens
        if response and is_short and len(prompt) + len(response) <= teacher.micro_batch_tokens:
            chosen[place] = True
            prompts.append(prompt)
            responses.append(response)
            own.append(tokens[place])
    context.metrics.mean("teacher/left_out", (is_own & ~chosen).sum(), int(is_own.sum()))
    asked = Batch(
        batch.ids[chosen],
        {
            "prompt_tokens": Jagged.from_lists(prompts, torch.int64, "prompt_tokens"),
            "tokens": Jagged.from_lists(responses, torch.int64, "tokens"),
            "response_mask": Jagged.from_lists([[True] * len(one) for one in responses], torch.bool, "tokens"),
        },
    )
    assert config.top_k is not None
    found = teacher.likeliest_words(asked, config.top_k, config.temperature)
    parts = torch.split(found.values, found.lengths.tolist())
    turned = [words.words(*one) for one in zip(own, responses, parts, strict=True)]
    return chosen, torch.cat([torch.empty(0, 2, config.top_k + 1), *turned])


@lru_cache(maxsize=8)
def words_by_text(student: Hashable, teacher: Hashable, role: str) -> WordsByText:
    """What turns words of a teacher into those of its student; the role is for errors.

    Raises:
        RecipeError: The bytes of the tokens of one of them are not known.
    """
    tokenizers = cast("Tokenizer", student), cast("Tokenizer", teacher)
    for tokenizer, name in zip(tokenizers, ("the policy", f"role '{role}'"), strict=True):
        if not TokenText(tokenizer).is_known():
            raise RecipeError.at(
                "algorithm.distillation.align",
                f"is text, but it is not known which text the tokens of {name} stand for: choose a model with a "
                "tokenizer of bytes or SentencePiece pieces, or one with the student's tokenizer and align: tokens",
            )
    return WordsByText(*tokenizers)


def _questions(batch: Batch, context: StageContext) -> tuple[Batch, Tensor]:
    """The rows as teachers read them, and whether a row has a teacher, [n] bool."""
    config = context.recipe.algorithm.distillation.context
    if config is None:
        return batch, torch.ones(len(batch), dtype=torch.bool)
    prompts = [
        teacher_prompt(row, context.recipe, context.tokenizer)
        for row in batch.objects("rows")
        if isinstance(row, Mapping)
    ]
    has_teacher = torch.tensor([len(one) <= config.max_prompt_tokens for one in prompts], dtype=torch.bool)
    context.metrics.mean("teacher/left_out", (~has_teacher).sum(), len(has_teacher))
    own = {"prompt_tokens": Jagged.from_lists(prompts, torch.int64, "prompt_tokens")}
    return Batch(batch.ids, {**batch.columns, **own}), has_teacher


def teacher_prompt(row: Mapping[str, Json], recipe: Recipe, tokenizer: Tokenizer) -> list[int]:
    """The tokens of the prompt that a teacher with a context, or with a tokenizer, of its own reads for a row.

    Raises:
        RecipeError: The template cannot be filled, as the row lacks a column or it is null.
    """
    config, data, key = recipe.algorithm.distillation.context, recipe.data.train_set_of(row), "data.train"
    plain = data.model_copy(update={"template": "plain"}) if "{" in data.template else data
    encoder, place = RowEncoder(tokenizer, data, key), f"row {str(row)[:80]}"
    own = dict(row)
    if config is None:
        return encoder.encode(own, place).prompt
    shown: Json = encoder.prompt_of(own, place, 0) if plain is not data else encoder.value_of(own, data.prompt, place)
    messages = list(shown) if isinstance(shown, list) else []
    last = messages[-1] if messages else None
    text = last.get("content") if isinstance(last, dict) else shown
    columns = {name: value for name, value in row.items() if value is not None}
    try:
        filled: Json = config.template.format(**{**columns, "prompt": text})
    except (KeyError, IndexError, AttributeError, TypeError, ValueError) as error:
        raise RecipeError.at(
            "algorithm.distillation.context.template",
            f"cannot be filled for a {place}: {error} (columns that are not null: {', '.join(columns)}); name a column "
            "that all rows have; braces that are text are written twice, as {{}}",
        ) from error
    if isinstance(last, dict):
        filled = [*messages[:-1], {**last, "content": filled}]
    return RowEncoder(tokenizer, plain, key).encode({**row, data.prompt: filled}, place).prompt


def words_as_columns(found: Jagged) -> dict[str, Jagged]:
    """The columns of words, from [total, 2, k + 1] words and log-probabilities; words that are negative are none."""
    words, log_probs = found.values.unbind(dim=1)
    is_word = words >= 0
    sizes = is_word.sum(dim=1)
    row = torch.repeat_interleave(torch.arange(len(found)), found.lengths)
    lengths = torch.zeros_like(found.lengths).index_add_(0, row, sizes)
    return {
        TEACHER_TOKENS: Jagged(words[is_word].int(), lengths, "teacher"),
        TEACHER_LOG_PROBS: Jagged(log_probs[is_word], lengths, "teacher"),
        TEACHER_SIZES: Jagged(sizes.int(), found.lengths, found.axis),
    }


def distill(batch: Batch, context: StageContext) -> Batch:
    """Make `batch.updates_per_step` updates on the divergence of the student from its teacher.

    A teacher that gives no words reads each micro-batch itself, right before the student does.

    Raises:
        RuntimeError: A token was drawn with other weights than those about to be trained, and is no surplus.
    """
    check_versions(batch, context)
    report_size(batch, context)
    engine = context.role.train_engine
    counted = Counted.of(batch, counted_samples(batch, context), context)
    aggregation = context.recipe.algorithm.aggregation
    teachers = [
        cast("DistillingEngine", context.language_model(one).train_engine) for one, _ in context.node.node.teachers
    ]
    for mini_batch in mini_batches(with_temperatures(batch, context), counted, aggregation, context):
        now = OptimizerUpdate(engine, mini_batch, context)
        for micro_batch in now:
            with now.passes.memory(), teachers[0].teaching(micro_batch) if teachers else nullcontext() as teacher:
                now.backward(_divergence_loss(micro_batch, mini_batch, teacher, context))
        now.step()
    return batch


def _divergence_loss(
    micro_batch: MicroBatch, mini_batch: MiniBatch, teacher: ReadTeacher | None, context: StageContext
) -> Loss:
    """The divergence of a micro-batch."""
    engine, config = cast("DistillingEngine", context.role.train_engine), context.recipe.algorithm.distillation
    outputs = engine.forward(micro_batch, "value", config.measured, teacher)
    weights = take(mini_batch.weights, micro_batch, outputs.divergences)
    is_counted = weights > 0
    found = {"divergence": outputs.divergences.detach(), "entropy": outputs.entropies}
    metrics = {metric_name(context, name): _mean_of(values, is_counted) for name, values in found.items()}
    # Replace the values of tokens that do not count before computing with them: 0 times infinity is NaN.
    loss = weights * torch.where(is_counted, outputs.divergences, 0.0)
    return Loss(loss.sum(), outputs.divergences, metrics)


def _mean_of(values: Tensor, is_counted: Tensor) -> Mean:
    return Mean(torch.where(is_counted, values, 0).sum(), is_counted.sum())
