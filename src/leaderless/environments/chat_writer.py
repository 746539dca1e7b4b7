"""Messages as tokens: how a conversation begins, and what is added to it turn by turn."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from jinja2 import TemplateError

from leaderless.base.image_files import image_size
from leaderless.base.values import Json
from leaderless.config import RecipeError
from leaderless.data.prompts.encode import Tokenizer
from leaderless.data.prompts.images import ImageReader, PromptImage, Sized, expanded, placed
from leaderless.environments.pictures import data_of, is_image
from leaderless.environments.protocol import Message

MARK = "\u2042said\u2042"
"""Text of an agent in conversations that are made up to see what a template writes behind it."""


@dataclass
class ChatWriter:
    """Writes messages by a tokenizer's chat template, or as they are.

    A conversation only grows: what is added to it is what the template writes after the agent's message, and nothing
    before it is written again. With a chat template, texts that spell a special token get a blank in it, so that no
    tool or page can end a message and begin another.

    Attributes:
        tokenizer: Tokenizer of the policy.
        is_chat: Whether messages are written by the chat template; else their texts are put together.
        system: System message of all conversations that have none; None for none.
        tools: Schemas of the tools that the template offers.
        reader: Facts about how the model reads images; None if it reads text alone.
        options: Further arguments of the template.
    """

    tokenizer: Tokenizer
    is_chat: bool
    system: str | None = None
    tools: Sequence[Json] = ()
    reader: ImageReader | None = None
    options: Mapping[str, Json] = field(default_factory=dict)
    _ends: list[str] = field(init=False, default_factory=list)
    _special: list[str] = field(init=False, default_factory=list)

    def __post_init__(self) -> None:
        if not self.is_chat:
            return
        # Added tokens may be plain words; only special ones have a meaning of their own, such as the end of a message.
        added, known = getattr(self.tokenizer, "added_tokens_decoder", {}), self.tokenizer.all_special_tokens
        special = {*known, *(str(token) for token in added.values() if token.special)}
        self._ends = sorted({*known, *self.tokenizer.get_added_vocab()}, key=len, reverse=True)
        self._special = [token for token in self._ends if len(token) > 1 and token in special]

    def begin(self, messages: Sequence[Message]) -> tuple[list[Message], list[int]]:
        """The first messages of a conversation with the system message, and their tokens, at least one.

        Raises:
            RecipeError: The chat template cannot write them.
        """
        has_system = any(message["role"] == "system" for message in messages)
        if self.system is not None and not has_system:
            messages = [{"role": "system", "content": self.system}, *messages]
        tokens = self.fresh(messages)
        if not tokens and self.tokenizer.eos_token_id is not None:
            tokens = [self.tokenizer.eos_token_id]  # the first token of a response follows on something
        return list(messages), tokens

    def add(self, messages: Sequence[Message], said: Sequence[int]) -> list[int]:
        """The tokens between what an agent has said, tokens with their end, and what it says next.

        Raises:
            RecipeError: The chat template cannot write them.
        """
        if not self.is_chat:
            return self._encoded(self._text(messages), messages)
        behind = self._behind(messages)
        last = self.tokenizer.decode(said[-1:]) if said else ""
        if last in self._ends:
            end = next((end for end in self._ends if behind.lstrip().startswith(end)), "")
            behind = behind.lstrip()[len(end) :] if end else behind
        return self._encoded(behind, messages)

    def fresh(self, messages: Sequence[Message], images: Sequence[PromptImage] | None = None) -> list[int]:
        """The tokens of a whole conversation whose next message is the agent's, written from the beginning.

        Args:
            messages: The conversation.
            images: Its images, if they are known; their files are not opened then.

        Raises:
            RecipeError: The chat template cannot write them.
        """
        text = self.rendered(messages) if self.is_chat else self._text(messages)
        known = None if images is None else [image[1:] for image in images]
        return self._encoded(text, messages, known, is_whole=True)

    def images(self, messages: Sequence[Message], tokens: Sequence[int]) -> tuple[PromptImage, ...]:
        """The images of messages, with their places among the tokens that were written of them."""
        return () if self.reader is None else placed(tokens, self.reader, self._pictures(messages))

    def text(self, tokens: Sequence[int], *, is_plain: bool = True) -> str:
        """Text of an agent, without special tokens or with them."""
        return self.tokenizer.decode(tokens, skip_special_tokens=is_plain)

    def _behind(self, messages: Sequence[Message]) -> str:
        """Text of the template behind an agent's message if others follow, the beginning of the next included."""
        before: list[Message] = [{"role": "user", "content": "?"}, {"role": "assistant", "content": MARK}]
        _, mark, behind = self.rendered([*before, *messages]).rpartition(MARK)
        if not mark:
            roles = ", ".join(str(message["role"]) for message in messages)
            raise RecipeError.at(
                "", f"the chat template leaves out an agent's message that is followed by the roles {roles}"
            )
        return behind

    def _encoded(
        self,
        text: str,
        messages: Sequence[Message],
        known: Sequence[Sized] | None = None,
        *,
        is_whole: bool = False,
    ) -> list[int]:
        """The tokens of what was written of messages, perhaps of all, with one for each part of an image."""
        tokens = self.tokenizer.encode(text, add_special_tokens=is_whole and not self.is_chat)
        if self.reader is None:
            return tokens
        try:
            tokens = self.reader.arranged(tokens) if is_whole else tokens
            return expanded(tokens, self.reader, self._pictures(messages) if known is None else known)
        except ValueError as error:
            raise RecipeError.at("", f"messages cannot be written: {error}") from error

    def _pictures(self, messages: Sequence[Message]) -> list[Sized]:
        """The images of messages, with their rows and columns of tokens."""
        assert self.reader is not None
        files = [data_of(part) for message in messages for part in _parts(message) if is_image(part)]
        return [(*self.reader.grid(*image_size(data)), data) for data in files]

    def _text(self, messages: Sequence[Message]) -> str:
        """Messages without a chat template: their texts, and the model's own mark for each image."""
        marker = "" if self.reader is None else self.reader.marker
        parts = [part for message in messages for part in _parts(message)]
        if unknown := next((part for part in parts if not is_image(part) and "text" not in part), None):
            raise RecipeError.at("", f"a part of a message has no text, but only {', '.join(map(str, unknown))}")
        return _whole("".join(marker if is_image(part) else str(part["text"]) for part in parts))

    def _harmless(self, message: Message) -> Message:
        """A message of others, without special tokens in its texts and without the files of its images."""
        content, is_own = message["content"], message["role"] == "assistant"
        if isinstance(content, str):
            return message if is_own else {**message, "content": self._plain(content)}
        if not isinstance(content, list | tuple):
            return message
        parts: list[Json] = []
        for part in _parts(message):
            text = part.get("text")
            if is_image(part):
                parts.append({"type": "image"})
            else:
                parts.append({**part, "text": self._plain(text)} if isinstance(text, str) and not is_own else part)
        return {**message, "content": parts}

    def _plain(self, text: str) -> str:
        for token in self._special:
            text = text.replace(token, f"{token[0]} {token[1:]}")
        return _whole(text)

    def rendered(self, messages: Sequence[Message], *, is_prompt: bool = True, key: str = "") -> str:
        """A conversation as the chat template writes it.

        Args:
            messages: The conversation.
            is_prompt: Whether the agent's next message begins at its end.
            key: Setting that errors name.

        Raises:
            RecipeError: The chat template cannot write it.
        """
        try:
            return self.tokenizer.apply_chat_template(
                list(map(self._harmless, messages)),
                tools=self.tools or None,
                add_generation_prompt=is_prompt,
                tokenize=False,
                **self.options,
            )
        except (TemplateError, TypeError, ValueError, KeyError, AttributeError) as error:
            roles = ", ".join(str(message["role"]) for message in messages)
            raise RecipeError.at(
                key,
                f"the tokenizer's chat template cannot write a conversation of the roles {roles}: "
                f"{type(error).__name__}: {error}",
            ) from error


def _parts(message: Message) -> list[Mapping[str, Json]]:
    """The content of a message as parts; texts may stand among them."""
    content = message["content"]
    if isinstance(content, list | tuple):
        return [part if isinstance(part, Mapping) else {"type": "text", "text": part} for part in content]
    return [{"type": "text", "text": content}]


def _whole(text: str) -> str:
    """A text without halves of characters, which no tokenizer takes."""
    return text.encode("utf-8", "replace").decode("utf-8")
