"""vLLM for one rank: weights come from outside, and it sleeps while nothing is generated."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, TypeVar

import torch
from torch import Tensor

from .messages import Ask, Gain, Piece, Settings, checksum

if TYPE_CHECKING:
    from vllm.v1.worker.gpu_worker import Worker

Result = TypeVar("Result")
MOST_TEMPERATURE = 2.0
"""That vLLM's interface takes."""


class VllmWorker:
    """An engine whose weights come from outside, and which sleeps while nothing is generated."""

    def __init__(self, settings: Settings) -> None:
        """Start vLLM with weights that mean nothing.

        Args:
            settings: Of the engine.
        """
        # All of it lives in this process, so that weights are handed over without a copy through another one.
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
        os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
        os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
        from vllm import EngineArgs
        from vllm.v1.engine.llm_engine import LLMEngine

        self._is_on_accelerator = torch.accelerator.is_available()
        arguments = EngineArgs(
            model=settings.model,
            revision=settings.revision,
            trust_remote_code=settings.trust_remote_code,
            dtype=settings.dtype,
            max_model_len=settings.max_tokens,
            max_num_seqs=settings.max_sequences,
            gpu_memory_utilization=settings.memory_fraction,
            kv_cache_memory_bytes=settings.kv_cache_bytes,
            enforce_eager=not settings.enable_graphs,
            distributed_executor_backend="external_launcher" if settings.is_one_of_many else None,
            enable_sleep_mode=self._is_on_accelerator,
            skip_tokenizer_init=True,
            load_format="dummy",
            generation_config="vllm",
            logprobs_mode="processed_logprobs",
            disable_log_stats=True,
        )
        self._engine = LLMEngine.from_engine_args(arguments)
        self._open: set[str] = set()
        self._arrived: set[str] | None = None
        self._cache_bytes: list[int] = []
        self._policy_version = -1
        self.sleep()

    def submit(self, asks: Iterable[Ask]) -> None:
        """Ask for responses.

        Args:
            asks: Each with an id of its own.
        """
        from vllm import SamplingParams, TokensPrompt
        from vllm.sampling_params import RequestOutputKind

        for ask in asks:
            params = SamplingParams(
                temperature=min(ask.temperature, MOST_TEMPERATURE),
                top_p=ask.top_p,
                top_k=ask.top_k,
                min_p=ask.min_p,
                seed=ask.seed,
                max_tokens=ask.max_tokens,
                stop_token_ids=list(ask.end_tokens),
                ignore_eos=True,  # the end tokens are given
                logprobs=0,
                detokenize=False,
                output_kind=RequestOutputKind.DELTA,
                skip_clone=True,  # a deep copy is checked again
            )
            # Those are the bounds of its interface, which refuses what is above and raises what is below.
            params.temperature = ask.temperature
            self._engine.add_request(str(ask.id), TokensPrompt(prompt_token_ids=list(ask.prompt)), params)
            self._open.add(str(ask.id))

    def step(self) -> list[Gain]:
        """Go on until some responses have got tokens; nothing when none is under way."""
        gains: list[Gain] = []
        while not gains and self._engine.has_unfinished_requests():
            for output in self._engine.step():
                part = output.outputs[0]
                tokens = list(part.token_ids)
                log_probs = [scores[token].logprob for token, scores in zip(tokens, part.logprobs or (), strict=True)]
                number = int(output.request_id)
                gains.append(Gain(number, tokens, log_probs, part.finish_reason, self._policy_version))
                if output.finished:
                    self._open.discard(output.request_id)
        return gains

    def abort(self, ids: Iterable[int]) -> None:
        """Give responses up.

        Args:
            ids: Of those that are not wanted any more.
        """
        names = [str(number) for number in ids]
        self._engine.abort_request(names)
        self._open.difference_update(names)

    def prompt_log_probs(self, tokens: Sequence[int]) -> list[float]:
        """What the model says of a text.

        Args:
            tokens: Token ids, at least two.

        Returns:
            The log-probability of each of them but the first.
        """
        from vllm import SamplingParams, TokensPrompt

        params = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0, detokenize=False)
        self._engine.add_request("probe", TokensPrompt(prompt_token_ids=list(tokens)), params)
        log_probs: list[float] = []
        while self._engine.has_unfinished_requests():
            for output in self._engine.step():
                if output.prompt_logprobs is not None:
                    scored = zip(tokens[1:], output.prompt_logprobs[1:], strict=True)
                    log_probs = [float(scores[token].logprob) for token, scores in scored]
        return log_probs

    def wake(self) -> None:
        """Take memory for weights and KV cache; the weights are those of before."""
        if self._is_on_accelerator:
            self._engine.wake_up()
        else:
            self._on_worker(_take_memory, self._cache_bytes)

    def load(self, pieces: Sequence[Piece], data: Tensor, expected: int) -> None:
        """Take some weights; the first call begins a new set of them.

        Args:
            pieces: What is where.
            data: [bytes] uint8, on this engine's device.
            expected: Their checksum.

        Raises:
            RuntimeError: What is here is not what was sent.
        """
        # vLLM keeps what it is given until a layer is complete, and the next bucket comes in the same memory.
        own = data.clone()
        found = checksum(own)
        if found != expected:
            raise RuntimeError(f"a bucket of {len(data)} bytes arrived damaged: checksum {found}, expected {expected}")
        if self._arrived is None:
            self._on_worker(_begin_loading)
            self._arrived = set()
        self._arrived |= self._on_worker(_load, [(piece.name, piece.view(own)) for piece in pieces])

    def finish_load(self, policy_version: int) -> None:
        """Use the weights that have been loaded, and nothing that was computed with those before.

        Args:
            policy_version: Of the weights.

        Raises:
            RuntimeError: Some weights have not come.
        """
        arrived, self._arrived = self._arrived or set(), None
        lacking = sorted(self._on_worker(_finish_loading) - arrived)
        if lacking:
            raise RuntimeError(f"{len(lacking)} of vLLM's weights have not been sent, as {lacking[0]}")
        self._engine.reset_prefix_cache()
        self._policy_version = policy_version

    def sleep(self) -> None:
        """Give up all responses that are under way, and give memory back."""
        self._engine.abort_request(list(self._open))
        self._open.clear()
        if self._is_on_accelerator:
            self._engine.sleep(level=1)
        else:
            self._engine.reset_prefix_cache()
            self._cache_bytes = self._on_worker(_give_memory)

    def close(self) -> None:
        """End the engine, and give all of its memory back."""
        self._engine.engine_core.shutdown()

    def _on_worker(self, function: Callable[..., Result], *arguments: object) -> Result:
        """Call a function with vLLM's worker, which holds the model."""
        result: Result = self._engine.collective_rpc(function, args=arguments)[0]
        return result


