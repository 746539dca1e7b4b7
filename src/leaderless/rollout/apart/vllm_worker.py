"""vLLM for one rank."""

from __future__ import annotations

import base64
import io
import os
import re
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, TypeVar, get_args

import torch
from torch import Tensor

from .adapters import AdapterFolder
from .messages import Ask, Gain, PackedWeight, Settings, checksum

if TYPE_CHECKING:
    from PIL.Image import Image as Picture
    from vllm.lora.request import LoRARequest
    from vllm.v1.engine.llm_engine import LLMEngine
    from vllm.v1.executor import Executor
    from vllm.v1.worker.gpu_worker import Worker

Result = TypeVar("Result")
MOST_TEMPERATURE = 2.0
"""Highest temperature that vLLM's interface takes."""
IMPOSSIBLE = -100.0
"""What is added to the logit of a token that is never drawn: the lowest that the interface takes."""
OLDEST_VERSION = (0, 32)
"""First version of vLLM that has everything used here, some of it private."""


class VllmWorker:
    """An engine that gets its weights from the rank, and sleeps while nothing is generated."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self._open: set[str] = set()
        self._expected: dict[str, int] = {}  # lengths of prompts with images that have not been compared
        self._arrived: set[str] | None = None
        self._cache_bytes: list[int] = []
        self._policy_version = -1
        self._adapters = None if settings.adapters is None else AdapterFolder(settings.adapters, settings.matrices)
        self._lora_request: LoRARequest | None = None
        self._is_on_accelerator = torch.accelerator.is_available()
        self._llm: LLMEngine | None = None

    @property
    def _engine(self) -> LLMEngine:
        assert self._llm is not None, "it has been started"
        return self._llm

    def start(self) -> None:
        """Start vLLM, asleep, with meaningless weights."""
        settings = self.settings
        if self._is_on_accelerator:
            # Each response has a seed. The first model runner loops over seeds on the host, in each step.
            os.environ.setdefault("VLLM_USE_V2_MODEL_RUNNER", "1")
        # Everything runs in this process, so that weights need no copy through another one.
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
        os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
        os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
        check_version()
        from vllm import EngineArgs
        from vllm.v1.engine.llm_engine import LLMEngine

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
            tensor_parallel_size=settings.tensor_parallel_size,
            distributed_executor_backend=_executor(settings) if settings.meeting else None,
            enable_sleep_mode=self._is_on_accelerator,
            skip_tokenizer_init=not settings.sees_images,  # its image processors come with a tokenizer
            generation_config="vllm",
            logprobs_mode="processed_logprobs",
            disable_log_stats=True,
            **_weights_of(settings),
            **({"limit_mm_per_prompt": {"video": 0}} if settings.sees_images else {}),
        )
        self._llm = LLMEngine.from_engine_args(arguments)
        self.sleep(keep_weights=False)

    def submit(self, asks: Iterable[Ask]) -> None:
        """See `Driver`."""
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
                ignore_eos=True,  # end tokens are given above
                logprobs=0,
                detokenize=False,
                output_kind=RequestOutputKind.DELTA,
                skip_clone=True,  # a deep copy would be validated again
                logit_bias=dict.fromkeys(ask.impossible, IMPOSSIBLE) or None,
            )
            # The interface refuses higher temperatures and raises very low ones.
            params.temperature = ask.temperature
            prompt = TokensPrompt(prompt_token_ids=list(ask.prompt))
            if ask.images:
                prompt["multi_modal_data"] = {"image": [_decoded(image) for image in ask.images]}
                self._expected[str(ask.id)] = ask.num_tokens
            self._engine.add_request(str(ask.id), prompt, params, lora_request=self._lora_request)
            self._open.add(str(ask.id))

    def step(self) -> list[Gain]:
        """See `Driver`."""
        gains: list[Gain] = []
        while not gains and self._engine.has_unfinished_requests():
            for output in self._engine.step():
                self._check_length(output.request_id, output.prompt_token_ids)
                part = output.outputs[0]
                tokens = list(part.token_ids)
                log_probs = [scores[token].logprob for token, scores in zip(tokens, part.logprobs or (), strict=True)]
                number, cached = int(output.request_id), output.num_cached_tokens or 0
                gains.append(Gain(number, tokens, log_probs, part.finish_reason, self._policy_version, cached))
                if output.finished:
                    self._open.discard(output.request_id)
        return gains

    def _check_length(self, name: str, tokens: Sequence[int] | None) -> None:
        """Compare the length of a prompt with images with what training makes of it, once."""
        expected = self._expected.pop(name, None)
        if expected is not None and tokens is not None and len(tokens) != expected:
            raise RuntimeError(
                f"vLLM reads a prompt with images as {len(tokens)} tokens, and training as {expected}: its image "
                "processor has other settings"
            )

    def abort(self, ids: Iterable[int]) -> None:
        """See `Driver`."""
        names = [str(number) for number in ids]
        self._engine.abort_request(names)
        self._open.difference_update(names)

    def _abort_all(self) -> None:
        self._engine.abort_request(list(self._open))
        self._open.clear()
        self._expected.clear()

    def prompt_log_probs(self, tokens: Sequence[int]) -> list[float]:
        """See `Driver`."""
        from vllm import SamplingParams, TokensPrompt

        params = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0, detokenize=False)
        prompt = TokensPrompt(prompt_token_ids=list(tokens))
        self._engine.add_request("probe", prompt, params, lora_request=self._lora_request)
        log_probs: list[float] = []
        while self._engine.has_unfinished_requests():
            for output in self._engine.step():
                if output.prompt_logprobs is not None:
                    scored = zip(tokens[1:], output.prompt_logprobs[1:], strict=True)
                    log_probs = [float(scores[token].logprob) for token, scores in scored]
        return log_probs

    def wake(self) -> None:
        """See `Driver`."""
        if self._is_on_accelerator:
            self._engine.wake_up()
        else:
            self._on_worker(_take_memory, self._cache_bytes)

    def load_bucket(self, weights: Sequence[PackedWeight], data: Tensor, expected: int | None = None) -> None:
        """Load weights from [bytes] uint8 on this engine's device; the first call begins a new set.

        Args:
            weights: Weights in the bucket.
            data: Bytes of the bucket.
            expected: Checksum of these bytes, if they come from another process; else None.
        """
        # vLLM keeps references until a layer is complete, and the next bucket overwrites this memory.
        own = data.clone()
        if expected is not None and (found := checksum(own)) != expected:
            raise RuntimeError(f"a bucket of {len(data)} bytes arrived damaged: checksum {found}, expected {expected}")
        if self._adapters is not None:
            for weight in weights:
                self._adapters.add(weight.name, weight.view(own))
            return
        arrived = self._on_worker(_load, [(weight.name, weight.view(own)) for weight in weights], self._arrived is None)
        self._arrived = arrived | (self._arrived or set())

    def finish_load(self, policy_version: int) -> None:
        """Use the weights that have been loaded, and drop all that is in progress or computed with earlier ones."""
        self._abort_all()
        if self._adapters is None:
            arrived, self._arrived = self._arrived or set(), None
            lacking = sorted(self._on_worker(_finish_loading) - arrived)
            if lacking:
                raise RuntimeError(f"{len(lacking)} of vLLM's weights have not been sent, such as {lacking[0]}")
        else:
            with self._adapters.written() as folder:
                self._use_adapters(folder, policy_version)
        if not self._engine.reset_prefix_cache():
            raise RuntimeError("vLLM still uses keys and values of earlier weights, though nothing is in progress")
        if self.settings.sees_images:
            self._engine.reset_encoder_cache()  # it keeps what earlier weights have seen of images
        self._policy_version = policy_version

    def _use_adapters(self, folder: str, policy_version: int) -> None:
        """Load adapters in place of those before.

        Their number is new and their folder is soon gone, so that a request cannot get any others.
        """
        from vllm.lora.request import LoRARequest

        number = 1
        if (before := self._lora_request) is not None:
            number = before.lora_int_id + 1
            self._engine.remove_lora(before.lora_int_id)
        request = LoRARequest(f"policy-{policy_version}", number, folder)
        if not self._engine.add_lora(request) or set(self._engine.list_loras()) != {number}:
            raise RuntimeError(f"vLLM has not loaded the adapters of policy version {policy_version}")
        self._lora_request = request

    def sleep(self, *, keep_weights: bool) -> None:
        """See `Driver`. An accelerator copies weights that are kept to host memory, as those to which adapters belong.

        They would have to be read again.
        """
        self._abort_all()
        if self._is_on_accelerator:
            self._engine.sleep(level=1 if keep_weights or self._adapters is not None else 2)
        else:
            self._engine.reset_prefix_cache()
            self._cache_bytes = self._on_worker(_give_memory)

    def close(self) -> None:
        """Stop the engine and release all of its memory."""
        if self._llm is not None:
            self._llm.engine_core.shutdown()
            self._llm = None

    def _on_worker(self, function: Callable[..., Result], *arguments: object) -> Result:
        """Call a function with vLLM's worker, which owns the model."""
        result: Result = self._engine.collective_rpc(function, args=arguments)[0]
        return result


