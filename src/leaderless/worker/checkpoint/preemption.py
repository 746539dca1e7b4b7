"""Saves a run that is preempted within a step, as it was at the border before it.

    rank 0   step 7 |g g g g g g g g u|        g generates, u changes weights
                         ^ SIGTERM               part of step-000006, while generation goes on
    rank 1   step 7 |g g g g g g g g u|

Each rank writes its part by itself, in a thread, as the main thread may be in a collective, a kernel or a reward that
hangs. Nothing has to be agreed on: the first rank names the checkpoint when the parts of all ranks are there, and a
rank whose weights may have changed since the border writes none. One that comes to an update meanwhile waits until its
part is written (`UpdateGate`), and with it those that it meets there.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from dataclasses import replace

from rich.markup import escape

from leaderless.stages.context import UpdateGate
from leaderless.training.engine import Trainable
from leaderless.worker.checkpoint.reader import RoleState
from leaderless.worker.checkpoint.shards import Shard
from leaderless.worker.checkpoint.writer import CheckpointWriter, Content, Role, own_shards


class PreemptionSaver:
    """Writes the state of the last border between two steps."""

    def __init__(
        self,
        writer: CheckpointWriter,
        engines: Mapping[str, Trainable],
        gate: UpdateGate,
        say: Callable[[str], None],
    ) -> None:
        """Save trained roles, which only change weights behind the gate; no border has been reached yet."""
        self._writer, self._engines, self._gate, self._say = writer, engines, gate, say
        self._tensors: dict[str, tuple[RoleState, Mapping[str, Shard]]] = {}
        self._content: Content | None = None
        self._has_begun = False

    def reached(self, content: Content | None) -> None:
        """Note what a checkpoint of this border holds but for tensors; None if none must be written of it.

        The main thread calls it between two steps, when no pass goes through a model.
        """
        if not all(getattr(engine, "has_live_state", False) for engine in self._engines.values()):
            return
        if content is not None and not self._tensors:
            self._tensors = {role: (RoleState.of(one), own_shards(one)) for role, one in self._engines.items()}
        with self._gate.lock:
            self._gate.is_passed, self._content = False, content
        if self._has_begun:
            self._start()

    def is_begun(self) -> bool:
        """Whether some rank has begun to save, which all have to do then."""
        return any(self._writer.folder.glob(f".step-*{self._writer.preempted}"))

    def save(self) -> None:
        """Begin to write the state of the last border, and from now on that of each border until the run stops."""
        if not self._has_begun:
            self._has_begun = True
            self._start()

    def _start(self) -> None:
        threading.Thread(target=self._write, name="preemption", daemon=True).start()

    def _write(self) -> None:
        partial = self._writer.folder
        try:
            with self._gate.lock:
                content, self._content = self._content, None
                if content is None or self._gate.is_passed:
                    return
                partial /= f".step-{content.state.step:06d}{self._writer.preempted}"
                roles: dict[str, Role] = {}
                for role, (state, shards) in self._tensors.items():
                    roles[role] = replace(state, policy_version=self._engines[role].policy_version), shards
                self._writer.write_part(partial, content, roles)
            if self._writer.is_first:
                self._writer.commit(partial, content)
                self._say(f"the state after step {content.state.step} is saved, in case the next one is not finished")
        except Exception as error:  # noqa: BLE001 - the run itself may still end with a checkpoint
            if partial.exists():  # else a later checkpoint has taken its place
                self._say(f"the state before this step could not be saved: {escape(str(error))}")
