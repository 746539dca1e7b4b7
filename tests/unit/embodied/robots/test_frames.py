"""Frames arrive as they were sent; other bytes are refused, and never more than that."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import array_shapes, arrays

from leaderless.embodied.robots.frames import DTYPES, PREFIX, FrameError, MessageFrame, decode, lengths

values = st.sampled_from(sorted(DTYPES)).flatmap(
    lambda dtype: arrays(dtype, array_shapes(min_dims=0, max_dims=4, min_side=0, max_side=3))
)
headers = st.dictionaries(st.text(max_size=5).filter(lambda key: key != "arrays"), st.integers() | st.text(max_size=5))


def split(data: bytes) -> tuple[bytes, bytes]:
    num_header, _ = lengths(data[: PREFIX.size], 1 << 20)
    return data[PREFIX.size : PREFIX.size + num_header], data[PREFIX.size + num_header :]


@given(headers, st.dictionaries(st.text(max_size=5), values, max_size=3))
def test_frames_arrive_as_they_were_sent(header, given_arrays):
    found = decode(*split(MessageFrame(header, given_arrays).encode()))
    assert found.header == header
    assert found.arrays.keys() == given_arrays.keys()
    for name, array in given_arrays.items():
        assert found.arrays[name].dtype == array.dtype
        assert found.arrays[name].shape == array.shape
        assert found.arrays[name].tobytes() == array.tobytes()


@given(st.data())
def test_damaged_frames_are_refused_or_other_frames(data):
    frame = bytearray(
        MessageFrame({"verb": "step"}, {"a": np.ones((2, 3), np.float32), "b": np.ones(2, bool)}).encode()
    )
    for place, value in data.draw(st.lists(st.tuples(st.integers(0, len(frame) - 1), st.integers(0, 255)), min_size=1)):
        frame[place] = value
    cut = data.draw(st.integers(PREFIX.size, len(frame)))
    try:
        found = decode(*split(bytes(frame[:cut])))
    except FrameError:
        return
    assert all(str(array.dtype) in DTYPES for array in found.arrays.values())


@pytest.mark.parametrize(
    ("header", "body", "reason"),
    [
        (b'{"arrays": [["a", "object", [1]]]}', b"12345678", "of type object"),
        (b'{"arrays": [["a", "float32", [-1]]]}', b"1234", "sizes of at least 0"),
        (b'{"arrays": [["a", "float32", [1000000000, 1000000000]]]}', b"1234", "longer than the message"),
        (b'{"arrays": [["a", "bool", [1]]]}', b"\x02", "other numbers than 0 and 1"),
        (b'{"arrays": []}', b"1", "belong to no array"),
        (b'{"arrays": [], "deadline_s": NaN}', b"", "NaN is no number of JSON"),
        (b"[" * 60_000, b"", "cannot be read"),
    ],
)
def test_what_is_wrong_with_a_frame_is_said(header, body, reason):
    with pytest.raises(FrameError, match=reason):
        decode(header, body)


def test_servers_and_clients_of_arms_import_no_torch():
    robots = ("arm", "client", "server", "environment", "simulated_arm", "franka")
    modules = ["cli.robot", "embodied.data.replay_buffer", *(f"embodied.robots.{name}" for name in robots)]
    code = f"import sys; [__import__('leaderless.' + one) for one in {modules}]; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
