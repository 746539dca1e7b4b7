"""Turns the tokens of a response into text as they arrive."""

from __future__ import annotations

from collections.abc import Sequence

from leaderless.data.prompts.encode import Tokenizer

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
        self.has_stopped = False
        """Whether a stop text has appeared."""

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
        found = [place for place in map(text.find, self._stop) if place >= 0]
        if found:
            self.has_stopped, self._held = True, ""
            return text[: min(found)]
        begun = max((_overlap(text, stop) for stop in self._stop), default=0)
        self._held = text[len(text) - begun :]
        return text[: len(text) - begun]


def _overlap(text: str, stop: str) -> int:
    """Count the characters at the end of a text that may be the beginning of a stop text."""
    longest = min(len(text), len(stop) - 1)
    return next((count for count in range(longest, 0, -1) if text.endswith(stop[:count])), 0)
