"""Token ids of the rows of a dataset."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple, Protocol

from jinja2 import TemplateError
from tokenizers import Tokenizer as BackendTokenizer

from leaderless.base.values import Json
from leaderless.config import RecipeError, nearest
from leaderless.config.data import DataConfig, DatasetConfig
from leaderless.data.prompts.images import ImagePrompts, ImageReader, PromptImage, Sized, image_folder, other_than_text
from leaderless.data.sources.row_sources import Row


class Tokenizer(Protocol):
    """The part of a Hugging Face tokenizer's interface that this package uses."""

    chat_template: str | None
    bos_token_id: int | None
    eos_token_id: int | None
    all_special_tokens: list[str]

    def __len__(self) -> int:
        """Number of tokens, added ones included."""

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a text."""

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        """Text of token ids."""

    def get_vocab(self) -> dict[str, int]:
        """All tokens, as the vocabulary writes them, and their ids."""

    def get_added_vocab(self) -> dict[str, int]:
        """Tokens that are not split and do not merge with others, and their ids."""

    def apply_chat_template(
        self,
        conversation: Sequence[Json],
        *,
        tools: Sequence[Json] | None = None,
        add_generation_prompt: bool,
        tokenize: bool,
        **options: Json,
    ) -> str:
        """A conversation, and the tools that it may use, as the text that the model was trained on."""

    def save_pretrained(self, save_directory: str) -> object:
        """Write the tokenizer's files into a folder."""


@dataclass(frozen=True)
class Encoded:
    """A row as token ids.

    The response, to be imitated, ends with the end-of-sequence token; it is empty when the dataset names none. Each
    image has a token of the prompt for each of its parts. Of a pair, the response is the chosen one, and `other` the
    rejected one; the pair may have a margin.
    """

    prompt: list[int]
    response: list[int]
    images: Sequence[PromptImage] = ()
    other: list[int] = field(default_factory=list)
    is_desirable: bool = True
    margin: float = 0.0


class Written(NamedTuple):
    """A row as text: prompt and response, and the images of the prompt, with their rows and columns of tokens.

    Of preferences also the rejected response, whether a single one is desirable, and the margin of a pair.
    """

    prompt: str
    response: str
    place: str
    pictures: Sequence[Sized] = ()
    other: str = ""
    is_desirable: bool = True
    margin: float = 0.0


