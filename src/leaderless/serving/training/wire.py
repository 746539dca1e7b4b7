"""Requests and results that the Tinker API sends as protocol buffers: passes of training, and samples.

The numbers of fields are those of `tinker_public.proto` in the package `tinker`.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from leaderless.serving.training.protobuf import Value, fields, numbers
from leaderless.serving.training.protobuf import field as written

FLOAT32, INT64 = 1, 2
"""Types of tensors."""
DTYPES = {FLOAT32: torch.float32, INT64: torch.int64}
STOPPED, CUT_OFF = 0, 1
"""Reasons for the end of a sample."""
OUTPUT_TYPE = "ArrayRecord"


@dataclass(frozen=True)
class Datum:
    """A sequence to train on.

    Attributes:
        tokens: [N] int64, input.
        inputs: Tensors of the loss by name, each [N].
    """

    tokens: Tensor
    inputs: Mapping[str, Tensor]


@dataclass(frozen=True)
class PassRequest:
    """A request for a forward pass over sequences, with or without a backward pass.

    Attributes:
        model_id: Adapters to train.
        seq_id: Place among the requests for them, from 1.
        data: Sequences.
        loss: Name of the loss.
        settings: Settings of the loss.
        is_forward_only: Whether there is no backward pass.
        problem: Reason why it cannot be carried out, if some of it cannot be read; its number is used up all the same.
    """

    model_id: str
    seq_id: int
    data: Sequence[Datum]
    loss: str
    settings: Mapping[str, float | str]
    is_forward_only: bool
    problem: str = ""

    @property
    def digest(self) -> str:
        """What is asked for, which does not depend on how it was written."""
        whole = hashlib.blake2b(repr((self.loss, self.is_forward_only, sorted(self.settings.items()))).encode())
        for one in self.data:
            for name, values in [("", one.tokens), *sorted(one.inputs.items())]:
                whole.update(f"{name}/{values.dtype}/{len(values)}/".encode())
                whole.update(values.numpy().tobytes())
        return whole.hexdigest()


@dataclass(frozen=True)
class PassResult:
    """Result of a pass: log-probabilities of each sequence's targets, float32, and metrics."""

    log_probs: Sequence[Tensor]
    metrics: Mapping[str, float]


@dataclass
class SampledSequence:
    """A sampled sequence.

    Attributes:
        tokens: Token ids, including one that ended it.
        log_probs: Log-probability of each token under the distribution that it was drawn from.
        has_stopped: Whether it ended by itself, and was not cut off.
    """

    tokens: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    has_stopped: bool = False


def read_pass_request(body: bytes) -> PassRequest:
    """Read a request for a pass; sequences that are not supported are its problem.

    Raises:
        ValueError: The bytes are no such request.
    """
    model_id, seq_id, loss, is_forward_only, problem = "", 0, "", False, ""
    data: list[Datum] = []
    legacy: dict[str, float | str] = {}
    settings: dict[str, float | str] = {}
    for number, value in fields(body):
        if number == 1:
            model_id = _text(value)
        elif number == 2:
            seq_id = _whole(value)
        elif number == 3:
            try:
                data.append(_datum(_bytes(value), len(data)))
            except ValueError as error:
                problem = problem or str(error)
        elif number == 4:
            loss = _text(value)
        elif number == 5:
            key, own = _entry(value)
            legacy[key] = own if isinstance(own, int | float) else 0.0
        elif number == 6:
            is_forward_only = bool(value)
        elif number == 7:
            key, own = _entry(value)
            kind, setting = next(fields(_bytes(own)))
            settings[key] = _text(setting) if kind == 2 else float(setting)
        else:
            raise ValueError(f"field {number} of a request for a pass is not known here")
    return PassRequest(model_id, seq_id, data, loss, settings or legacy, is_forward_only, problem)


def _datum(message: bytes, place: int) -> Datum:
    """A sequence, the one at a place among all."""
    tokens: list[Tensor] = []
    inputs: dict[str, Tensor] = {}
    for number, value in fields(message):
        if number == 1:
            for kind, chunk in fields(_bytes(value)):
                if kind != 1:
                    raise ValueError(f"data[{place}] has a chunk of images or sounds, but this server trains on text")
                (_, ids), *_ = fields(_bytes(chunk)) or [(1, b"")]
                tokens.append(torch.from_numpy(np.frombuffer(_bytes(ids), np.int32).astype(np.int64)))
        elif number == 2:
            name, tensor = _entry(value)
            inputs[name] = _tensor(_bytes(tensor), f"data[{place}].loss_fn_inputs[{name!r}]")
        # 3 and 4 say which sampled tokens these are, for a loss that is not offered here.
    return Datum(torch.cat(tokens) if tokens else torch.empty(0, dtype=torch.int64), inputs)


def _tensor(message: bytes, name: str) -> Tensor:
    """A tensor with one value for each token."""
    content, dtype, shape = b"", 0, list[int]()
    for number, value in fields(message):
        if number == 1:
            content = _bytes(value)
        elif number == 2:
            raise ValueError(f"{name} is sparse: send one value for each token, [N]")
        elif number == 3:
            dtype = _whole(value)
        elif number == 4:
            shape += numbers(value)
    if dtype not in DTYPES:
        raise ValueError(f"{name} has type {dtype}: use float32 or int64")
    if len(shape) > 1:
        raise ValueError(f"{name} has shape {shape}: send one value for each token, [N]")
    kind = np.float32 if dtype == FLOAT32 else np.int64
    return torch.from_numpy(np.frombuffer(content, kind).copy())


def _entry(value: Value) -> tuple[str, Value]:
    """Key and value of an entry of a map."""
    found = dict(fields(_bytes(value)))
    return _text(found.get(1, b"")), found.get(2, b"")


def _bytes(value: Value) -> bytes:
    if not isinstance(value, bytes):
        raise ValueError(f"{value} was sent in place of bytes")
    return value


def _text(value: Value) -> str:
    return _bytes(value).decode()


def _whole(value: Value) -> int:
    if not isinstance(value, int):
        raise ValueError(f"{value!r} was sent in place of a whole number")
    return value


def write_pass_result(result: PassResult) -> bytes:
    """Write the result of a pass."""
    sizes = np.array([0, *(4 * len(one) for one in result.log_probs)], np.int64)
    data = torch.cat([*result.log_probs]).float().numpy().tobytes()
    batched = written(1, data) + written(2, sizes.cumsum().tobytes()) + written(3, FLOAT32)
    entry = written(1, "logprobs") + written(2, batched)
    record = written(1, OUTPUT_TYPE) + written(2, entry) + written(3, len(result.log_probs))
    metrics = [written(3, written(1, name) + written(2, float(value))) for name, value in result.metrics.items()]
    return written(1, OUTPUT_TYPE) + written(2, record) + b"".join(metrics)


def write_samples(samples: Sequence[SampledSequence], prompt_log_probs: Sequence[float] | None) -> bytes:
    """Write sampled sequences, and log-probabilities of the prompt's tokens, if they were asked for."""
    message = b"".join(written(1, _sample(sample)) for sample in samples)
    if prompt_log_probs is not None:
        message += written(2, struct.pack(f"<{len(prompt_log_probs)}f", *prompt_log_probs))
    return message


def _sample(sample: SampledSequence) -> bytes:
    tokens = struct.pack(f"<{len(sample.tokens)}i", *sample.tokens)
    log_probs = struct.pack(f"<{len(sample.log_probs)}f", *sample.log_probs)
    return written(1, STOPPED if sample.has_stopped else CUT_OFF) + written(2, tokens) + written(3, log_probs)
