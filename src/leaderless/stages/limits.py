"""Models as a stage may use them: other uses than the declared ones are refused."""

from __future__ import annotations

from typing import TypeVar, cast

from leaderless.workflow.stage import AnyUse, RoleUse

Engine = TypeVar("Engine")

NEEDS: dict[str, RoleUse] = {
    "log_probs": "score",
    "values": "score",
    "forward": "train",
    "passes": "train",
    "optimizer_step": "train",
    "discard_gradient": "train",
    "state": "train",
    "state_loaded": "train",
    "phase": "generate",
    "submit": "generate",
    "step": "generate",
}
"""Use that a stage has to declare for a method of an engine. Training includes scoring."""


def limited(engine: Engine, use: AnyUse, what: str) -> Engine:
    """An engine whose methods for other uses raise a RuntimeError.

    Args:
        engine: Engine of any kind.
        use: Use that the stage declares.
        what: Role and node, for the error.
    """
    return cast(Engine, _Limited(engine, use, what))


class _Limited:
    """Hands on everything to an engine, except what needs another use."""

    def __init__(self, engine: object, use: AnyUse, what: str) -> None:
        self._engine, self._use, self._what = engine, use, what

    def __getattr__(self, name: str) -> object:
        needed = NEEDS.get(name)
        if needed is not None and needed != self._use and (needed, self._use) != ("score", "train"):
            raise RuntimeError(
                f"{self._what} is declared to be used to {self._use}, and `{name}` needs '{needed}': declare it with "
                f'@stage(roles={{NAME: "{needed}"}})'
            )
        return getattr(self._engine, name)
