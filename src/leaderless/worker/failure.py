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
from leaderless.observability.run_directory import write_atomically

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
    """Write down an error that ends the worker, for the launcher to show; without a launcher, let it go on.

    Args:
        rank: Of this worker.

    Raises:
        SystemExit: The error has been written down.
    """
    try:
        yield
    except BaseException as error:
        folder = os.environ.get(FOLDER_VARIABLE)
        if folder is not None and not isinstance(error, SystemExit):
            is_recipe = isinstance(error, RecipeError)
            failure = Failure(
                rank=rank,
                time_ns=time.time_ns(),
                is_recipe=is_recipe,
                message=str(error) if is_recipe else f"{type(error).__name__}: {error}",
                trace="".join(traceback.format_exception(error)),
            )
            write_atomically(Path(folder) / f"rank-{rank}.json", json.dumps(asdict(failure)))
            raise SystemExit(2 if is_recipe else 1) from None
        raise


def first_failure(folder: Path) -> Failure | None:
    """The failure that came before all others; None when no rank could write one.

    Args:
        folder: That the ranks wrote into.
    """
    failures = [Failure(**json.loads(file.read_text(encoding="utf-8"))) for file in folder.glob("rank-*.json")]
    return min(failures, key=lambda failure: failure.time_ns, default=None)
