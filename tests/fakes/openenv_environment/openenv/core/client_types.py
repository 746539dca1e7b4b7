"""Answers of servers, as the package gives them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass
class StepResult:
    observation: dict[str, Any]
    reward: float | None = None
    done: bool = False
