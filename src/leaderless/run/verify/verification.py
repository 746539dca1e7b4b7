"""Checks a run by its proof, in the order in which one check builds on another."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from leaderless.config import RecipeError
from leaderless.observability.run_directory import RunDirectory
from leaderless.run.verify.findings import ProofFinding
from leaderless.run.verify.folder_checks import check_checkpoints, check_metrics, check_source, check_texts
from leaderless.run.verify.proof_lines import ProofLine, check_chain, read_proof
from leaderless.run.verify.recomputed import recompute
from leaderless.run.verify.sample_checks import check_samples


@dataclass(frozen=True)
class VerifyOptions:
    """Choices of whoever checks a run.

    Attributes:
        step: Step whose files are checked; all steps if None. The chain is always checked as a whole.
        num_rows: Number of samples whose rewards, advantages and log-probs are computed again.
        key: Key that has signed the lines; None if it is not at hand.
        head: Hash of the last line as it is known from elsewhere; None if it is not.
    """

    step: int | None = None
    num_rows: int = 16
    key: bytes | None = None
    head: str | None = None


def verify_run(folder: Path, options: VerifyOptions) -> list[ProofFinding]:
    """Check a run by its proof; the findings come in the order of the checks.

    Raises:
        RecipeError: The run has no proof, or not the step that is asked for.
    """
    directory = RunDirectory(folder)
    if not directory.proof.exists():
        raise RecipeError.at(
            "",
            f"{folder} has no {directory.proof.name}: the run was made by an earlier version, or has not finished a "
            "step. Train it, or continue it, with this version",
        )
    lines, unreadable = read_proof(directory)
    if not lines and not unreadable:
        raise RecipeError.at("", f"{directory.proof} holds no line: the run has not finished a step")
    steps = {line.step for line in lines}
    if options.step is not None and options.step not in steps and not unreadable:
        raise RecipeError.at("--step", f"is {options.step}, but the proof has steps {min(steps)} to {max(steps)}")
    return list(_findings(directory, options, lines, unreadable))


def _findings(
    directory: RunDirectory, options: VerifyOptions, lines: Sequence[ProofLine], unreadable: Sequence[ProofFinding]
) -> Iterator[ProofFinding]:
    yield from unreadable
    if not lines:
        return
    chain, signatures = check_chain(lines, options.key, None if unreadable else options.head)
    if chain.status == "fails" or not unreadable:
        yield chain
    yield signatures
    yield from check_texts(directory, lines)
    yield check_source(lines)
    yield from check_metrics(directory, lines, options.step)
    yield from check_checkpoints(directory, lines, options.step)
    found, samples = check_samples(directory, lines, options.step)
    yield from found
    yield from recompute(directory, lines, samples, options.num_rows, lines[-1].text("hash"))
