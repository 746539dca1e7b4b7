"""SGLang, through its server and its HTTP interface."""

from __future__ import annotations

import base64
import json
import pickle
import queue
import threading
from collections.abc import Mapping, Sequence
from multiprocessing.reduction import ForkingPickler
from typing import cast

import numpy as np
import torch
from torch import Tensor
from typing_extensions import override

from leaderless.base.values import Json
from leaderless.distributed.remote.child_server import ChildServer, bound_command
from leaderless.distributed.remote.messages import Ask, Gain, Settings
from leaderless.distributed.remote.server_calls import EngineError
from leaderless.distributed.weights.buckets import LocalStaging, make_buckets
from leaderless.distributed.weights.stream import WeightStream
from leaderless.rollout.external.engine import ENDS
from leaderless.rollout.external.lora_slots import AdapterDriver
from leaderless.rollout.external.vllm_process.adapters import AdapterFolder
from leaderless.rollout.external.vllm_process.experts import packed

START = (
    "import runpy\n"
    "sys.argv += ['--api-key', sys.stdin.readline().strip()]\n"
    "runpy.run_module('sglang.launch_server', run_name='__main__', alter_sys=True)\n"
)
"""Program for SGLang's interpreter. The token is not on its command line, which all users of the machine can read."""
INCREMENTAL = "stream-output"
"""Flag by which an event has its new tokens alone. Newer versions also have it as `incremental-streaming-output`."""
JOIN_S = 10.0
"""Longest wait for the end of a stream of aborted responses."""


