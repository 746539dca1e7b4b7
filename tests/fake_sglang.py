"""A program that answers as SGLang's documentation says its server does, with the engine of `tests.engines`.

It takes no field and no argument that the documentation does not have, and writes down what it is asked.
"""

from __future__ import annotations

import base64
import ctypes
import json
import os
import pickle
import signal
import sys
import threading
from collections.abc import Iterator, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
from safetensors.torch import load_file
from tests.engines import CopyDriver
from tests.fake_sglang_arguments import FLAGS, VALUES

from leaderless.distributed.remote.messages import Ask
from leaderless.models.routers import Routers

LOG_VARIABLE = "FAKE_SGLANG_LOG"
SAMPLING = {"temperature", "top_p", "top_k", "min_p", "max_new_tokens", "stop_token_ids", "ignore_eos", "sampling_seed"}
FIELDS: Mapping[str, set[str]] = {
    "/generate": {"rid", "input_ids", "sampling_params", "return_logprob", "logprob_start_len", "stream", "lora_path"}
    | {"return_routed_experts"},
    "/abort_request": {"rid", "abort_all"},
    "/update_weights_from_tensor": {"serialized_named_tensors", "load_format", "flush_cache", "weight_version"},
    "/flush_cache": set(),
    "/load_lora_adapter": {"lora_name", "lora_path", "pinned"},
    "/unload_lora_adapter": {"lora_name"},
    "/release_memory_occupation": {"tags"},
    "/resume_memory_occupation": {"tags"},
}


