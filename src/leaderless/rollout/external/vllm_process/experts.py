"""Choices of experts, as vLLM records them: on accelerators by itself, and on the CPU with help.

vLLM keeps the choices of each block of tokens next to its keys and values, so that it knows them for tokens that it
does not read again. Its newer model runner, which needs Triton, takes them from the routers after each step. The model
runner of the CPU is the older one, which does not; `record_on_cpu` adds that. The choices then go the same way.
"""

from __future__ import annotations

import base64
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from vllm.distributed.aux_output_connector.worker import AuxOutputWorkerConnector
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.engine.llm_engine import LLMEngine
    from vllm.v1.outputs import ModelRunnerOutput
    from vllm.v1.worker.gpu_worker import Worker

Rows = np.ndarray[Any, np.dtype[np.integer[Any]]]
"""[tokens, layers, k] experts of all layers; numbers of layers without experts mean nothing."""


def packed(rows: Rows, layers: Sequence[int]) -> list[str]:
    """Write the experts of each token as bytes in base64, `k` for each of some layers."""
    chosen = np.ascontiguousarray(rows[:, list(layers)].astype(np.uint8))
    return [base64.b64encode(row.tobytes()).decode() for row in chosen]


@contextmanager
def recorded_by_each_rank() -> Iterator[None]:
    """Have each rank of an engine keep choices of experts, for engines that are made in this context.

    vLLM has only the first rank of an engine keep them, whose outputs alone it expects to be used. Here each rank
    drives its own part of the model, and is given its own outputs.
    """
    from vllm.distributed.aux_output_connector import worker

    before, worker.get_tp_group = worker.get_tp_group, _FirstRank
    try:
        yield
    finally:
        worker.get_tp_group = before


class _FirstRank:
    """Answers to vLLM's questions about its process group, as on the first rank."""

    is_first_rank = True


def record_on_cpu(worker: Worker, engine: LLMEngine) -> None:
    """Have the model runner of the CPU record choices of experts, and the scheduler of its engine pass them on.

    Raises:
        RuntimeError: It is not the runner that this is for.
    """
    from vllm.distributed.aux_output_connector.connector import AuxOutputSchedulerConnector
    from vllm.distributed.aux_output_connector.worker import get_aux_output_connector

    if worker.use_v2_model_runner:
        raise RuntimeError(
            "vLLM uses its newer model runner on the CPU, for which choices of experts are not recorded: set "
            "VLLM_USE_V2_MODEL_RUNNER=0, or leave out algorithm.replay_experts"
        )
    runner: Any = worker.model_runner
    scheduler: Any = engine.engine_core.engine_core.scheduler
    connector = get_aux_output_connector(worker.get_model(), worker.vllm_config, runner.kv_cache_config)
    _Recorder(runner, connector)
    scheduler.aux_output_connector = AuxOutputSchedulerConnector()


@dataclass(frozen=True)
class _Batch:
    """Description of a step for vLLM: its requests, where their tokens begin, and how many each had before."""

    req_ids: Sequence[str]
    query_start_loc_np: Rows
    num_computed_tokens_np: Rows


class _Recorder:
    """Takes the place of the two halves of a model runner's step, and of its end."""

    def __init__(self, runner: Any, connector: AuxOutputWorkerConnector) -> None:  # noqa: ANN401
        self._runner, self._connector = runner, connector
        self._execute, self._sample, self._shutdown = runner.execute_model, runner.sample_tokens, runner.shutdown
        runner.execute_model, runner.sample_tokens = self.execute_model, self.sample_tokens
        runner.shutdown = self.shutdown
        self._batch: _Batch | None = None

    def execute_model(self, scheduled: SchedulerOutput, *more: object) -> object:
        """Compute a step up to its logits; None says that tokens are to be sampled from them."""
        self._connector.begin_step(scheduled.aux_output_connector_metadata)
        result = self._execute(scheduled, *more)
        if result is None:
            batch = self._runner.input_batch
            names = list(batch.req_ids)
            ends = np.cumsum([0, *(scheduled.num_scheduled_tokens[name] for name in names)])
            self._batch = _Batch(names, ends, batch.num_computed_tokens_cpu[: len(names)].copy())
        return result

    def sample_tokens(self, *more: object) -> ModelRunnerOutput:
        """Sample the tokens of a step, whose outputs get the choices of experts."""
        batch, self._batch = self._batch, None
        pending = None if batch is None else self._connector.prepare_output(batch)
        output: ModelRunnerOutput = self._sample(*more)
        if batch is not None and pending is not None:
            tokens = [output.sampled_token_ids[output.req_id_to_index[name]] for name in batch.req_ids]
            pending.enqueue_cpu_copy(np.array([len(some) for some in tokens]), np.zeros(len(tokens), dtype=np.int64))
            output.aux_output_connector_output = pending.process_output()
        return output

    def shutdown(self) -> None:
        """Release the choices of experts, with the thread that keeps them, and all else that the runner has."""
        self._connector.close()
        self._shutdown()
