"""Messages between a rank and a server that it has started, over HTTP, and memory that both see."""

from __future__ import annotations

import hmac
import json
import traceback
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, HTTPServer
from io import BufferedReader
from itertools import chain
from typing import Any, ClassVar, NamedTuple, cast

import torch
from torch import Tensor

from leaderless.base.values import Json
from leaderless.distributed.weights.buckets import torch_dtype


@dataclass(frozen=True)
class Settings:
    """Settings of an engine."""

    model: str  # folder or hub name; weights are read from it only if adapters come, and else only shapes
    revision: str | None
    trust_remote_code: bool
    dtype: str  # of weights and activations
    max_tokens: int  # of a prompt with its response
    max_sequences: int
    memory_fraction: float
    kv_cache_bytes: int | None  # None for everything that the fraction leaves
    enable_graphs: bool
    tensor_parallel_size: int = 1  # ranks that divide each layer of one engine
    num_stages: int = 1  # parts into which ranks divide the layers of one engine
    divides_experts: bool = False  # whether these ranks have whole experts each, in place of a part of each
    meeting: str | None = None  # URL of the place where processes of an engine find each other; None for one alone
    rank: int = 0  # of this process among those that meet
    device_index: int = 0  # of this process's device, among those that it sees
    sees_images: bool = False  # whether prompts may have images
    # What `peft` has to know of each set of adapters, by its name; none if whole weights come.
    adapters: Mapping[str, Mapping[str, object]] = field(default_factory=dict)
    matrices: Mapping[str, Sequence[str]] = field(default_factory=dict)  # names of all matrices of each set
    expert_layers: Sequence[int] = ()  # layers whose choices of experts are recorded; none if they are not
    experts_per_token: int = 0  # that each of these layers chooses
    most_support: int = 0  # largest `top_k` of requests that record the tokens that could be drawn
    arguments: Mapping[str, Json] = field(default_factory=dict)  # further ones, by the engine's own names
    num_drafts: int = 0  # tokens that it drafts at a time, as its arguments say

    @property
    def torch_dtype(self) -> torch.dtype:
        """Type of the weights."""
        return torch_dtype(self.dtype)


@dataclass(frozen=True)
class Ask:
    """A request for one response, which `id` identifies; sampling settings are as in `SamplingConfig`.

    A prompt with images has one token for each; `images` are their files in base64, and with all tokens that these
    become it has `num_tokens`. Tokens that are `impossible` are never drawn. `adapter` names the
    adapters with which it is computed. Up to `tokens_at_once` tokens of it may be reported together. The tokens that
    could be drawn, of which `top_k` bounds the number, are reported, too, if `records_support`.
    """

    id: int
    prompt: Sequence[int]
    max_tokens: int
    temperature: float
    top_p: float
    top_k: int
    min_p: float
    seed: int
    end_tokens: Sequence[int]
    images: Sequence[str] = ()
    num_tokens: int = 0
    impossible: Sequence[int] = ()
    adapter: str = ""
    tokens_at_once: int = 1
    records_support: bool = False


class Gain(NamedTuple):
    """New tokens of a response, with their log-probabilities under the distribution they were drawn from.

    `finish_reason` is `stop` or `length`, or None while the response continues; `policy_version` is the version of the
    weights that sampled the tokens. `cached_tokens` counts tokens of the prompt whose keys and values the engine still
    had; it may be repeated with each gain. `experts` are the choices for tokens that have been read, in base64, one
    entry for each: first for the prompt, then for the response but its last one. `support` are the tokens that could be
    drawn in place of each new one, int32 in base64; without any if it could be any token. `drafts` are the numbers of
    tokens that were drafted for the response and accepted, at its end, if the engine drafts any.
    """

    id: int
    tokens: Sequence[int]
    log_probs: Sequence[float]
    finish_reason: str | None
    policy_version: int
    cached_tokens: int = 0
    experts: Sequence[str] = ()
    support: Sequence[str] = ()
    drafts: Sequence[int] = ()


def joined(gains: Iterable[Gain]) -> list[Gain]:
    """Join the gains of each response, which come in order, and were all sampled with the same weights."""
    found: dict[int, list[Gain]] = {}
    for gain in gains:
        found.setdefault(gain.id, []).append(gain)
    return [parts[0] if len(parts) == 1 else _join(parts) for parts in found.values()]


def _join(parts: Sequence[Gain]) -> Gain:
    ids, tokens, log_probs, reasons, versions, cached, *recorded = zip(*parts, strict=True)
    assert versions[0] == versions[-1], "other weights abort what is in progress"
    experts, support, drafts = ([*chain(*one)] for one in recorded)
    sampled = [*chain(*tokens)], [*chain(*log_probs)]
    return Gain(ids[0], *sampled, reasons[-1], versions[0], cached[0], experts, support, drafts)


RECORDED = ("experts", "support", "drafts")
"""Fields of a gain that only some runs need."""


def to_columns(gains: Sequence[Gain]) -> dict[str, list[Any]]:
    """Write gains as lists that JSON can hold, one for each field; the last ones only if something was recorded."""
    columns = {name: [gain[place] for gain in gains] for place, name in enumerate(Gain._fields)}
    return {name: column for name, column in columns.items() if name not in RECORDED or any(column)}


