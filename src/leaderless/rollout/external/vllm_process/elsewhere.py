"""Serves an engine to a rank of any machine; `leaderless engine` starts it again for the next rank."""

from __future__ import annotations

import json
import os
import socket
import sys
import threading
from collections.abc import Mapping
from typing import Any, ClassVar

from typing_extensions import override

from leaderless.distributed.remote.elsewhere import STARTED
from leaderless.distributed.remote.messages import NUMBER, Settings, bind
from leaderless.rollout.external.vllm_process.server import EngineHandler
from leaderless.rollout.external.vllm_process.worker import VllmWorker

AGAIN = "again"
"""Answer to a call to start where the process has to end first."""
KEPT_ALIVE = {socket.TCP_KEEPIDLE: 30, socket.TCP_KEEPINTVL: 10, socket.TCP_KEEPCNT: 3}
"""After how many seconds without a message the rank's machine is asked whether it is there, how often, and how many
times in vain."""
END_S = 1.0
"""Time for the last answer to be sent."""


class _Elsewhere(EngineHandler):
    """Answers the calls of the rank that has started the engine."""

    session: ClassVar[str] = ""

    @override
    def setup(self) -> None:
        """Notice a machine that is gone, or nobody else would be served."""
        self.request.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option, value in KEPT_ALIVE.items():
            self.request.setsockopt(socket.IPPROTO_TCP, option, value)
        super().setup()

    @override
    def answer(self, name: str, body: Mapping[str, Any]) -> object:
        session = str(self.headers.get(NUMBER) or "").partition("-")[0]
        if name == "start":
            if self.session:  # a process has one engine in its life
                self._end()
                return AGAIN
            type(self).session = session
            type(self).worker = VllmWorker(Settings(**body["settings"]))
            self.worker.start()
            return STARTED
        if session != self.session and name != "health":
            raise RuntimeError("this engine was started by another rank, or anew: each rank needs one of its own")
        if name == "stop":
            self._end()
            return None
        return super().answer(name, body)

    def _end(self) -> None:
        """End this process once the answer is sent: a new one has all memory of the device."""
        threading.Timer(END_S, os._exit, (0,)).start()


def main() -> None:
    """Serve at the address that standard input names, until an engine is not needed any more."""
    start = json.loads(sys.stdin.readline())
    server = bind(start["port"], _Elsewhere, start["token"], start["host"])
    server.server_activate()
    sys.stdout.write(f"ready for a rank at {start['host']}:{start['port']}\n")
    sys.stdout.flush()
    server.serve_forever()