def _begin_loading(worker: Worker) -> None:
    """Weights are loaded layer by layer as at the start, with all that is made of them: packed, padded, transposed."""
    from vllm.config import set_current_vllm_config
    from vllm.model_executor.model_loader.reload import initialize_layerwise_reload

    with set_current_vllm_config(worker.vllm_config):
        initialize_layerwise_reload(worker.get_model())


def _load(worker: Worker, weights: Sequence[tuple[str, Tensor]]) -> set[str]:
    """The names of vLLM's weights that they went into."""
    from vllm.config import set_current_vllm_config

    with set_current_vllm_config(worker.vllm_config), torch.device(worker.device):
        return set(worker.get_model().load_weights(iter(weights)))


def _finish_loading(worker: Worker) -> set[str]:
    """The names of all of vLLM's weights."""
    from vllm.config import set_current_vllm_config
    from vllm.model_executor.model_loader.reload import finalize_layerwise_reload

    with set_current_vllm_config(worker.vllm_config), torch.device(worker.device):
        finalize_layerwise_reload(worker.get_model(), worker.model_config)
        for module in worker.get_model().modules():
            # On the CPU vLLM multiplies with a packed copy. That of an output head which shares its weight with the
            # embedding is of before: nothing is loaded by the head's own name.
            if hasattr(module, "cpu_linear") and module.weight.numel():
                module.quant_method.process_weights_after_loading(module)
    return {name for name, _ in worker.get_model().named_parameters()}


def _caches(worker: Worker) -> list[torch.UntypedStorage]:
    """The memory of the KV cache; layers may share some."""
    storages = [cache.untyped_storage() for cache in worker.model_runner.kv_caches]
    return list({storage._cdata: storage for storage in storages}.values())  # noqa: SLF001


def _give_memory(worker: Worker) -> list[int]:
    """Where vLLM itself has no sleep: give the KV cache's memory back, and keep the tensors. Says how much it was."""
    sizes = [storage.nbytes() for storage in _caches(worker)]
    for storage in _caches(worker):
        storage.resize_(0)
    return sizes


def _take_memory(worker: Worker, sizes: Sequence[int]) -> None:
    for storage, size in zip(_caches(worker), sizes, strict=True):
        storage.resize_(size)
    for cache in worker.model_runner.kv_caches:
        cache.zero_()  # as vLLM has it at the start: what is not attended to must still be a number
