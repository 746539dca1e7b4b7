"""Which sandbox is used. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping

from leaderless.config.rewards import SandboxName
from leaderless.rewards.sandbox.bubblewrap import BubblewrapSandbox
from leaderless.rewards.sandbox.builtin import BuiltinSandbox
from leaderless.rewards.sandbox.protocol import Sandbox

_SANDBOXES: Mapping[str, Sandbox] = {sandbox.name: sandbox for sandbox in (BuiltinSandbox(), BubblewrapSandbox())}
"""By name; `auto` tries them in this order."""


def choose_sandbox(name: SandboxName, *, allow_weaker: bool = False) -> Sandbox:
    """The sandbox of a name, or the first one that works.

    A sandbox with all of its layers is preferred to one that lacks some, even if the user accepts that.

    Raises:
        ValueError: There is no such sandbox.
        RuntimeError: It cannot be used on this machine; the text begins with a verb.
    """
    if name != "auto" and name not in _SANDBOXES:
        raise ValueError(f"sandbox='{name}' must be auto, {' or '.join(_SANDBOXES)}")
    chosen = list(_SANDBOXES.values()) if name == "auto" else [_SANDBOXES[name]]
    for weaker in dict.fromkeys((False, allow_weaker)):
        problems = [(sandbox, sandbox.refusal(allow_weaker=weaker)) for sandbox in chosen]
        for sandbox, problem in problems:
            if problem is None:
                return sandbox
    raise RuntimeError("; and ".join(f"with sandbox={sandbox.name} {problem}" for sandbox, problem in problems))
