"""Messages as tokens: how a conversation begins, and what is added to it turn by turn."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from jinja2 import TemplateError

from leaderless.config import Json, RecipeError
from leaderless.data.encode import Tokenizer
from leaderless.environments.protocol import Message

MARK = "\u2042said\u2042"
"""What an agent says in conversations that are made up to see what a template writes behind it."""


@dataclass
class ChatWriter:
    """Writes messages by a tokenizer's chat template, or as they are.

    A conversation only grows: what is added to it is what the template writes after the agent's message, and nothing
    before it is written again. With a chat template, texts that spell a special token are told with a blank in it, so
    that no tool or page can end a message and begin another.

    Attributes:
        tokenizer: Tokenizer of the policy.
        is_chat: Whether messages are written by the chat template; else their texts are put together.
        system: System message of all conversations that have none; None for none.
        tools: Schemas of the tools that the template offers.
    """

    tokenizer: Tokenizer
    is_chat: bool
    system: str | None = None
    tools: Sequence[Json] = ()
    _ends: list[str] = field(init=False)
    _special: list[str] = field(init=False)

    def __post_init__(self) -> None:
        special = {*self.tokenizer.all_special_tokens, *self.tokenizer.get_added_vocab()} if self.is_chat else ()
        self._ends = sorted(special, key=len, reverse=True)
        self._special = [token for token in self._ends if len(token) > 1 and token in _special_tokens(self.tokenizer)]

    def begin(self, messages: Sequence[Message]) -> tuple[list[Message], list[int]]:
        """The first messages of a conversation with the system message, and their tokens, at least one.

        Raises:
            RecipeError: The chat template cannot write them.
        """
        has_system = any(message["role"] == "system" for message in messages)
        if self.system is not None and not has_system:
            messages = [{"role": "system", "content": self.system}, *messages]
        if not self.is_chat:
            tokens = self.tokenizer.encode(_text(messages), add_special_tokens=True)
        else:
            tokens = self.tokenizer.encode(self._render(messages, is_prompt=True), add_special_tokens=False)
        if not tokens and self.tokenizer.eos_token_id is not None:
            tokens = [self.tokenizer.eos_token_id]  # the first token of a response follows on something
        return list(messages), tokens

    def add(self, messages: Sequence[Message], said: Sequence[int]) -> list[int]:
        """The tokens between what an agent has said, tokens with their end, and what it says next.

        Raises:
            RecipeError: The chat template cannot write them.
        """
        if not self.is_chat:
            return self.tokenizer.encode(_text(messages), add_special_tokens=False)
        behind = self._behind(messages)
        last = self.tokenizer.decode(said[-1:]) if said else ""
        if last in self._ends:
            end = next((end for end in self._ends if behind.lstrip().startswith(end)), "")
            behind = behind.lstrip()[len(end) :] if end else behind
        return self.tokenizer.encode(behind, add_special_tokens=False)

    def fresh(self, messages: Sequence[Message]) -> list[int]:
        """The tokens of a whole conversation whose next message is the agent's, written from the beginning."""
        if not self.is_chat:
            return self.tokenizer.encode(_text(messages), add_special_tokens=True)
        return self.tokenizer.encode(self._render(messages, is_prompt=True), add_special_tokens=False)

    def text(self, tokens: Sequence[int], *, is_plain: bool = True) -> str:
        """What an agent has said, without special tokens or with them."""
        return self.tokenizer.decode(tokens, skip_special_tokens=is_plain)

    def _behind(self, messages: Sequence[Message]) -> str:
        """What the template writes behind an agent's message if others follow, the beginning of the next included."""
        before: list[Message] = [{"role": "user", "content": "?"}, {"role": "assistant", "content": MARK}]
        text = self._render([*before, *messages], is_prompt=True)
        _, mark, behind = text.rpartition(MARK)
        if not mark:
            roles = ", ".join(str(message["role"]) for message in messages)
            raise RecipeError.at(
                "", f"the chat template leaves out an agent's message that is followed by the roles {roles}"
            )
        return behind

    def _harmless(self, message: Message) -> Message:
        """A message of others, without special tokens in its text."""
        text = message["content"]
        if message["role"] == "assistant" or not isinstance(text, str):
            return message
        for token in self._special:
            text = text.replace(token, f"{token[0]} {token[1:]}")
        return {**message, "content": _whole(text)}

    def _render(self, messages: Sequence[Message], *, is_prompt: bool) -> str:
        try:
            return self.tokenizer.apply_chat_template(
                list(map(self._harmless, messages)),
                tools=self.tools or None,
                add_generation_prompt=is_prompt,
                tokenize=False,
            )
        except (TemplateError, TypeError, ValueError, KeyError, AttributeError) as error:
            roles = ", ".join(str(message["role"]) for message in messages)
            raise RecipeError.at(
                "", f"the tokenizer's chat template cannot write a conversation of the roles {roles}: {error}"
            ) from error


def _special_tokens(tokenizer: Tokenizer) -> set[str]:
    """The texts of tokens that have a meaning of their own, such as the end of a message."""
    added = getattr(tokenizer, "added_tokens_decoder", {})
    return {*tokenizer.all_special_tokens, *(str(token) for token in added.values() if token.special)}


def _text(messages: Sequence[Message]) -> str:
    return _whole("".join(str(message["content"]) for message in messages))


def _whole(text: str) -> str:
    """A text without halves of characters, which no tokenizer takes."""
    return text.encode("utf-8", "replace").decode("utf-8")
