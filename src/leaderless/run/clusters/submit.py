"""Hands a job's file to the client of its scheduler."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from leaderless.config import RecipeError


@dataclass(frozen=True)
class Client:
    """A scheduler's client.

    Attributes:
        program: Name of the program.
        arguments: Arguments before the file.
        remedy: Way to get the program.
    """

    program: str
    arguments: Sequence[str]
    remedy: str

    def command(self, file: Path) -> list[str]:
        """The command that submits a job."""
        return [self.program, *self.arguments, str(file)]


CLIENTS = {
    "slurm": Client("sbatch", (), "run this command on a login node of the cluster, which has Slurm's programs"),
    "kubernetes": Client(
        "kubectl", ("create", "-f"), "install kubectl, and choose a context: kubectl config get-contexts"
    ),
    "ray": Client("ray", (), "pip install 'leaderless[ray]'"),
    "skypilot": Client("sky", ("jobs", "launch", "--yes"), "pip install skypilot, with the extra of your cloud"),
}
"""Clients by the name of the scheduler."""


def submission(target: str, file: Path) -> list[str]:
    """The command that submits a job's file."""
    return ["bash", str(file)] if target == "ray" else CLIENTS[target].command(file)


def check_client(target: str) -> None:
    """Refuse to submit without the scheduler's client.

    Raises:
        RecipeError: It is not installed.
    """
    client = CLIENTS[target]
    if shutil.which(client.program) is None:
        raise RecipeError.at(
            "", f"--to {target} --go needs the program {client.program}, which is not on the path: {client.remedy}"
        )


def submit(target: str, file: Path) -> int:
    """Submit a job, with the output of the client on the terminal; return the client's exit code."""
    return subprocess.run(submission(target, file), check=False).returncode  # noqa: S603 - what the user asked for
