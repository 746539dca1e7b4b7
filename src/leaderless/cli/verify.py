"""`leaderless verify`: checks a run by its proof."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.markup import escape
from rich.table import Column, Table

from leaderless.cli.options import JsonOption, RunArgument, check_run
from leaderless.observability.console import console, print_json, print_line
from leaderless.observability.proof_log import KEY_FILE_VARIABLE, KEY_VARIABLE, proof_key

if TYPE_CHECKING:
    from leaderless.run.verify.findings import ProofFinding

WIDE = 200
"""Width of the table where output does not go to a terminal."""
_COLORS = {"holds": "green", "fails": "red", "not checked": "yellow"}


def verify(
    run: RunArgument,
    step: Annotated[
        int | None, typer.Option(min=1, help="Step whose metrics, samples and checkpoint are checked; all by default.")
    ] = None,
    rows: Annotated[
        int, typer.Option(min=0, help="Samples whose rewards, advantages and log-probs are computed again.")
    ] = 16,
    key_file: Annotated[
        Path | None,
        typer.Option(
            help=f"File with the key that signed the lines; by default ${KEY_FILE_VARIABLE} or ${KEY_VARIABLE}."
        ),
    ] = None,
    head: Annotated[
        str | None, typer.Option(help="Hash of the last line, as it was kept elsewhere; compared with the proof's.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Check a run by its proof: the chain of its steps, recipe, plan, metrics, checkpoints and samples.

    Ends with exit code 1 if something does not hold.
    """
    from leaderless.run.verify.verification import VerifyOptions, verify_run  # imports torch

    check_run(run)
    findings = verify_run(run, VerifyOptions(step, rows, proof_key(key_file), head))
    if as_json:
        print_json([one.to_json() for one in findings])
    else:
        _print(findings)
    if any(one.status == "fails" for one in findings):
        raise typer.Exit(1)


def _print(findings: Sequence[ProofFinding]) -> None:
    table = Table("check", "result", Column("place", overflow="fold"), Column("detail", overflow="fold"), box=None)
    for one in findings:
        table.add_row(one.check, f"[{_COLORS[one.status]}]{one.status}[/]", one.place, escape(one.detail))
    console.print(table, width=None if console.is_terminal else WIDE)
    wrong = [one for one in findings if one.status == "fails"]
    left = sum(one.status == "not checked" for one in findings)
    if wrong:
        first = min(wrong, key=lambda one: (one.line is None, one.line or 0))
        print_line(f"\nthe run does not hold: {first.check}, {first.place or 'no single line'}: {first.detail}")
    else:
        rest = f"; {left} checks could not be made" if left else ""
        print_line(f"\nthe run holds{rest}")
