"""vLLM for one rank."""

from __future__ import annotations

import base64
import io
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar, cast, get_args

import numpy as np
import torch
from torch import Tensor

from leaderless.distributed.remote.messages import Ask, Gain, Settings, joined
from leaderless.distributed.weights.buckets import PackedWeight, checksums
from leaderless.rollout.external.vllm_process.adapters import VllmAdapters
from leaderless.rollout.external.vllm_process.drafts import sample_drafts_on_cpu
from leaderless.rollout.external.vllm_process.experts import packed, record_on_cpu, recorded_by_each_rank
from leaderless.rollout.external.vllm_process.int8 import with_int8
from leaderless.rollout.external.vllm_process.loading import Loading, finish, load
from leaderless.rollout.external.vllm_process.stages import LAUNCHER, make_room, met_as_told, next_token_params

if TYPE_CHECKING:
    from PIL.Image import Image as Picture
    from vllm import SamplingParams
    from vllm.logprobs import FlatLogprobs
    from vllm.outputs import RequestOutput
    from vllm.v1.engine.llm_engine import LLMEngine
    from vllm.v1.worker.gpu_worker import Worker

Result = TypeVar("Result")
MOST_TEMPERATURE = 2.0
"""Highest temperature that vLLM's interface takes."""
IMPOSSIBLE = -100.0
"""Bias of the logit of a token that is never drawn: the lowest that the interface takes."""
OLDEST_VERSION = (0, 32)
"""First version of vLLM that has everything used here, some of it private."""
PROBE = "probe"
"""vLLM's name for the request for the log-probabilities of a text."""


def scores_for(top_k: int) -> int:
    """Number of tokens to ask for so that all are among them that `top_k` keeps, and those as likely as its last."""
    return 2 * top_k + 32


class _Open(NamedTuple):
    """A response in progress: vLLM's own name for it, its adapters, and how its tokens are reported; see `Ask`."""

    name: str
    adapter: str
    tokens_at_once: int = 1
    records_support: bool = False