def _weights_of(settings: Settings) -> dict[str, object]:
    """Arguments of vLLM for the origin of its weights: the rank, or the model's folder if adapters come."""
    if settings.adapters is None:
        return {"load_format": "dummy"}
    from vllm.config.lora import MaxLoRARanks

    rank, known = settings.adapters["r"], get_args(MaxLoRARanks)
    if not (able := [one for one in known if one >= rank]):
        raise RuntimeError(
            f"vLLM takes adapters of rank {max(known)} at most, and these have {rank}: lower models.ROLE.lora.rank, or "
            "set rollout.external.merge_adapters"
        )
    return {"enable_lora": True, "max_loras": 1, "max_cpu_loras": 1, "max_lora_rank": min(able)}


def _decoded(text: str) -> Picture:
    from PIL import Image

    return Image.open(io.BytesIO(base64.b64decode(text)))


def check_version() -> None:
    """Refuse a version of vLLM that lacks something used here, before the engine starts."""
    import vllm

    remedy = (
        "install a version that is known to work into a separate environment, and name its interpreter in "
        "rollout.external.python"
    )
    number = re.match(r"(\d+)\.(\d+)", vllm.__version__)
    oldest = ".".join(map(str, OLDEST_VERSION))
    if number and (int(number[1]), int(number[2])) < OLDEST_VERSION:
        raise RuntimeError(f"vLLM {vllm.__version__} is older than {oldest}, the oldest supported version: {remedy}")
    try:
        from vllm.model_executor.model_loader.reload import (  # noqa: F401
            finalize_layerwise_reload,
            initialize_layerwise_reload,
        )
    except ImportError as error:
        raise RuntimeError(
            f"vLLM {vllm.__version__} cannot load weights the way vLLM {oldest} does ({error}): {remedy}"
        ) from error


