"""Why a worker failed, written where the launcher finds it: a person shall read the first cause, not its echoes."""

from __future__ import annotations

import json
import os
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from leaderless.config import RecipeError

FOLDER_VARIABLE = "LEADERLESS_FAILURES"
"""Where the launcher wants each rank to write its failure; without it a worker prints it."""


@dataclass(frozen=True)
class Failure:
    """How one rank failed.

    Attributes:
        rank: That failed.
        time_ns: When; when one rank fails the others lose it and fail soon after.
        is_recipe: The user has to correct the recipe; there is no bug to trace.
        message: For people.
        trace: The traceback.
    """

    rank: int
    time_ns: int
    is_recipe: bool
    message: str
    trace: str


@contextmanager
def reported_failures(rank: int) -> Iterator[None]:
    """Write down an error that ends the worker, for the launcher, and let it go on.

    Args:
        rank: Of this worker.
    """
    try:
        yield
    except BaseException as error:
        folder = os.environ.get(FOLDER_VARIABLE)
        if folder is not None and not isinstance(error, SystemExit):
            failure = Failure(
                rank=rank,
                time_ns=time.time_ns(),
                is_recipe=isinstance(error, RecipeError),
                message=str(error),
                trace="".join(traceback.format_exception(error)),
            )
            (Path(folder) / f"rank-{rank}.json").write_text(json.dumps(asdict(failure)), encoding="utf-8")
        raise


def first_failure(folder: Path) -> Failure | None:
    """The failure that came before all others; None when no rank could write one.

    Args:
        folder: That the ranks wrote into.
    """
    failures = [Failure(**json.loads(file.read_text(encoding="utf-8"))) for file in folder.glob("rank-*.json")]
    return min(failures, key=lambda failure: failure.time_ns, default=None)