def from_columns(columns: Mapping[str, Sequence[Any]]) -> list[Gain]:
    """Read what `to_columns` has written."""
    return [Gain(**dict(zip(columns, values, strict=True))) for values in zip(*columns.values(), strict=True)]


MOST_MAPPED = 2
"""Memories of another process that are mapped at a time: the stagings that take turns."""


class SharedMemory:
    """Memories of another process of this machine, each of which holds one bucket of weights at a time."""

    def __init__(self) -> None:
        self._mapped: dict[str, Tensor] = {}  # by place, those that were opened last at the end

    def open(self, place: Mapping[str, Any]) -> Tensor:
        """Map the memory at a staging's `place`, unless it is mapped already, and return its bytes."""
        key = json.dumps(place, sort_keys=True)
        data = self._mapped.pop(key, None)
        if data is None:
            while len(self._mapped) >= MOST_MAPPED:
                self._mapped.pop(next(iter(self._mapped)))
            data = _map(place)
        self._mapped[key] = data
        return data

    def close(self) -> None:
        """Unmap the memories."""
        self._mapped.clear()
        if torch.cuda.is_available():
            torch.cuda.ipc_collect()  # type: ignore[no-untyped-call]


def _map(place: Mapping[str, Any]) -> Tensor:
    if "file" in place:
        return torch.from_file(place["file"], shared=True, size=place["bytes"], dtype=torch.uint8)
    handle = [bytes.fromhex(part) if isinstance(part, str) else part for part in place["handle"]]
    # This process may see the device under another index.
    storage = torch.UntypedStorage._new_shared_cuda(torch.cuda.current_device(), *handle)  # noqa: SLF001
    return torch.empty(0, dtype=torch.uint8, device="cuda").set_(storage)


NUMBER = "Call-Number"
"""Header with the number of a call that may be sent again over another connection."""


BYTES = "application/octet-stream"
"""Type of a call with bytes behind its arguments."""
HEAD_BYTES = 8
"""Bytes of the length of arguments, before these."""


def framed(body: Json, data: memoryview) -> list[bytes | memoryview]:
    """Arguments of a call and bytes, as parts of one message, which `unframed` takes apart."""
    text = json.dumps(body).encode()
    return [len(text).to_bytes(HEAD_BYTES), text, data]


def unframed(message: bytearray) -> tuple[dict[str, Any], memoryview]:
    """Arguments and bytes of a message of `framed`."""
    begin = HEAD_BYTES + int.from_bytes(message[:HEAD_BYTES])
    return json.loads(message[HEAD_BYTES:begin]), memoryview(message)[begin:]


class _Answer(NamedTuple):
    """The last answer, with the number of its call; None if the call had none."""

    number: str | None
    status: int
    body: bytes


class Handler(BaseHTTPRequestHandler):
    """One HTTP call, with the token that the rank and this server share; arguments and results are JSON.

    The answer to a call with a number is kept until the next call. If its connection is lost, the rank sends the call
    again with the same number, and gets the same answer: nothing is done twice.
    """

    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True  # an answer is two packets, and the second must not wait
    memory = SharedMemory()
    attached = memoryview(b"")
    """Bytes of the call."""
    last: ClassVar[_Answer] = _Answer(None, 0, b"")
    token: str

    def do_GET(self) -> None:
        """Answer a health check."""
        self.do_POST()

    def do_POST(self) -> None:
        """Answer a call."""
        length = int(self.headers.get("Content-Length") or 0)
        body = bytearray(length)
        if self._fill(memoryview(body)) < length:  # the connection is lost, and the call will be sent again
            self.close_connection = True
            return
        if not hmac.compare_digest(self.headers.get("Authorization") or "", f"Bearer {self.token}"):
            self._send(401, b'{"error": "wrong token"}')
            return
        number = self.headers.get(NUMBER)
        if number is None or number != self.last.number:
            type(self).last = _Answer(number, *self._result(body))
        self._send(self.last.status, self.last.body)

    def _fill(self, room: memoryview) -> int:
        """Read a body, and return how much of it has come."""
        filled = 0
        while filled < len(room) and (count := cast("BufferedReader", self.rfile).readinto(room[filled:])):
            filled += count
        return filled

    def _result(self, body: bytearray) -> tuple[int, bytes]:
        has_bytes = self.headers.get("Content-Type") == BYTES
        try:
            arguments, self.attached = unframed(body) if has_bytes else (json.loads(body or b"{}"), memoryview(b""))
            return 200, json.dumps(self.answer(self.path.removeprefix("/"), arguments)).encode()
        except Exception as error:  # noqa: BLE001  (it is sent to the rank)
            traceback.print_exc()
            return 500, json.dumps({"error": f"{type(error).__name__}: {error}"}).encode()

    def answer(self, name: str, body: Mapping[str, Any]) -> object:
        """Answer a call by its name, with something that JSON can hold; what is raised is sent to the rank."""
        raise NotImplementedError

    def _send(self, status: int, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002
        """Calls are not logged: there is one for each step."""


def bind(port: int, handler: type[Handler], token: str, host: str = "127.0.0.1") -> HTTPServer:
    """Take a port of an interface, by default that of this machine alone; calls are accepted after activation."""
    server = HTTPServer((host, port), handler, bind_and_activate=False)
    server.server_bind()
    handler.token = token
    return server