class Server:
    """The engine and its unfinished requests."""

    def __init__(self, arguments: Mapping[str, str]) -> None:
        self.driver = CopyDriver(arguments["model-path"])
        self.driver.start()
        self.driver.wake()
        if arguments["load-format"] == "auto":
            self.driver.load_from_folder()
        self.weights = dict(self.driver._model.named_parameters())
        self.base = {name: weight.detach().clone() for name, weight in self.weights.items()}
        self.adapters: dict[str, dict[str, torch.Tensor]] = {}  # weights with each merged into them
        self.most_adapters = int(arguments.get("max-loaded-loras", 0))
        self.records_experts = "enable-return-routed-experts" in arguments
        self.repeats = "stream-output" not in arguments
        self.token, self.version = arguments["api-key"], "default"
        self.max_running = int(arguments["max-running-requests"])
        self.lock, self.aborted, self.running = threading.Lock(), set[str](), set[str]()

    @torch.no_grad()
    def merged(self, folder: Path) -> dict[str, torch.Tensor]:
        """Merge adapters into copies of the weights of the folder from which they were read."""
        merged = {name: base.clone() for name, base in self.base.items()}
        said = json.loads((folder / "adapter_config.json").read_text())
        matrices = load_file(folder / "adapter_model.safetensors")
        for name in self.base:
            found = [matrices.pop(f"base_model.model.{name.removesuffix('weight')}lora_{x}.weight", None) for x in "AB"]
            if found[0] is not None and found[1] is not None:
                merged[name] += found[1] @ found[0] * (said["lora_alpha"] / said["r"])
        assert not matrices, f"adapters of nothing: {list(matrices)}"
        return merged

    @torch.no_grad()
    def choose(self, adapter: str | None) -> None:
        """Compute with some adapters from now on."""
        for name, weight in self.adapters[adapter].items() if adapter is not None else ():
            self.weights[name].copy_(weight)

    def weight(self, name: str) -> torch.Tensor:
        """The memory of a weight, which may be a part of that of all experts."""
        before, _, after = name.partition(".experts.")
        if not after[:1].isdigit():
            return self.weights[name].detach()
        number, kind, _ = after.split(".")
        packed = self.weights[f"{before}.experts.{'down_proj' if kind == 'down_proj' else 'gate_up_proj'}"].detach()
        halves = packed[int(number)].chunk(2) if kind != "down_proj" else (packed[int(number)],)
        return halves[kind == "up_proj"]

    @torch.no_grad()
    def experts(self, tokens: list[int]) -> str:
        """What each layer chooses for each token: int32 in base64."""
        routers = Routers.required(self.driver._model, "model")
        routers.begin()
        self.driver._model(torch.tensor([tokens]))
        return base64.b64encode(routers.now.choices().int().numpy().tobytes()).decode()

    def answer(self, path: str, body: dict[str, Any]) -> object:
        """Handle all calls but streams."""
        match path:
            case "/update_weights_from_tensor":
                (payload,) = body["serialized_named_tensors"]
                with torch.no_grad():
                    for name, tensor in pickle.loads(base64.b64decode(payload)):
                        self.weight(name).copy_(tensor)
                self.version = body["weight_version"]
                return {"success": True, "message": "Succeeded to update parameter online from tensors."}
            case "/load_lora_adapter":
                assert len(self.adapters) < self.most_adapters, "--max-loaded-loras"
                self.adapters[body["lora_name"]] = self.merged(Path(body["lora_path"]))
                return {"success": True, "error_message": "", "loaded_adapters": dict.fromkeys(self.adapters, "")}
            case "/unload_lora_adapter":
                del self.adapters[body["lora_name"]]
                return {"success": True, "error_message": "", "loaded_adapters": {}}
            case "/abort_request":
                every = body.get("abort_all")
                self.aborted |= {rid for rid in self.running if every or rid.startswith(body["rid"])}
                return None
            case "/flush_cache":
                assert not self.running, "flush_cache with requests under way"
            case "/release_memory_occupation":
                assert not self.running, "release_memory_occupation with requests under way"
                self.driver.sleep(keep_weights=True)
                return None
            case "/resume_memory_occupation":
                assert set(body["tags"]) <= {"weights", "kv_cache"}
                self.driver.wake()
                return None
            case "/generate":
                with self.lock:
                    self.choose(body.get("lora_path"))
                    scores = self.driver.prompt_log_probs(body["input_ids"])
                entries = [[None, body["input_ids"][0], None]]
                entries += [[score, token, None] for score, token in zip(scores, body["input_ids"][1:], strict=True)]
                return {"output_ids": [0], "meta_info": {"id": "x", "input_token_logprobs": entries}}
        return "Cache flushed."

    def stream(self, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """Events of a batch, each with the new tokens of a response, or with the whole response so far."""
        asks = {
            rid: Ask(
                index,
                tokens,
                params["max_new_tokens"],
                params["temperature"],
                params["top_p"],
                max(params["top_k"], 0),
                params["min_p"],
                params["sampling_seed"],
                params["stop_token_ids"],
            )
            for index, (rid, tokens, params) in enumerate(
                zip(body["rid"], body["input_ids"], body["sampling_params"], strict=True)
            )
        }
        adapters = dict(zip(asks, body.get("lora_path", [None] * len(asks)), strict=True))
        assert len(self.adapters) == self.most_adapters or None in adapters.values()
        grown: dict[str, list[list[float | None]]] = {rid: [] for rid in asks}
        assert self.records_experts >= body.get("return_routed_experts", False)
        self.running |= set(asks)
        try:
            while asks:
                now = [rid for rid in list(asks)[: self.max_running] if rid not in self.aborted]
                with self.lock:
                    for rid in now:
                        self.driver._grown[asks[rid].id] = [int(entry[1] or 0) for entry in grown[rid]]
                        self.driver._open[asks[rid].id] = asks[rid]
                    gains = {}
                    for adapter in {adapters[rid]: None for rid in now}:
                        self.choose(adapter)
                        some = [rid for rid in now if adapters[rid] == adapter]
                        gains |= zip(some, self.driver.grow([asks[rid] for rid in some]), strict=True)
                for rid in [*gains, *(rid for rid in list(asks) if rid in self.aborted)]:
                    finish: dict[str, object] | None = {"type": "abort", "message": "Abort before prefill"}
                    if rid in gains:
                        (token,), (log_prob,), reason = (
                            gains[rid].tokens,
                            gains[rid].log_probs,
                            gains[rid].finish_reason,
                        )
                        grown[rid].append([log_prob, token, None])
                        ends = {"stop": {"type": "stop", "matched": token}, "length": {"type": "length", "length": 1}}
                        finish = ends[reason] if reason else None
                    info = {"id": rid, "finish_reason": finish, "weight_version": self.version, "cached_tokens": 1}
                    if finish:
                        if body.get("return_routed_experts") and rid in gains:
                            sampled = [int(entry[1] or 0) for entry in grown[rid]]
                            info["routed_experts"] = self.experts([*asks[rid].prompt, *sampled][:-1])
                        del asks[rid]
                        self.running.discard(rid)
                    info["completion_tokens"] = len(grown[rid])
                    shown = grown[rid] if self.repeats else grown[rid][-1:] if rid in gains else []
                    yield {
                        "output_ids": [int(entry[1] or 0) for entry in shown],
                        "meta_info": info | {"output_token_logprobs": shown},
                    }
        finally:
            self.running -= set(body["rid"])


class Handler(BaseHTTPRequestHandler):
    """A stream ends with its connection; other connections are closed when idle for a moment."""

    protocol_version = "HTTP/1.1"
    timeout = 0.2
    server_state: Server

    def do_GET(self) -> None:
        self.send_response(200 if self.path == "/health" else 404)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        with Path(os.environ[LOG_VARIABLE]).open("a") as log:
            log.write(json.dumps([self.path, sorted(body)]) + "\n")
        unknown = set(body) - FIELDS.get(self.path, set())
        params = body.get("sampling_params", [])
        unknown |= {name for one in (params if isinstance(params, list) else [params]) for name in one} - SAMPLING
        if self.path not in FIELDS or unknown:
            self._send(400, {"error": f"{self.path} has no {sorted(unknown)}"})
        elif self.headers["Authorization"] != f"Bearer {self.server_state.token}":
            self._send(401, {"error": "Unauthorized"})
        elif body.get("stream"):
            self.send_response(200)
            self.send_header("Connection", "close")
            self.end_headers()
            for event in self.server_state.stream(body):
                self.wfile.write(b"data: " + json.dumps(event).encode() + b"\n\n")
            self.wfile.write(b"data: [DONE]\n\n")
        else:
            self._send(200, self.server_state.answer(self.path, body))

    def _send(self, status: int, content: object) -> None:
        text = content.encode() if isinstance(content, str) else json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def log_message(self, *args: object) -> None:
        pass


def main() -> None:
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # end with the tests (PR_SET_PDEATHSIG)
    given = sys.argv[sys.argv.index("--model-path") :]
    arguments: dict[str, str] = {}
    while given:
        name = given.pop(0).removeprefix("--")
        if name == "lora-target-modules":
            while given and not given[0].startswith("--"):
                given.pop(0)
            continue
        assert name in VALUES | FLAGS, f"unknown argument {name}"
        arguments[name] = given.pop(0) if name in VALUES else ""
    arguments["api-key"] = sys.stdin.readline().strip()  # SGLang's launcher would have passed it on
    Handler.server_state = Server(arguments)
    ThreadingHTTPServer((arguments["host"], int(arguments["port"])), Handler).serve_forever()


if __name__ == "__main__":
    main()
