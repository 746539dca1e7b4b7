"""vLLM over several ranks: where its processes meet, and what it lacks where they are stages of a pipeline."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from leaderless.distributed.remote.messages import Settings

if TYPE_CHECKING:
    from vllm import SamplingParams
    from vllm.v1.worker.gpu_worker import Worker

LAUNCHER = "external_launcher"
"""vLLM's name for an engine of which each process drives its own part.

As all are given the same requests in the same order, they schedule the same work. In a process group that exists
already, blocks of neighboring ranks make one engine.
"""
SHARED_MEMORY = Path("/dev/shm")  # noqa: S108
"""Folder in which parts of an engine on the CPU share memory, whose files vLLM does not remove."""
FILE = "file://"
"""Begin of a meeting that is a file."""


@contextmanager
def met_as_told(settings: Settings) -> Iterator[None]:
    """Have an engine that is made in this context find its parts where the settings say.

    vLLM would take place and rank from the variables of torchrun, and name shared memory of all engines of a machine
    alike.
    """
    from vllm.v1.executor.uniproc_executor import ExecutorWithExternalLauncher as Launcher

    def place(_: Launcher) -> tuple[str, int, int]:
        assert settings.meeting is not None, "it is one of several"
        return settings.meeting, settings.rank, settings.device_index

    before, Launcher._distributed_args = Launcher._distributed_args, place  # noqa: SLF001
    try:
        yield
    finally:
        Launcher._distributed_args = before  # noqa: SLF001


def forget_meeting(settings: Settings) -> None:
    """Remove the file in which parts of an engine met, and the shared memory that vLLM named after it."""
    if settings.meeting is not None:
        if settings.meeting.startswith(FILE):
            Path(settings.meeting.removeprefix(FILE)).unlink(missing_ok=True)
        for left in SHARED_MEMORY.glob(f"{_identity(settings.meeting)}-*"):
            left.unlink(missing_ok=True)


def _identity(meeting: str) -> str:
    """Begin of the names of shared memory on the CPU: vLLM takes what follows the last slash of a file, or the port."""
    return meeting.rpartition("/")[2].rpartition(":")[2]


def make_room(worker: Worker) -> None:
    """Allocate the memory into which a stage of a pipeline receives activations, which vLLM forgets on the CPU."""
    runner = worker.model_runner
    if runner.intermediate_tensors is None:
        runner.intermediate_tensors = runner.model.make_empty_intermediate_tensors(
            batch_size=runner.max_num_tokens, dtype=runner.model_config.dtype, device=runner.device
        )


def next_token_params(token: int) -> SamplingParams:
    """Parameters of a request for one token that is told the log-probability of another one at its place.

    The log-probabilities of a prompt are known to the last stage alone, and vLLM fails where others ask for them.
    """
    from vllm import SamplingParams

    return SamplingParams(temperature=1.0, max_tokens=1, logprob_token_ids=[token], detokenize=False)
