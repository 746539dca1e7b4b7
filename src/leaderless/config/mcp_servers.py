"""Servers of the Model Context Protocol, which offer tools."""

from __future__ import annotations

from collections.abc import Mapping

from pydantic import Field, model_validator

from leaderless.base.section import Section


class McpServerConfig(Section):
    """A server that offers tools: a program that each rank starts, or an address."""

    command: tuple[str, ...] = ()
    """Program that answers on standard input and output, with its arguments. It gets the variables of `env` and a few
    others, such as `PATH` and `HOME`, but no secrets of the run; its standard error goes to the standard error of the
    run."""
    env: Mapping[str, str] = {}
    """Environment variables of the program."""
    url: str | None = Field(default=None, pattern=r"^https?://.+")
    """Address of a server that answers by streamable HTTP, instead of `command`."""
    token_variable: str | None = Field(default=None, min_length=1)
    """Environment variable of the run whose value is sent to `url` as a bearer token."""
    shared: bool = False
    """Whether all episodes of a rank share one session, for servers that keep nothing between calls; else each episode
    has one of its own, which begins with its first call."""
    start_timeout_s: float = Field(default=30.0, gt=0)
    """Seconds that starting a session may take."""

    @model_validator(mode="after")
    def _has_one_address(self) -> McpServerConfig:
        if bool(self.command) == (self.url is not None):
            raise ValueError("must have either `command`, a program to start, or `url`, the address of a server")
        if self.url is None and self.token_variable is not None:
            raise ValueError("`token_variable` is sent to a `url`; a program gets variables by `env`")
        if self.url is not None and self.env:
            raise ValueError("`env` is for a `command`; a server at a `url` is already running")
        return self