def _executor(settings: Settings) -> type[Executor]:
    """Make the class of vLLM's executor for an engine that is one of several, or a part of one.

    Each process drives its own part of the model: as all are given the same requests in the same order, they schedule
    the same work. In a process group that exists already, blocks of neighboring ranks make one engine.
    """
    from vllm.v1.executor.uniproc_executor import ExecutorWithExternalLauncher

    def place(executor: Executor) -> tuple[str, int, int]:  # noqa: ARG001
        # vLLM would take these from the variables of torchrun. Its shared memory is named after the meeting.
        return f"file://{settings.meeting}", settings.rank, settings.device_index

    return type("Member", (ExecutorWithExternalLauncher,), {"_distributed_args": place})


def _load(worker: Worker, weights: Sequence[tuple[str, Tensor]], is_first: bool) -> set[str]:
    """Load weights layer by layer, packed and transposed as at the start; name vLLM's weights that they went into."""
    from vllm.config import set_current_vllm_config
    from vllm.model_executor.model_loader.reload import initialize_layerwise_reload

    with set_current_vllm_config(worker.vllm_config):
        if is_first:
            _forget_packed_experts(worker)
            initialize_layerwise_reload(worker.get_model())
        with torch.device(worker.device):
            return set(worker.get_model().load_weights(iter(weights)))


def _forget_packed_experts(worker: Worker) -> None:
    """Let vLLM pack experts anew on the CPU, where it computes with packed ones.

    It packs them when it makes the kernel of a layer, and when it has one it takes weights for packed that are not.
    """
    if worker.device.type == "cpu":
        for module in worker.get_model().modules():
            method = getattr(module, "quant_method", None)
            if method is not None and hasattr(method, "moe_kernel"):
                method.moe_kernel = None


def _finish_loading(worker: Worker) -> set[str]:
    """Finish loading, and name all weights of vLLM."""
    from vllm.config import set_current_vllm_config
    from vllm.model_executor.model_loader.reload import finalize_layerwise_reload

    with set_current_vllm_config(worker.vllm_config), torch.device(worker.device):
        finalize_layerwise_reload(worker.get_model(), worker.model_config)
        for module in worker.get_model().modules():
            # On the CPU vLLM multiplies with packed copies. The copy of an output head that shares its weight with the
            # embedding is still the old one: nothing is loaded under the head's own name.
            if hasattr(module, "cpu_linear") and module.weight.numel():
                module.quant_method.process_weights_after_loading(module)
    return {name for name, _ in worker.get_model().named_parameters()}


def _caches(worker: Worker) -> list[torch.UntypedStorage]:
    """List the memory of the KV cache; layers may share some."""
    storages = [cache.untyped_storage() for cache in worker.model_runner.kv_caches]
    return list({storage._cdata: storage for storage in storages}.values())  # noqa: SLF001


def _give_memory(worker: Worker) -> list[int]:
    """Release the memory of the KV cache where vLLM cannot sleep, but keep the tensors; return the sizes."""
    sizes = [storage.nbytes() for storage in _caches(worker)]
    for storage in _caches(worker):
        storage.resize_(0)
    return sizes


def _take_memory(worker: Worker, sizes: Sequence[int]) -> None:
    for storage, size in zip(_caches(worker), sizes, strict=True):
        storage.resize_(size)
    for cache in worker.model_runner.kv_caches:
        cache.zero_()  # as at the start: values that are masked must still be numbers
