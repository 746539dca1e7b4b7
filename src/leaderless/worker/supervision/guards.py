"""Decides how a run responds to its guards' reports, the same on all ranks."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from rich.markup import escape

from leaderless.config.failures import GUARDED_KINDS
from leaderless.config.run import GuardsConfig
from leaderless.observability.console import FAILED, Display
from leaderless.observability.events import GuardEvent, GuardStop, strongest
from leaderless.observability.run_directory import RunDirectory, step_of, write_atomically
from leaderless.planner import PlannedNode
from leaderless.planner.workflow.stage_spec import tagged
from leaderless.stages.mini_batches import STEPS_BETWEEN_WARNINGS
from leaderless.worker.agreement import StepEnd

FAILED_BODIES = "body/failed"
"""Share of failed episodes of bodies."""


@dataclass(frozen=True)
class RollBack:
    """A return to a checkpoint from a step that went wrong.

    The data position does not return, so that the same prompts do not cause it again: training continues after them.
    """

    from_step: int
    to_step: int
    data_position: int


class Guards:
    """Records what guards report, and decides whether the run continues, rolls back or stops.

    `roll_backs.json` in the run's folder lists the roll-backs so far: it survives both a roll-back and a kill.
    """

    def __init__(self, config: GuardsConfig, directory: RunDirectory, display: Display, *, is_first: bool) -> None:
        """Read what earlier starts have written; only the first rank writes."""
        self._config, self._directory, self._display, self.is_first = config, directory, display, is_first
        self._roll_backs: list[RollBack] = []
        self._warned: dict[str, int] = {}  # last step of a warning, by metric
        if directory.roll_backs.exists():
            written = json.loads(directory.roll_backs.read_text(encoding="utf-8"))
            self._roll_backs = [RollBack(**one) for one in written["roll_backs"]]

    @property
    def num_roll_backs(self) -> int:
        """Number of roll-backs of the run so far."""
        return len(self._roll_backs)

    def judge(self, step: int, numbers: Mapping[str, float], nodes: Sequence[PlannedNode]) -> list[GuardEvent]:
        """Report too many failures, given the metrics of all ranks of a pool and the nodes that run on them.

        Where no node computes rewards, as in SAC, failed episodes of bodies count. After a warning of a kind of failure
        there is no other one for some steps.
        """
        config = self._config
        settings = {
            "reward_failures_limit": (config.reward_failures_limit, config.reward_failures_action),
            "failures_limit": (config.failures_limit, config.failures_action),
        }
        graders = [node for node in nodes if "reward_valid" in node.writes]
        players = [node for node in nodes if "environment_failed" in node.writes]
        bodies = [] if graders else [node for node in nodes if node.node.run == "rollout"]
        watched = [("reward_failures_limit", FAILED, node, "") for node in graders]
        watched += [("reward_failures_limit", FAILED_BODIES, node, "") for node in bodies]
        for guarded in GUARDED_KINDS:
            asked = graders if guarded == "grader" else players
            watched += [("failures_limit", f"failure/{guarded}", node, guarded) for node in asked]
        events: dict[str, GuardEvent] = {}
        for guard, metric, node, kind in watched:
            (limit, action), name = settings[guard], tagged(metric, node.node)
            share, before = numbers.get(name), self._warned.get(name)
            if limit is None or share is None or share <= limit:
                continue
            if action == "warn" and before is not None and 0 <= step - before < STEPS_BETWEEN_WARNINGS:
                continue
            event = guard, share, limit, action, node.name, node.node.tag, self.num_roll_backs, kind
            events.setdefault(name if kind else f"{guard} of {node.name}", GuardEvent(step, *event))
        self._warned |= {name: step for name, event in events.items() if event.kind}
        return [*events.values()]

    def must_roll_back(self, step: int, end: StepEnd, newest: Callable[[], Path | None]) -> bool:
        """Record the guards' reports on a step, and decide whether the run rolls back.

        All ranks call it together, and `newest` finds the same checkpoint on all of them.

        Raises:
            GuardStop: The run has to stop.
        """
        action = strongest(event.action for event in end.events)
        self._record(end.events)
        if action not in {"stop", "roll_back"}:
            return False
        cause = next(event for event in end.events if event.action == action)
        if action == "stop":
            raise GuardStop(f"{cause}: {cause.remedy}{self._first_error(cause)}")
        checkpoint = newest()
        if checkpoint is None:
            last = replace(cause, action="stop")
            self._record([last])
            raise GuardStop(
                f"{last}, as there is no checkpoint to go back to: set checkpoint.every_steps; {cause.remedy}"
            )
        limit, count = self._config.max_roll_backs, self.num_roll_backs + 1
        if count > limit:
            last = replace(cause, guard="max_roll_backs", value=float(count), limit=float(limit), action="stop")
            self._record([last])
            raise GuardStop(f"{last}: {last.remedy}")
        self._roll_backs.append(RollBack(step, step_of(checkpoint), end.data_position))
        self._write()
        return True

    def resumed(self, step: int) -> RollBack | None:
        """Record that the run resumes from the checkpoint of a step.

        Returns:
            The last roll-back to this checkpoint; None when the run continues at the checkpoint's own data position.
        """
        kept = [one for one in self._roll_backs if one.to_step <= step]
        if len(kept) < len(self._roll_backs):  # the rest belong to steps that will be repeated
            self._roll_backs = kept
            self._write()
        return kept[-1] if kept and kept[-1].to_step == step else None

    def _first_error(self, event: GuardEvent) -> str:
        """The first error of a reward or an episode in this run, for an event about failures."""
        error = self._directory.first_reward_error() if event.guard == "reward_failures_limit" else ""
        if event.guard == "failures_limit":
            error = self._directory.first_failure(event.kind)
        return f" (the first was {error})" if error else ""

    def _record(self, events: Sequence[GuardEvent]) -> None:
        for event in events:
            if self.is_first:
                self._directory.append_event("guard", event.to_json())
            self._display.say(f"[bold red]guard[/] {escape(str(event) + self._first_error(event))}")

    def _write(self) -> None:
        if self.is_first:
            roll_backs = [asdict(one) for one in self._roll_backs]
            write_atomically(self._directory.roll_backs, json.dumps({"roll_backs": roll_backs}, indent=2))
