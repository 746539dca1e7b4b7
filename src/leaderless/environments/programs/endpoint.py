"""The address at which programs in other processes reach the policy."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, cast

from leaderless.base.named_functions import load_own
from leaderless.config.packaged_files import server_refusal
from leaderless.environments.programs.chat import Chat, ProgramEndpoint

SERVER = "leaderless.serving.api.episode_server:EpisodeServer"
"""Class of the server behind the address; it is imported where a program in another process asks for one."""


class OpenDoorway(ProgramEndpoint, Protocol):
    """A server that listens."""

    async def close(self) -> None:
        """Stop listening."""


class LazyEndpoint:
    """Opens when the first program asks for an address, in the event loop of that moment."""

    def __init__(self) -> None:
        self._door: OpenDoorway | None = None

    def admit(self, chat: Chat) -> tuple[str, str]:
        """Open the server if it is not open yet, and admit a chat.

        Raises:
            RuntimeError: A package is missing.
        """
        if self._door is None:
            if problem := server_refusal():
                raise RuntimeError(f"an address of the policy {problem}")
            self._door = cast("Callable[[], OpenDoorway]", load_own(SERVER))()
        return self._door.admit(chat)

    def dismiss(self, chat: Chat) -> None:
        """Dismiss a chat, if the server was ever opened."""
        if self._door is not None:
            self._door.dismiss(chat)

    async def close(self) -> None:
        """Stop listening."""
        if self._door is not None:
            await self._door.close()
            self._door = None