class SglangServer(AdapterDriver):
    """One SGLang server, which serves only this rank.

    Nothing of this package runs inside SGLang, so no checksum is compared there. Every token comes with the policy
    version of the weights that sampled it, and the probe shows that these are the trainer's.
    """

    def __init__(self, python: str, settings: Settings, device: torch.device, server: ChildServer) -> None:
        """Start nothing yet; `python` is an interpreter that has SGLang, and `server` runs it."""
        self._python, self._settings, self._device, self._server = python, settings, device, server
        self._adapters = {one: AdapterFolder(said, settings.matrices[one]) for one, said in settings.adapters.items()}
        self._versions: dict[str, int] = {}  # of the adapters in use, by name
        self._adapter_of: dict[int, str] = {}  # of each response in progress
        self._waiting: list[Ask] = []
        self._streams: list[threading.Thread] = []
        self._news: queue.SimpleQueue[Gain | EngineError] = queue.SimpleQueue()

    @override
    def start(self) -> None:
        self._server.prepare()
        self._versions.clear()
        self._server.start(bound_command(self._python, START, *self._arguments()), self._server.token)
        self.sleep(keep_weights=False)

    def _arguments(self) -> list[str]:
        settings = self._settings
        arguments = {
            "model-path": settings.model,
            "host": "127.0.0.1",
            "port": self._server.port,
            "dtype": settings.dtype,
            "context-length": settings.max_tokens,
            "max-running-requests": settings.max_sequences,
            "mem-fraction-static": settings.memory_fraction,
            "load-format": "auto" if settings.adapters else "dummy",
            "sampling-defaults": "openai",
            "device": self._device.type,
            "base-gpu-id": self._device.index or 0,
        }
        if settings.revision is not None:
            arguments["revision"] = settings.revision
        if settings.adapters:
            rank, count = max(cast("int", said["r"]) for said in settings.adapters.values()), len(settings.adapters)
            arguments |= {"max-lora-rank": rank, "max-loras-per-batch": count, "max-loaded-loras": count}
        flags = ["enable-lora"] * bool(settings.adapters)
        flags += ["skip-tokenizer-init", "enable-memory-saver", "enable-weights-cpu-backup", INCREMENTAL]
        flags += ["trust-remote-code"] * settings.trust_remote_code
        flags += ["disable-cuda-graph"] * (not settings.enable_graphs)
        flags += ["enable-return-routed-experts"] * bool(settings.expert_layers)
        given = [part for name, value in arguments.items() for part in (f"--{name}", str(value))]
        if settings.adapters:
            targets = [cast("Sequence[str]", said["target_modules"]) for said in settings.adapters.values()]
            given += ["--lora-target-modules", *sorted({one for some in targets for one in some})]
        given += [f"--{flag}" for flag in flags]
        return given + [part for name, value in settings.arguments.items() for part in _command_line(name, value)]

    @override
    def wake(self) -> None:
        self._server.call("/resume_memory_occupation", {"tags": ["weights", "kv_cache"]})

    @override
    def sleep(self, *, keep_weights: bool) -> None:
        """Release memory; SGLang always keeps a copy of the weights in host memory."""
        self._abort_all()
        self._server.call("/release_memory_occupation", {"tags": ["weights", "kv_cache"]})

    def _abort_all(self) -> None:
        """Abort all responses, and wait for the ends of their streams."""
        self._server.call("/abort_request", {"rid": "", "abort_all": True})
        for stream in self._streams:
            stream.join(JOIN_S)
        self._forget()

    @override
    def load(self, weights: WeightStream, adapter: str = "") -> None:
        """Send CUDA IPC handles of the buckets to SGLang; on the CPU, their bytes.

        It keeps the keys and values of earlier adapters until it needs their memory, and knows whose they are.
        """
        if adapter:
            self._load_adapters(adapter, weights)
            return
        if self._streams or self._waiting:
            self._abort_all()  # SGLang does not flush its cache while it is in use
        self._load_whole(weights)
        self._server.call("/flush_cache", {})

    def _load_whole(self, weights: WeightStream) -> None:
        for bucket in make_buckets(
            weights, self._settings.torch_dtype, LocalStaging(self._device), exact=weights.exact
        ):
            tensors = [(weight.name, weight.view(bucket.data)) for weight in bucket.weights]
            torch.get_device_module(self._device).synchronize()  # the server may read the bucket from now on
            body: Json = {
                "serialized_named_tensors": [_serialize(tensors, self._device)],
                "flush_cache": False,
                "weight_version": str(weights.policy_version),
            }
            answer = self._server.call("/update_weights_from_tensor", body)
            if not isinstance(answer, Mapping) or answer.get("success") is not True:
                raise EngineError(f"SGLang has refused {len(tensors)} weights, such as {tensors[0][0]}: {answer}")

    def _load_adapters(self, adapter: str, weights: WeightStream) -> None:
        """Load adapters in place of those before. Their name has the policy version: a request cannot use others."""
        self.abort([number for number, name in self._adapter_of.items() if name == adapter])
        for name, matrix in weights:
            self._adapters[adapter].add(name, matrix)
        with self._adapters[adapter].written() as folder:
            if adapter in self._versions:
                self._change("/unload_lora_adapter", {"lora_name": self._name_of(adapter)})
            self._versions[adapter] = weights.policy_version
            self._change("/load_lora_adapter", {"lora_name": self._name_of(adapter), "lora_path": folder})

    def _name_of(self, adapter: str) -> str:
        """SGLang's name for the newest adapters of a name."""
        return f"{adapter}-{self._versions[adapter]}"

    def _change(self, path: str, body: Json) -> None:
        answer = self._server.call(path, body)
        if not isinstance(answer, Mapping) or answer.get("success") is not True:
            raise EngineError(f"SGLang has refused {path} with {body}: {answer}")

    @override
    def prompt_log_probs(self, tokens: Sequence[int], adapter: str = "") -> list[float]:
        body: Json = {
            "input_ids": list(tokens),
            "sampling_params": {"temperature": 0.0, "max_new_tokens": 1},
            "return_logprob": True,
            "logprob_start_len": 0,
            **({"lora_path": self._name_of(adapter)} if adapter else {}),
        }
        answer = cast("Mapping[str, Mapping[str, Sequence[Sequence[float]]]]", self._server.call("/generate", body))
        scored = answer["meta_info"]["input_token_logprobs"][1:]
        if [entry[1] for entry in scored] != list(tokens[1:]):
            raise EngineError(f"SGLang was asked about {len(tokens)} tokens, but answered about others: {scored}")
        return [entry[0] for entry in scored]

    @override
    def submit(self, asks: Sequence[Ask]) -> None:
        """Queue requests, which are sent with the next step, all in one call."""
        self._waiting += asks
        self._adapter_of |= {ask.id: ask.adapter for ask in asks if ask.adapter}

    @override
    def abort(self, ids: Sequence[int]) -> None:
        sent = set(ids) - {ask.id for ask in self._waiting}
        self._waiting = [ask for ask in self._waiting if ask.id not in ids]
        for number in ids:
            self._adapter_of.pop(number, None)
        for number in sorted(sent):
            self._server.call("/abort_request", {"rid": _name(number)})

    @override
    def step(self) -> list[Gain]:
        if self._waiting:
            self._send()
        gains: list[Gain] = []
        while not gains or not self._news.empty():
            try:
                news = self._news.get(timeout=self._server.answer_timeout_s)
            except queue.Empty:
                raise self._server.failed_to_answer("/generate") from None
            if isinstance(news, EngineError):
                raise news
            gains.append(news)
            if news.finish_reason is not None:
                self._adapter_of.pop(news.id, None)
        return gains

    def _send(self) -> None:
        """Ask for all responses that wait, in one call, whose answer a thread reads.

        All that it names is settled before the thread starts: adapters may be others by the time at which it runs.
        """
        asks, self._waiting = self._waiting, []
        body, versions = _generate_body(asks), dict[int, int]()
        if self._settings.adapters:
            body["lora_path"] = [self._name_of(ask.adapter) for ask in asks]
            versions = {ask.id: self._versions[ask.adapter] for ask in asks}
        if self._is_recording:
            body["return_routed_experts"] = True
        stream = threading.Thread(target=self._read, args=(asks, body, versions, self._news), daemon=True)
        self._streams = [*filter(threading.Thread.is_alive, self._streams), stream]
        stream.start()

    def _read(
        self,
        asks: Sequence[Ask],
        body: Json,
        versions: Mapping[int, int],
        news: queue.SimpleQueue[Gain | EngineError],
    ) -> None:
        """Read the responses of one call to their end; `versions` belong to the adapters that sample them."""
        known, prompts = dict.fromkeys((ask.id for ask in asks), 0), {ask.id: len(ask.prompt) for ask in asks}
        try:
            for line in self._server.stream("/generate", body):
                if line.startswith(b"data:") and line != b"data: [DONE]":
                    answer = json.loads(line.removeprefix(b"data:"))
                    gain = _read_gain(answer, known)
                    gain = gain._replace(policy_version=versions.get(gain.id, gain.policy_version))
                    if gain.finish_reason in ENDS and self._is_recording:  # an aborted response may have none
                        num_read = prompts[gain.id] + known[gain.id] - 1
                        gain = gain._replace(experts=self._experts(answer["meta_info"], num_read))
                    news.put(gain)
                    if gain.finish_reason is not None:
                        del known[gain.id]
            if known:  # the end of a connection is not an error by itself
                news.put(self._server.broke_off("/generate"))
        except EngineError as error:
            news.put(error)
        except (ValueError, KeyError, TypeError) as error:
            news.put(EngineError(f"the answer of SGLang to /generate cannot be read: {error!r}"))

    @property
    def _is_recording(self) -> bool:
        """Whether SGLang is asked for choices of experts, which come at the end of a response."""
        return bool(self._settings.expert_layers)

    def _experts(self, info: Mapping[str, Json], num_read: int) -> list[str]:
        """The choices of experts for all tokens that were read: int32 of each token, layer and choice, in base64."""
        found = np.frombuffer(base64.b64decode(str(info.get("routed_experts") or "")), np.dtype("<i4"))
        k = self._settings.experts_per_token
        if not len(found) or len(found) % (num_read * k):
            raise EngineError(
                f"SGLang has reported {len(found)} choices of experts for {num_read} tokens, of which each has {k} in "
                "every layer"
            )
        return packed(found.reshape(num_read, -1, k), self._settings.expert_layers)

    @override
    def close(self) -> None:
        self._server.close()
        self._forget()

    def _forget(self) -> None:
        self._waiting.clear()
        self._adapter_of.clear()
        self._streams.clear()
        self._news = queue.SimpleQueue()


