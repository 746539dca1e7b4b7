"""From tokens to text, as they come."""

from __future__ import annotations

from collections.abc import Sequence

from leaderless.data.encode import Tokenizer

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
"""What tokenizers write for bytes that are no character, or not a whole one yet."""


class TextStream:
    """The text of one response while it grows.

    A character whose bytes are spread over several tokens comes with the last of them. Text that may turn out to be the
    beginning of a stop text is held back; nothing comes from the stop text on.
    """

    def __init__(self, tokenizer: Tokenizer, stop: Sequence[str]) -> None:
        """Begin with nothing.

        Args:
            tokenizer: Of the model.
            stop: Texts that end a response.
        """
        self._tokenizer, self._stop = tokenizer, stop
        self._window: list[int] = []
        """The newest tokens; those in front were written already, and only show how the next one is written."""
        self._num_old = 0
        self._num_written = 0
        self._held = ""
        self.num_characters = 0
        """Of all whole characters so far, those held back included."""
        self.has_stopped = False
        """A stop text has come."""

    def add(self, token: int) -> str:
        """Take the next token.

        Args:
            token: Its id; special tokens are no text.

        Returns:
            The text that is certain now.
        """
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
        """The rest, when no more tokens come."""
        text = self._tokenizer.decode(self._window, skip_special_tokens=True)
        rest = self._before_stop(text[self._num_written :])
        held, self._held = self._held, ""
        return rest + held

    def _before_stop(self, new: str) -> str:
        """What of the text so far is certain to lie before a stop text."""
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
    """Characters at the end of a text that may be the beginning of a stop text."""
    longest = min(len(text), len(stop) - 1)
    return next((count for count in range(longest, 0, -1) if text.endswith(stop[:count])), 0)
