"""Token ids of rows that say which of two responses is preferred, or whether a response is desirable."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from typing_extensions import override

from leaderless.base.values import Json, is_finite_number
from leaderless.data.prompts.encode import Encoded, RowEncoder, Tokenizer, Written

if TYPE_CHECKING:
    from leaderless.config.data import DatasetConfig
    from leaderless.data.prompts.images import ImageReader
    from leaderless.data.sources.row_sources import Row


def make_encoder(
    tokenizer: Tokenizer,
    config: DatasetConfig,
    key: str,
    *,
    is_task: bool = False,
    reader: Callable[[], ImageReader] | None = None,
    needed: Mapping[str, str] | None = None,
) -> RowEncoder:
    """The encoder of a dataset, with preferences or without; see `RowEncoder`."""
    kind = RowEncoder if config.preferences is None else PreferenceEncoder
    return kind(tokenizer, config, key, is_task=is_task, reader=reader, needed=needed)


class PreferenceEncoder(RowEncoder):
    """Makes prompts and responses of rows with preferences.

    A response is text, or the messages that follow the prompt's: then it is what the chat template adds for
    them, up to the last end-of-sequence token.
    """

    @override
    def texts(self, row: Row, place: str, *, are_decoded: bool = False) -> Written:
        self.check_columns(row, place)
        pictures = self.images.pictures(row, place, are_decoded=are_decoded) if self.images else []
        names = self._response_columns()
        answers = {name: self.value_of(row, name, place) for name in names}
        if self._is_implicit(row):
            shared, answers = self._divided(answers, place)
            row = {**row, self.config.prompt: shared}
        prompt = self.prompt_of(row, place, len(pictures))
        first, *others = (
            self._response(value, name, row, prompt, len(pictures), place) for name, value in answers.items()
        )
        return Written(
            prompt,
            first,
            place,
            pictures,
            other="".join(others),
            is_desirable=self._is_desirable(row, place),
            margin=self._margin(row, place),
        )

    @override
    def encode_texts(self, texts: Sequence[Written]) -> list[Encoded]:
        prompts = super().encode_texts([text._replace(response="") for text in texts])
        responses = self.encode_responses([text.response for text in texts])
        others = self.encode_responses([text.other for text in texts]) if self.config.chosen else [[] for _ in texts]
        columns = ("chosen", "rejected") if self.config.chosen else ("response",)
        found: list[Encoded] = []
        for text, one, response, other in zip(texts, prompts, responses, others, strict=True):
            for column, tokens in zip(columns, (response, other), strict=False):
                self.check_no_images(tokens, column, text.place)
            if response == other:
                raise self.refused(
                    ".rejected",
                    f"{text.place}: columns '{self.config.chosen}' and '{self.config.rejected}' are the same response, "
                    "which prefers nothing: leave such rows out",
                )
            found.append(Encoded(one.prompt, response, one.images, other, text.is_desirable, text.margin))
        return found

    def _response_columns(self) -> list[str]:
        config = self.config
        return [name for name in (config.response, config.chosen, config.rejected) if name is not None]

    def _is_implicit(self, row: Row) -> bool:
        """Whether both responses contain the prompt: rows have no column of the name that it has by default."""
        name = self.config.prompt
        is_default = name == type(self.config).model_fields["prompt"].default
        return is_default and self.config.chosen is not None and "{" not in self.config.template and name not in row

    def _divided(self, answers: dict[str, Json], place: str) -> tuple[Json, dict[str, Json]]:
        """Tokens that two responses share at their beginning, and the rest of each.

        A space before the first difference belongs to the responses, as tokenizers take it for a part of words.
        """
        first, second = answers.values()
        if isinstance(first, str) and isinstance(second, str):
            size = _num_shared(first, second)
            size -= size > 0 and first[size - 1] == " "
        elif isinstance(first, list) and isinstance(second, list):
            size = _num_shared(first, second)
        else:
            raise self.refused(
                ".rejected", f"{place}: one response is text and the other is not: give both in one form"
            )
        if size == 0:
            raise self.refused(
                ".prompt",
                f"{place} has no column '{self.config.prompt}', and its responses share nothing at their beginning "
                "that could be the prompt: name the column of the prompt",
            )
        return first[:size], {name: value[size:] for name, value in zip(answers, (first, second), strict=True)}

    def _response(self, value: Json, column: str, row: Row, prompt: str, num_images: int, place: str) -> str:
        """A response as text, without its end."""
        if isinstance(value, str):
            return value
        of_assistant = isinstance(value, list) and all(
            isinstance(one, dict) and one.get("role") == "assistant" and "content" in one for one in value
        )
        if not isinstance(value, list) or not value or not of_assistant:
            raise self.refused(
                "",
                f"{place}: column '{column}' must hold text, or messages of the assistant that each have a 'content'; "
                "what comes before belongs to the prompt",
            )
        if not self.is_chat or "{" in self.config.template:
            raise self.refused(
                ".template",
                f"{place}: column '{column}' holds messages, which need a chat template: set template=chat, with a "
                "tokenizer that has one, or give texts",
            )
        before = self.messages_of(self.value_of(row, self.config.prompt, place), num_images, place)
        whole = self.written([*before, *value], place, is_open=False)
        if not whole.startswith(prompt):
            raise self.refused(
                ".template",
                f"{place}: the chat template writes the prompt otherwise when column '{column}' follows it, so that "
                "the response cannot be told from the prompt: give prompt and responses as texts",
            )
        assert self.tokenizer.eos_token_id is not None
        response, end = whole[len(prompt) :], self.tokenizer.decode([self.tokenizer.eos_token_id])
        return response.rpartition(end)[0] if end in response else response

    def _is_desirable(self, row: Row, place: str) -> bool:
        if self.config.desirable is None:
            return True
        value = self.value_of(row, self.config.desirable, place)
        if not isinstance(value, bool):
            problem = f"{place}: column '{self.config.desirable}' holds {value!r:.50}; it must be true or false"
            raise self.refused(".desirable", problem)
        return value

    def _margin(self, row: Row, place: str) -> float:
        if self.config.margin is None:
            return 0.0
        value = self.value_of(row, self.config.margin, place)
        if not is_finite_number(value):
            problem = f"{place}: column '{self.config.margin}' holds {value!r:.50}; it must be a finite number"
            raise self.refused(".margin", problem)
        return float(value)


def _num_shared(first: Sequence[object], second: Sequence[object]) -> int:
    """Number of elements at the beginning of two sequences that are the same; some of each remain."""
    size = 0
    for one, other in zip(first[:-1], second[:-1], strict=False):
        if one != other:
            break
        size += 1
    return size