class RowEncoder:
    """Makes prompts, and responses to imitate, from a dataset's rows.

    Args:
        tokenizer: Tokenizer of the policy.
        config: Section of the dataset.
        key: Key of that section, for errors.
        is_task: Whether rows are tasks of an environment. Tasks have no prompts: one token stands for each prompt,
            until its episodes have begun.
        reader: Function that opens the facts about how the model reads images, where prompts have some.
        needed: Further columns that every row must have, by the settings that name them; None for none.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        config: DatasetConfig,
        key: str,
        *,
        is_task: bool = False,
        reader: Callable[[], ImageReader] | None = None,
        needed: Mapping[str, str] | None = None,
    ) -> None:
        self.tokenizer, self.config, self.key, self.is_task = tokenizer, config, key, is_task
        self.needed = needed or {}
        self.images: ImagePrompts | None = None
        if config.images is not None:
            if is_task:
                raise self.refused(".images", "needs prompts, but these rows are tasks of an environment")
            if reader is None:
                raise self.refused(".images", "is not supported here: give prompts of text alone")
            self.images = ImagePrompts(reader(), config.images, image_folder(config.path), f"{key}.images")
        if tokenizer.eos_token_id is None:
            raise RecipeError.at(
                "models",
                "the tokenizer has no end-of-sequence token (eos_token), so that no response could ever end: "
                "name it in tokenizer_config.json",
            )
        has_template = tokenizer.chat_template is not None
        if config.template == "chat" and not has_template:
            raise self.refused(".template", "is 'chat', but the tokenizer has no chat template: use 'plain'")
        self.is_chat = config.template == "chat" or (config.template == "auto" and has_template)
        if config.system is not None and not self.is_chat:
            raise self.refused(".system", "needs a chat template, and these prompts are written without one")

    def encode(self, row: Row, place: str) -> Encoded:
        """The token ids of a row; errors as of `texts`."""
        return self.encode_texts([self.texts(row, place)])[0]

    def encode_texts(self, texts: Sequence[Written]) -> list[Encoded]:
        """The token ids of the prompts and responses of rows; a fast tokenizer encodes them on all cores."""
        if self.is_task:
            assert self.tokenizer.eos_token_id is not None
            return [Encoded([self.tokenizer.eos_token_id], []) for _ in texts]
        is_plain = "{" in self.config.template or not self.is_chat  # a chat template writes special tokens itself
        prompts = _encode_texts(self.tokenizer, [text.prompt for text in texts], add_special_tokens=is_plain)
        responses: list[list[int]] = [[] for _ in texts]
        if self.config.response is not None:
            responses = self.encode_responses([text.response for text in texts])
        if self.images is None:
            return list(map(Encoded, prompts, responses))
        found: list[Encoded] = []
        for text, prompt, response in zip(texts, prompts, responses, strict=True):
            self.check_no_images(response, "response", text.place)
            tokens, images = self.images.expanded(prompt, text.pictures, text.place)
            found.append(Encoded(tokens, response, images))
        return found

    def encode_responses(self, texts: Sequence[str]) -> list[list[int]]:
        """The token ids of responses, each with the end-of-sequence token after it."""
        assert self.tokenizer.eos_token_id is not None
        responses = _encode_texts(self.tokenizer, texts, add_special_tokens=False)
        return [[*response, self.tokenizer.eos_token_id] for response in responses]

    def check_no_images(self, response: Sequence[int], column: str, place: str) -> None:
        """Refuse a response with a token that stands for images; `column` is the setting that names its column."""
        if self.images is not None and (taken := self.images.reader.reserved.intersection(response)):
            token = self.tokenizer.decode([min(taken)])
            raise self.refused(f".{column}", f"{place}: a response must not have '{token}', which marks images")

    def kept(self, row: Row) -> Row:
        """A row without its images, which have a column of their own."""
        if self.config.images is None:
            return row
        return {name: value for name, value in row.items() if name != self.config.images}

    def texts(self, row: Row, place: str, *, are_decoded: bool = False) -> Written:
        """Prompt and response of a row; the response is empty when the dataset names none.

        Args:
            row: The row.
            place: Name of its place, for errors.
            are_decoded: Whether images are decoded, to find those that are damaged.

        Raises:
            RecipeError: A column that is needed is missing or of the wrong type, or an image cannot be used.
        """
        self.check_columns(row, place)
        pictures = self.images.pictures(row, place, are_decoded=are_decoded) if self.images else []
        if self.config.response is None:
            return Written(self.prompt_of(row, place, len(pictures)), "", place, pictures)
        response = self.value_of(row, self.config.response, place)
        if not isinstance(response, str):
            kind = type(response).__name__
            raise self.refused(".response", f"{place}: column '{self.config.response}' holds {kind}; it must be text")
        return Written(self.prompt_of(row, place, len(pictures)), response, place, pictures)

    def check_columns(self, row: Row, place: str) -> None:
        """Refuse a row without a column that the recipe names."""
        for column in (self.config.answer, self.config.source):
            if column is not None:
                self.value_of(row, column, place)
        for column in self.config.columns or ():
            if column not in row:
                raise self.refused(".columns", f"{place} has no column '{column}'{nearest(column, row)}")
        for setting, column in self.needed.items():
            if column not in row:
                raise RecipeError.at(setting, f"is '{column}', but {place} has no such column{nearest(column, row)}")

    def prompt_of(self, row: Row, place: str, num_images: int) -> str:
        """The prompt of a row as text."""
        if self.is_task:
            return ""
        if "{" in self.config.template:
            prompt: Json = self._fill(self.config.template, row, place)
        else:
            prompt = self.value_of(row, self.config.prompt, place)
            if self.is_chat:
                return self.written(self.messages_of(prompt, num_images, place), place)
        if not isinstance(prompt, str):
            what = f"column '{self.config.prompt}' holds {type(prompt).__name__}"
            raise self.refused(".prompt", f"{place}: {what}; without a chat template it must be text")
        return prompt if self.images is None else self.images.marked(prompt, num_images, place)

    def messages_of(self, prompt: Json, num_images: int, place: str) -> list[Json]:
        """A prompt as messages, with those that the recipe adds."""
        messages: list[Json] = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else []
        if isinstance(prompt, list) and all(_is_message(message) for message in prompt):
            messages = list(prompt)
        if not messages:
            what = "text, or a list of messages that each have a 'role' and a 'content'"
            raise self.refused(".prompt", f"{place}: column '{self.config.prompt}' must hold {what}")
        for message in messages:
            if isinstance(message, dict) and (medium := other_than_text(message, has_images=self.images is not None)):
                what = f"column '{self.config.prompt}' holds a message with {medium}"
                remedy = "leave such rows out"
                if medium == "an image":
                    remedy += f", or name the column of images in {self.key}.images, for a model that sees them"
                raise self.refused(".prompt", f"{place}: {what}, which is not read: {remedy}")
        if self.images is not None:
            messages = self.images.messages(messages, num_images, place)
        return [{"role": "system", "content": self.config.system}, *messages] if self.config.system else messages

    def written(self, messages: Sequence[Json], place: str, *, is_open: bool = True) -> str:
        """A conversation as text; an open one ends where the model is to answer."""
        try:
            return self.tokenizer.apply_chat_template(messages, add_generation_prompt=is_open, tokenize=False)
        except (TemplateError, TypeError, ValueError, KeyError, AttributeError) as error:
            roles = ", ".join(str(message["role"]) for message in messages if isinstance(message, dict))
            raise self.refused(
                ".template",
                f"{place}: the tokenizer's chat template cannot write a conversation of the roles {roles}: {error}; "
                f"correct the template, or write prompts without one by {self.key}.template: plain",
            ) from error

    def _fill(self, template: str, row: Row, place: str) -> str:
        filled = {column: value for column, value in row.items() if value is not None}
        try:
            return template.format(**filled)
        except (KeyError, IndexError, AttributeError, TypeError, ValueError) as error:
            raise self.refused(
                ".template",
                f"{place}: cannot be filled: {error} (columns that are not null: {', '.join(filled) or 'none'}); "
                "braces that are text are written twice, as {{}}",
            ) from error

    def value_of(self, row: Row, column: str, place: str) -> Json:
        """The value of a column, which must be there."""
        if column not in row:
            raise self.refused("", f"{place} has no column '{column}'{nearest(column, row)}")
        if row[column] is None:
            raise self.refused("", f"{place}: column '{column}' is null")
        return row[column]

    def refused(self, setting: str, problem: str) -> RecipeError:
        """The error for something about a setting of the dataset."""
        return RecipeError.at(f"{self.key}{setting}", problem)


def _encode_texts(tokenizer: Tokenizer, texts: Sequence[str], *, add_special_tokens: bool) -> list[list[int]]:
    """Token ids of several texts.

    A fast tokenizer of `transformers` encodes them together, in Rust and on all cores; its own call for several texts
    spends as much time again in Python. The first text is encoded by `transformers` itself, which also sets the
    tokenizer up; a tokenizer that gives another result for it encodes all texts one by one.
    """
    if not texts:
        return []
    first = tokenizer.encode(texts[0], add_special_tokens=add_special_tokens)
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if isinstance(backend, BackendTokenizer) and len(texts) > 1:
        encodings = backend.encode_batch_fast(texts, add_special_tokens=add_special_tokens)
        if encodings[0].ids == first:
            return [encoding.ids for encoding in encodings]
    return [first, *(tokenizer.encode(text, add_special_tokens=add_special_tokens) for text in texts[1:])]


def fits(encoded: Encoded, place: str, data: DataConfig, key: str) -> bool:
    """Whether a row is short enough to use; an empty prompt, or an overlong row where that is an error, is refused."""
    if not encoded.prompt:
        raise RecipeError.at(key, f"{place} has an empty prompt")
    for what, length, limit in (
        ("prompt", len(encoded.prompt), data.max_prompt_tokens),
        ("response", max(len(encoded.response), len(encoded.other)), data.max_response_tokens),
    ):
        if length > limit:
            if data.overlong == "error":
                raise RecipeError.at(
                    f"data.max_{what}_tokens",
                    f"{place} has a {what} of {length} tokens, more than {limit}: raise it, or set data.overlong=drop",
                )
            return False
    return True


def all_overlong(what: str, config: DatasetConfig, data: DataConfig) -> RecipeError:
    """The error for a dataset of which no row can be used."""
    limits = f"data.max_prompt_tokens (now {data.max_prompt_tokens})"
    if config.response is not None or config.chosen is not None:
        limits += f" or data.max_response_tokens (now {data.max_response_tokens})"
    return RecipeError.at("data", f"{what} of {config.path} are overlong: raise {limits}")


def tokenizer_fingerprint(tokenizer: Tokenizer) -> str:
    """A digest that differs between tokenizers, of the files as which one would be saved."""
    digest = hashlib.sha256()
    with TemporaryDirectory() as folder:
        tokenizer.save_pretrained(folder)
        for file in sorted(Path(folder).iterdir()):
            digest.update(file.name.encode() + file.read_bytes())
    return digest.hexdigest()


def _is_message(value: Json) -> bool:
    return isinstance(value, dict) and "role" in value and ("content" in value or "tool_calls" in value)
