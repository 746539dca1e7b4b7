"""Protocol buffers of the Tinker API, written by hand and by its own client where that is installed."""

from __future__ import annotations

import struct

import pytest
import torch

from leaderless.serving.training.protobuf import field, fields, numbers, varint
from leaderless.serving.training.wire import (
    PassResult,
    SampledSequence,
    read_pass_request,
    write_pass_result,
    write_samples,
)


def tensor(values: bytes, dtype: int, *shape: int) -> bytes:
    """A tensor, whose shape is packed."""
    return field(1, values) + field(3, dtype) + field(4, b"".join(map(varint, shape)))


def datum(tokens: list[int], **inputs: bytes) -> bytes:
    chunk = field(1, field(1, struct.pack(f"<{len(tokens)}i", *tokens)))
    return field(1, chunk) + b"".join(field(2, field(1, name) + field(2, one)) for name, one in inputs.items())


def request(*data: bytes) -> bytes:
    head = field(1, "m") + field(2, 3) + field(4, "ppo")
    return head + b"".join(field(3, one) for one in data)


def test_numbers_and_fields_are_read_as_they_were_written() -> None:
    for value in (0, 1, 127, 128, 300, 2**31, 2**63):
        assert [*fields(field(5, value))] == [(5, value)]
    assert [*fields(field(1, "é") + field(2, 0.1) + varint(3 << 3 | 5) + struct.pack("<f", 0.5))] == [
        (1, "é".encode()),
        (2, 0.1),
        (3, 0.5),
    ]
    assert numbers(7) == [7]
    assert numbers(varint(7) + varint(300)) == [7, 300]


@pytest.mark.parametrize("message", [b"\x80", b"\x0a\x05ab", b"\x0b", b"\xff" * 12])
def test_bytes_that_are_no_message_are_refused(message: bytes) -> None:
    with pytest.raises(ValueError, match=r"ends|kind"):
        [*fields(message)]


def test_a_request_for_passes_is_read() -> None:
    weights = tensor(struct.pack("<2f", 0.5, -1.0), 1, 2)
    body = request(datum([5, 6], target_tokens=tensor(struct.pack("<2q", 6, 7), 2, 2), weights=weights))
    body += field(6, 1) + field(5, field(1, "low") + field(2, 0.5))
    found = read_pass_request(body)
    assert (found.model_id, found.seq_id, found.loss, found.is_forward_only) == ("m", 3, "ppo", True)
    assert found.settings == {"low": 0.5}
    assert found.data[0].tokens.tolist() == [5, 6]
    assert found.data[0].inputs["target_tokens"].tolist() == [6, 7]
    assert found.data[0].inputs["weights"].tolist() == [0.5, -1.0]
    newer = read_pass_request(body + field(7, field(1, "low") + field(2, field(1, 0.25))))
    assert newer.settings == {"low": 0.25}


def test_what_is_asked_for_does_not_depend_on_the_order_in_which_it_was_written() -> None:
    one, two = tensor(struct.pack("<f", 1.0), 1, 1), tensor(struct.pack("<f", 2.0), 1, 1)
    first, second = (
        read_pass_request(request(datum([5], **own))) for own in ({"a": one, "b": two}, {"b": two, "a": one})
    )
    assert first.digest == second.digest != read_pass_request(request(datum([5], a=two, b=one))).digest


@pytest.mark.parametrize(
    ("data", "problem"),
    [
        (field(1, field(2, b"png")), "images or sounds"),
        (datum([5], weights=tensor(b"", 1, 1, 2)), "one value for each token"),
        (datum([5], weights=tensor(b"", 4, 1)), "float32 or int64"),
        (datum([5], weights=field(2, b"")), "is sparse"),
    ],
)
def test_sequences_that_are_not_supported_are_a_problem_of_the_request(data: bytes, problem: str) -> None:
    found = read_pass_request(request(data))
    assert problem in found.problem
    assert (found.model_id, found.seq_id) == ("m", 3), "its number is known, so that it can be used up"


RESULT = PassResult([torch.tensor([-1.0, -2.0]), torch.tensor([-3.0])], {"loss:sum": 6.0})
SAMPLES = [SampledSequence([5, 6], [-0.5, -1.5], has_stopped=True), SampledSequence([7], [-0.25])]


def test_results_are_those_that_the_client_reads() -> None:
    convert = pytest.importorskip("tinker.proto.response_conv")
    found = convert.deserialize_forward_backward_output(write_pass_result(RESULT))
    assert [one["logprobs"].data for one in found.loss_fn_outputs] == [[-1.0, -2.0], [-3.0]]
    assert found.metrics == RESULT.metrics
    samples = convert.deserialize_sample_response(write_samples(SAMPLES, [float("nan"), -2.0]))
    assert [(one.tokens, one.logprobs, one.stop_reason) for one in samples.sequences] == [
        ([5, 6], [-0.5, -1.5], "stop"),
        ([7], [-0.25], "length"),
    ]
    assert samples.prompt_logprobs == [None, -2.0]


def test_results_are_written_field_by_field() -> None:
    (kind, name), (number, record), (_, metric) = fields(write_pass_result(RESULT))
    assert (kind, name, number) == (1, b"ArrayRecord", 2)
    assert isinstance(record, bytes)
    assert isinstance(metric, bytes)
    assert dict(fields(metric)) == {1: b"loss:sum", 2: 6.0}
    said = dict(fields(record))
    assert said[3] == 2
    assert isinstance(said[2], bytes)
    batched = dict(fields(dict(fields(said[2]))[2]))  # type: ignore[arg-type]
    assert struct.unpack("<3f", batched[1]) == (-1.0, -2.0, -3.0)  # type: ignore[arg-type]
    assert struct.unpack("<3q", batched[2]) == (0, 8, 12)  # type: ignore[arg-type]
