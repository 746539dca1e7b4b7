"""Results of the checks of a run."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from leaderless.base.values import Json

ProofStatus = Literal["holds", "fails", "not checked"]


@dataclass(frozen=True)
class ProofFinding:
    """Result of one check.

    Attributes:
        check: Name of the check, the same in all runs.
        status: Whether it holds; `not checked` where it could not be, and the detail says why.
        detail: Text that says what was compared, or what does not hold, in one line.
        line: Number of the line of `proof.jsonl` that does not hold, from 1; None where no single one is known.
        step: Step that does not hold.
        rank: Rank that has written what does not hold, where that is known.
    """

    check: str
    status: ProofStatus
    detail: str
    line: int | None = None
    step: int | None = None
    rank: int | None = None

    @property
    def place(self) -> str:
        """Place in the run, such as `line 3, step 3, rank 0`; empty where none is known."""
        places = {"line": self.line, "step": self.step, "rank": self.rank}
        return ", ".join(f"{name} {value}" for name, value in places.items() if value is not None)

    def to_json(self) -> dict[str, Json]:
        """The result as an object."""
        return {
            "check": self.check,
            "status": self.status,
            "detail": self.detail,
            "line": self.line,
            "step": self.step,
            "rank": self.rank,
        }
