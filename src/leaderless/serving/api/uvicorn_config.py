"""How uvicorn is run here: it logs nothing, and waits for clients a limited time when it stops."""

from __future__ import annotations

import uvicorn
from starlette.types import ASGIApp

LEAVING_S = 5
"""Longest time that clients have to read their last answers when a server stops."""


def uvicorn_config(app: ASGIApp, leaving_s: int = LEAVING_S) -> uvicorn.Config:
    """The settings with which uvicorn answers for an application.

    Args:
        app: Application.
        leaving_s: Seconds that clients have to read their last answers when the server stops.
    """
    return uvicorn.Config(
        app,
        log_config=None,
        log_level="warning",
        access_log=False,
        lifespan="off",
        ws="none",
        timeout_graceful_shutdown=leaving_s,
    )