def _command_line(name: str, value: Json) -> list[str]:
    """Write an argument for SGLang's command line, where true is a flag alone."""
    flag = f"--{name.replace('_', '-')}"
    if value is True:
        return [flag]
    if isinstance(value, Mapping):
        return [flag, json.dumps(value)]
    values = [value] if isinstance(value, str) or not isinstance(value, Sequence) else value
    return [flag, *map(str, values)]


def _name(number: int) -> str:
    """Name a response so that no other name begins with it: SGLang aborts all names that begin with the given one."""
    return f"{number:020d}"


def _generate_body(asks: Sequence[Ask]) -> dict[str, Json]:
    return {
        "rid": [_name(ask.id) for ask in asks],
        "input_ids": [list(ask.prompt) for ask in asks],
        "sampling_params": [
            {
                "temperature": ask.temperature,
                "top_p": ask.top_p,
                "top_k": ask.top_k or -1,
                "min_p": ask.min_p,
                "max_new_tokens": ask.max_tokens,
                "stop_token_ids": list(ask.end_tokens),
                "ignore_eos": True,  # end tokens are given above
                "sampling_seed": ask.seed,
            }
            for ask in asks
        ],
        "return_logprob": True,
        "stream": True,
    }


def _read_gain(answer: Mapping[str, Json], known: dict[int, int]) -> Gain:
    """Read the new tokens of an event; `known` counts earlier ones, which older versions of SGLang repeat in each."""
    if "error" in answer:
        raise EngineError(f"SGLang answered /generate with an error: {answer['error']}")
    info = cast("Mapping[str, Json]", answer["meta_info"])
    number = int(str(info["id"]))
    entries = cast("Sequence[Sequence[float]]", info["output_token_logprobs"])
    first = max(0, int(str(info.get("completion_tokens", 0))) - len(entries))
    if first > known[number]:
        raise EngineError(f"SGLang has sent tokens from {first} on of a response of which {known[number]} were read")
    entries = entries[known[number] - first :]
    known[number] += len(entries)
    finish = cast("Mapping[str, str] | None", info["finish_reason"])
    tokens, log_probs = [int(entry[1]) for entry in entries], [entry[0] for entry in entries]
    reason, version = finish["type"] if finish else None, str(info["weight_version"])
    cached = int(str(info.get("cached_tokens", 0)))
    # It is "default" as long as SGLang has the weights of the model's folder, to which only adapters are added.
    return Gain(number, tokens, log_probs, reason, int(version) if version.isdigit() else -1, cached)


def _serialize(tensors: Sequence[tuple[str, Tensor]], device: torch.device) -> str:
    """Pickle tensors, as SGLang's interface wants them: as handles of device memory, or by value on the CPU."""
    if device.type == "cpu":
        data = pickle.dumps([(name, tensor.clone()) for name, tensor in tensors])  # a view would bring its whole bucket
    else:
        data = bytes(ForkingPickler.dumps(list(tensors)))
    return base64.b64encode(data).decode()
