"""The text of responses while they grow, and the calls of tools in them."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Mapping, Sequence

from leaderless.base.values import Json
from leaderless.data.prompts.encode import Tokenizer
from leaderless.environments.programs.conversations import call_of
from leaderless.environments.tools.calls import ToolCalls

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
"""Character that tokenizers write for bytes that are no character, or not a whole one yet."""


class TextStream:
    """The text of one response while it grows.

    A character whose bytes are spread over several tokens is written with the last of them. Text that may turn out
    to be the beginning of a stop text is held back. The stop text and everything after it is not written.
    """

    def __init__(self, tokenizer: Tokenizer, stop: Sequence[str]) -> None:
        """Start without any text; `stop` are texts that end it."""
        self._tokenizer, self._stop = tokenizer, stop
        self._window: list[int] = []
        """Newest tokens. The first ones were written already; they affect how the next one is decoded."""
        self._num_old = 0
        self._num_written = 0
        self._held = ""
        self.num_characters = 0
        """Number of whole characters so far, including those held back."""
        self.stopped_by: str | None = None
        """Stop text that has appeared; None if none has."""

    @property
    def has_stopped(self) -> bool:
        """Check whether a stop text has appeared."""
        return self.stopped_by is not None

    def add(self, token: int) -> str:
        """Add the next token, and return the text that is certain now; special tokens have none."""
        self._window.append(token)
        text = self._tokenizer.decode(self._window, skip_special_tokens=True)
        whole = text.rstrip(REPLACEMENT)
        new = whole[self._num_written :]
        self._num_written = max(self._num_written, len(whole))
        if new and whole == text:
            self._window = self._window[self._num_old :]
            self._num_old = len(self._window)
            self._num_written = len(self._tokenizer.decode(self._window, skip_special_tokens=True))
        return self._before_stop(new)

    def finish(self) -> str:
        """Return the rest of the text after the last token."""
        text = self._tokenizer.decode(self._window, skip_special_tokens=True)
        rest = self._before_stop(text[self._num_written :])
        held, self._held = self._held, ""
        return rest + held

    def _before_stop(self, new: str) -> str:
        """Return the part of the text that is certain to come before any stop text."""
        self.num_characters += len(new)
        if self.has_stopped:
            return ""
        text = self._held + new
        found = [(place, stop) for stop in self._stop if (place := text.find(stop)) >= 0]
        if found:
            place, self.stopped_by = min(found)
            self._held = ""
            return text[:place]
        # Characters at the end that may be the beginning of a stop text.
        places = ((stop, count) for stop in self._stop for count in range(1, min(len(text) + 1, len(stop))))
        certain = len(text) - max((count for stop, count in places if text.endswith(stop[:count])), default=0)
        self._held = text[certain:]
        return text[:certain]


class CallReader:
    """Finds calls of tools in answers.

    Attributes:
        read: Function that reads the text of a whole answer, special tokens included.
        marks: Texts with which calls may begin; None if an answer has to be read as a whole.
        tools: The tools in the format of OpenAI's API.
    """

    def __init__(
        self, read: Callable[[str], ToolCalls], marks: Sequence[str] | None, tools: Sequence[Json] = ()
    ) -> None:
        self.read, self.marks, self.tools = read, marks, tools


class AnswerText:
    """The text of one response while it grows, up to the first call of a tool.

    Without tools it is that of a `TextStream`. With tools, the rest waits for the end of the response as soon as a call
    may have begun; if there is none, it is text after all.
    """

    def __init__(self, tokenizer: Tokenizer, stop: Sequence[str], reader: CallReader | None = None) -> None:
        self.stream = TextStream(tokenizer, stop)
        self._tokenizer, self._reader = tokenizer, reader
        self._tokens: list[int] = []
        self._given, self._held = "", ""
        self._is_held = reader is not None and reader.marks is None
        self.calls: Sequence[Mapping[str, Json]] = ()
        """Calls in the format of OpenAI's API, at the end."""

    def add(self, token: int) -> str:
        """Add the next token, and return the text that is certain now."""
        text = self.stream.add(token)
        if self._reader is None:
            return text
        self._tokens.append(token)
        return self._certain(text, self._tokenizer.decode([token]))

    def finish(self) -> str:
        """Return the rest of the text after the last token, and read the calls."""
        text = self.stream.finish()
        if self._reader is None:
            return text
        self._held += text
        read = self._reader.read(self._tokenizer.decode(self._tokens))
        # What cannot be read is no call in the API; the client sees the text, and says what is wrong with it.
        if not read.calls or any(call.problem for call in read.calls):
            return self._held
        self.calls = [call_of(f"call_{uuid.uuid4().hex[:24]}", call, self._reader.tools) for call in read.calls]
        return read.content[len(self._given) :] if read.content.startswith(self._given) else ""

    def _certain(self, text: str, token: str) -> str:
        """The part of new text that is certain to come before any call, and not to be white space before one."""
        assert self._reader is not None
        self._held += text
        marks = self._reader.marks or ()
        self._is_held = self._is_held or any(mark in token for mark in marks)  # special tokens have no text
        if self._is_held:
            return ""
        found = [place for place in map(self._held.find, marks) if place >= 0]
        self._is_held = bool(found)
        places = ((mark, count) for mark in marks for count in range(1, min(len(self._held) + 1, len(mark))))
        begun = max((count for mark, count in places if self._held.endswith(mark[:count])), default=0)
        certain = self._held[: min(found)] if found else self._held[: len(self._held) - begun]
        certain = certain.rstrip()
        self._held = self._held[len(certain) :]
        self._given += certain
        return certain