class VllmWorker:
    """An engine that gets its weights from the rank, and sleeps while nothing is generated."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self._open: dict[str, _Open] = {}
        self._expected: dict[str, int] = {}  # lengths of prompts with images that have not been compared
        self._loading = Loading()
        self._cache_bytes: list[int] = []
        self._loaded: list[tuple[str, Tensor]] = []  # names of each bucket of another process, and its checksum
        self._versions: dict[str, int] = {}  # of each set of adapters, or of the weights
        self._adapters = VllmAdapters(settings.adapters, settings.matrices)
        self._ready: list[Gain] = []
        self._is_on_accelerator = torch.accelerator.is_available()
        self._llm: LLMEngine | None = None

    @property
    def _engine(self) -> LLMEngine:
        assert self._llm is not None, "it has been started"
        return self._llm

    def start(self) -> None:
        """Start vLLM, asleep, with meaningless weights."""
        settings = self.settings
        if self._is_on_accelerator and settings.num_stages == 1:
            # Each response has a seed. The first model runner loops over seeds on the host, in each step; but it alone
            # tells all stages of a pipeline what the last one has sampled.
            os.environ.setdefault("VLLM_USE_V2_MODEL_RUNNER", "1")
        # Everything runs in this process, so that weights need no copy through another one.
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
        os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
        os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
        check_version()
        from vllm import EngineArgs
        from vllm.distributed.parallel_state import destroy_model_parallel
        from vllm.v1.engine.llm_engine import LLMEngine

        # An engine that was closed in this process leaves its groups behind, and vLLM would use them for this one, too:
        # another `tp` would be refused, and experts would have no group of their own after a model without experts.
        destroy_model_parallel()
        arguments = EngineArgs(
            model=settings.model,
            revision=settings.revision,
            trust_remote_code=settings.trust_remote_code,
            dtype=settings.dtype,
            max_model_len=settings.max_tokens,
            max_num_seqs=settings.max_sequences,
            gpu_memory_utilization=settings.memory_fraction,
            kv_cache_memory_bytes=None if self._is_on_accelerator else settings.kv_cache_bytes,
            enforce_eager=not (settings.enable_graphs and self._is_on_accelerator),
            tensor_parallel_size=settings.tensor_parallel_size,
            pipeline_parallel_size=settings.num_stages,
            enable_expert_parallel=settings.divides_experts,
            distributed_executor_backend=LAUNCHER if settings.meeting else None,
            enable_sleep_mode=self._is_on_accelerator,
            skip_tokenizer_init=not settings.sees_images,  # its image processors come with a tokenizer
            generation_config="vllm",
            logprobs_mode="processed_logprobs",
            max_logprobs=scores_for(settings.most_support),
            disable_log_stats=True,
            enable_return_routed_experts=bool(settings.expert_layers) and self._is_on_accelerator,
            **_weights_of(settings),
            **({"limit_mm_per_prompt": {"video": 0}} if settings.sees_images else {}),
            **({"per_request_spec_decode_metrics": "summary"} if settings.num_drafts else {}),
            **cast("Mapping[str, Any]", with_int8(settings.arguments)),
        )
        meets = met_as_told(settings) if settings.meeting else nullcontext()
        if settings.num_drafts and not self._is_on_accelerator:
            sample_drafts_on_cpu()
        with recorded_by_each_rank() if settings.expert_layers else nullcontext(), meets:
            self._llm = LLMEngine.from_engine_args(arguments)
            if settings.num_stages > 1:
                self._on_worker(make_room)
            if settings.expert_layers and not self._is_on_accelerator:
                self._on_worker(record_on_cpu, self._llm)
        self.sleep(keep_weights=False)

    def submit(self, asks: Iterable[Ask]) -> None:
        """Give vLLM each response as a separate request."""
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
                logprobs=self._num_scores(ask),
                flat_logprobs=ask.records_support,
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
            request = self._adapters.request(ask.adapter)
            name = self._engine.add_request(str(ask.id), prompt, params, lora_request=request)
            self._open[str(ask.id)] = _Open(name, ask.adapter, ask.tokens_at_once, ask.records_support)

    def step(self) -> list[Gain]:
        """Take as many steps of vLLM as all responses in progress allow.

        They are counted, not timed, so that the parts of an engine that spans ranks take the same steps. An end is no
        reason to stop: what waits for its place is known to vLLM already.
        """
        num_left = 0 if self._ready else min((one.tokens_at_once for one in self._open.values()), default=1)
        while not self._ready or (num_left > 0 and self._open):
            self._advance()
            num_left -= 1 + self.settings.num_drafts  # all drafts may be accepted
        gains, self._ready = self._ready, []
        return joined(gains)

    def _advance(self) -> RequestOutput | None:
        """Take a step of vLLM; return its answer about a probe, if there is one."""
        if not self._engine.has_unfinished_requests():
            raise RuntimeError("vLLM has nothing in progress, though an answer is awaited")
        probed = None
        for output in cast("list[RequestOutput]", self._engine.step()):
            if output.request_id == PROBE:
                probed = output
            else:
                self._ready.append(self._gain(output))
        return probed

    def _gain(self, output: RequestOutput) -> Gain:
        """Addition of a step to a response."""
        self._check_length(output.request_id, output.prompt_token_ids)
        part, version = output.outputs[0], self._versions[self._open[output.request_id].adapter]
        tokens = list(part.token_ids)
        support = list[str]()
        if self._open[output.request_id].records_support and tokens:
            scores = cast("FlatLogprobs", part.logprobs)
            log_probs = [scores.logprobs[first] for first in scores.start_indices]
            support = [self._support(scores, place) for place in range(len(tokens))]
        else:
            log_probs = [one[token].logprob for token, one in zip(tokens, part.logprobs or (), strict=True)]
        number, cached = int(output.request_id), output.num_cached_tokens or 0
        experts = self._experts(output) if self.settings.expert_layers else []
        drafts = list[int]()
        if output.finished:
            del self._open[output.request_id]
            if self.settings.num_drafts and (counted := part.spec_decode_metrics) is not None:
                drafts = [counted.num_draft_tokens, sum(j * count for j, count in enumerate(counted.histogram))]
        return Gain(number, tokens, log_probs, part.finish_reason, version, cached, experts, support, drafts)

    def _num_scores(self, ask: Ask) -> int:
        """Number of the likeliest tokens whose log-probabilities come with that of the token that is drawn."""
        if not ask.records_support:
            return 0
        return min(scores_for(ask.top_k), int(self._engine.vllm_config.model_config.get_vocab_size()))

    def _support(self, scores: FlatLogprobs, place: int) -> str:
        """Tokens that could be drawn: those whose log-probability is finite, behind the one that was drawn.

        Of tokens as likely as the last one that `top_k` keeps, vLLM keeps all.
        """
        own = slice(scores.start_indices[place] + 1, scores.end_indices[place])
        words = np.array(scores.token_ids[own], "<i4")[np.isfinite(scores.logprobs[own])]
        if len(words) == own.stop - own.start < self._engine.vllm_config.model_config.get_vocab_size():
            raise RuntimeError(
                f"vLLM could have drawn more than {len(words)} tokens, though rollout.top_k bounds their number, since "
                "so many are equally likely; set a lower rollout.top_k, or rollout.engine=native"
            )
        return base64.b64encode(np.sort(words).tobytes()).decode()

    def _experts(self, output: RequestOutput) -> list[str]:
        """The choices of experts that a step has added; vLLM shows them at the end of a response, all together."""
        found = output.outputs[0].routed_experts
        if not output.finished:
            chunks = self._engine.output_processor.request_states[
                self._open[output.request_id].name
            ].routed_experts_chunks
            found = np.concatenate(chunks) if chunks else None
            chunks.clear()
        return [] if found is None else packed(found, self.settings.expert_layers)

    def _check_length(self, name: str, tokens: Sequence[int] | None) -> None:
        """Compare the length of a prompt with images with what training makes of it, once."""
        expected = self._expected.pop(name, None)
        if expected is not None and tokens is not None and len(tokens) != expected:
            raise RuntimeError(
                f"vLLM reads a prompt with images as {len(tokens)} tokens, and training as {expected}: its image "
                "processor has other settings"
            )

    def abort(self, ids: Iterable[int]) -> None:
        """Abort requests; vLLM reports nothing more about them."""
        names = [str(number) for number in ids]
        self._engine.abort_request(names)
        for name in names:
            self._open.pop(name, None)

    def _abort_all(self) -> None:
        self._engine.abort_request(list(self._open))
        self._open.clear()
        self._ready.clear()
        self._expected.clear()

    def prompt_log_probs(self, tokens: Sequence[int], adapter: str = "") -> list[float]:
        """Compute log-probabilities with a separate request for one token; in a pipeline, with one for each token."""
        from vllm import SamplingParams

        if self.settings.num_stages > 1:
            return [self._next_log_prob(tokens[:end], tokens[end], adapter) for end in range(1, len(tokens))]
        params = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0, detokenize=False)
        scored = self._probe(tokens, params, adapter).prompt_logprobs
        assert scored is not None, "they were asked for"
        known = [scores for scores in scored if scores is not None]  # the first token has none
        return [float(scores[token].logprob) for token, scores in zip(tokens[1:], known, strict=True)]

    def _next_log_prob(self, tokens: Sequence[int], token: int, adapter: str) -> float:
        scored = self._probe(tokens, next_token_params(token), adapter).outputs[0].logprobs
        assert scored is not None, "they were asked for"
        return float(scored[0][token].logprob)

    def _probe(self, tokens: Sequence[int], params: SamplingParams, adapter: str) -> RequestOutput:
        """Answer a separate request for one token, while others go on."""
        from vllm import TokensPrompt

        prompt = TokensPrompt(prompt_token_ids=list(tokens))
        self._engine.add_request(PROBE, prompt, params, lora_request=self._adapters.request(adapter))
        probed = None
        while probed is None or not probed.finished:
            probed = self._advance()
        return probed

    def wake(self) -> None:
        """Allocate memory, and copy weights that were kept back to the device."""
        if self._is_on_accelerator:
            self._engine.wake_up()
        else:
            self._on_worker(_take_memory, self._cache_bytes)

    def load_bucket(
        self, weights: Sequence[PackedWeight], data: Tensor, adapter: str = "", *, is_checked: bool = False
    ) -> None:
        """Load weights from [bytes] uint8 on this engine's device; the first call begins a new set.

        Args:
            weights: Weights in the bucket.
            data: Bytes of the bucket.
            adapter: Name of the set of adapters that they belong to, if they do.
            is_checked: Whether they come from another process, whose checksums `finish_load` compares.
        """
        # vLLM keeps references until a layer is complete, and a later bucket overwrites this memory.
        own, copied = data.clone(), None
        if is_checked:
            copied = None if own.device.type == "cpu" else _mark(own.device)
            # An accelerator adds up while the host continues.
            self._loaded.append((f"'{weights[0].name}' to '{weights[-1].name}'", checksums(own[None])))
        if adapter:
            for weight in weights:
                self._adapters.add(adapter, weight.name, weight.view(own))
        else:
            self._on_worker(load, [(weight.name, weight.view(own)) for weight in weights], self._loading)
        if copied is not None:
            copied.synchronize()  # from now on the other process may overwrite the bucket

    def finish_load(self, policy_version: int, adapter: str = "", expected: Sequence[int] = ()) -> None:
        """Use the weights that have been loaded, and drop all that is in progress or computed with earlier ones.

        Adapters leave alone what is in progress with others: vLLM knows with which ones keys and values were computed.

        Args:
            policy_version: Number of optimizer steps that led to the weights.
            adapter: Name of the set of adapters, if they are adapters.
            expected: Checksum of each bucket in another process.

        Raises:
            RuntimeError: A bucket arrived damaged, or some of vLLM's weights have not been sent.
        """
        self._check_buckets(expected)
        self.abort([int(number) for number, request in self._open.items() if request.adapter == adapter])
        if adapter:
            self._adapters.use(adapter, policy_version, self._engine)
        else:
            self._finish_whole_weights()
        if not self._open and not self._engine.reset_prefix_cache():
            raise RuntimeError("vLLM still uses keys and values of earlier weights, though nothing is in progress")
        self._versions[adapter] = policy_version

    def _check_buckets(self, expected: Sequence[int]) -> None:
        """Compare the checksums of all buckets of other processes, of which an accelerator's come here at once."""
        names, sums = [name for name, _ in self._loaded], [one for _, one in self._loaded]
        self._loaded.clear()
        found = torch.cat(sums).tolist() if sums else []
        if len(found) != len(expected):
            raise RuntimeError(f"{len(found)} buckets of weights have come, but {len(expected)} were sent")
        for name, own, other in zip(names, found, expected, strict=True):
            if own != other:
                raise RuntimeError(f"the bucket of {name} arrived damaged: checksum {own}, expected {other}")

    def _finish_whole_weights(self) -> None:
        """Finish loading weights, of which adapters are no part: those do not change what is seen of images."""
        loading, self._loading = self._loading, Loading()
        lacking = self._on_worker(finish, loading)
        if lacking:
            raise RuntimeError(f"{len(lacking)} of vLLM's weights have not been sent, such as {lacking[0]}")
        if self.settings.sees_images:
            self._engine.reset_encoder_cache()  # it keeps what earlier weights have seen of images

    def sleep(self, *, keep_weights: bool) -> None:
        """Release memory. An accelerator copies weights that are kept to host memory.

        Weights to which adapters belong are always kept: they would have to be read again.
        """
        self._abort_all()
        if self._is_on_accelerator:
            self._engine.sleep(level=1 if keep_weights or self.settings.adapters else 2)
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


def _mark(device: torch.device) -> torch.Event:
    """Mark the place up to which work is queued on an accelerator."""
    event: torch.Event = torch.get_device_module(device).Event()
    event.record()
    return event


def _weights_of(settings: Settings) -> dict[str, object]:
    """Arguments of vLLM for the origin of its weights: the rank, or the model's folder if adapters come."""
    if not settings.adapters:
        return {"load_format": "dummy"}
    from vllm.config.lora import MaxLoRARanks

    rank, known = max(cast("int", said["r"]) for said in settings.adapters.values()), get_args(MaxLoRARanks)
    count = len(settings.adapters)
    if not (able := [one for one in known if one >= rank]):
        raise RuntimeError(
            f"vLLM takes adapters of rank {max(known)} at most, and these have {rank}: lower models.ROLE.lora.rank, or "
            "set rollout.external.merge_adapters"
        )
    return {"enable_lora": True, "max_loras": count, "max_cpu_loras": count, "max_lora_rank": min(able)}


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
