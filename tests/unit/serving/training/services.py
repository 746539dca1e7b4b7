"""A training service in this process, for the real client and for tests without one."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.tiny import tiny_model

from leaderless.run.standalone_model import find_model
from leaderless.serving.listen import address_of, take_port
from leaderless.serving.training.app import TrainingServer
from leaderless.serving.training.service import ClientLimits, TrainingService
from leaderless.serving.training.start import ServiceOptions, open_service

BASE = "tiny"
KEY = "tml-no-secret"
START_S = 120
NO_LIMITS = ClientLimits()


@contextmanager
def served(
    folder: Path, limits: ClientLimits = NO_LIMITS, token: str | None = None
) -> Iterator[tuple[str, TrainingService]]:
    """The address of a service with the tiny model, and the service."""
    with served_model(tiny_model(), folder, limits, token) as found:
        yield found


@contextmanager
def served_model(
    path: str, folder: Path, limits: ClientLimits = NO_LIMITS, token: str | None = None
) -> Iterator[tuple[str, TrainingService]]:
    """The address of a service with a model, and the service."""
    source = find_model(path, "policy", print).changed(BASE, "float32", None, None)
    ready, address = threading.Event(), list[str]()
    with open_service(source, ServiceOptions(folder, limits=limits), print) as service:
        server = TrainingServer(service, token)

        def run() -> None:
            with take_port("127.0.0.1", 0, None) as listener:
                address.append(f"http://{address_of(listener)}")
                server.install_signal_handlers = lambda: None  # type: ignore[attr-defined]
                asyncio.run(server.answer(listener, ready.set))

        thread = threading.Thread(target=run, daemon=True)
        thread.start()
        assert ready.wait(START_S)
        try:
            yield address[0], service
        finally:
            server.should_exit = True
            thread.join(START_S)
