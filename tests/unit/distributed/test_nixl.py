"""The part of NIXL that one rank has by itself: its notifications, its memory, and whether the package is there."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.transports import stand_in_path

from leaderless.base.errors import RecipeError
from leaderless.distributed.one_sided import library
from leaderless.distributed.one_sided.endpoint import NixlEndpoint
from leaderless.distributed.one_sided.frames import Frame, FrameKind
from leaderless.distributed.one_sided.slabs import ALIGNMENT, Slab


@pytest.fixture
def stand_in() -> Iterator[None]:
    with stand_in_path():
        yield


def test_a_notification_is_what_was_sent() -> None:
    frame = Frame(FrameKind.PART, 2**55, 3, 2**40, 5, 6, 2**47, -1, b"\0metadata")
    assert Frame.decode(frame.encode()) == frame
    assert Frame.decode(Frame(FrameKind.HERE).encode()) == Frame(FrameKind.HERE)


@pytest.mark.parametrize("data", [b"", b"\x02" + bytes(80), Frame(FrameKind.HERE).encode()[:-1]])
def test_a_notification_of_another_protocol_is_refused(data: bytes) -> None:
    with pytest.raises(ValueError, match=f"a notification of {len(data)} bytes is not of version 1"):
        Frame.decode(data)


@given(st.lists(st.tuples(st.booleans(), st.integers(1, 5 * ALIGNMENT)), max_size=40))
def test_places_do_not_overlap_and_all_room_comes_back(steps: list[tuple[bool, int]]) -> None:
    size, taken = 8 * ALIGNMENT, dict[int, int]()
    with stand_in_path():
        slab = Slab(library.open_library("rank 0").agent, size, torch.device("cpu"))
    for is_taken, number in steps:
        if is_taken:
            begin = slab.take(number)
            if begin is None:
                continue
            assert begin % ALIGNMENT == 0
            assert begin + number <= size
            assert all(begin + number <= other or other + taken[other] <= begin for other in taken)
            taken[begin] = number
        elif taken:
            begin = sorted(taken)[number % len(taken)]
            slab.give_back(begin)
            del taken[begin]
    for begin in taken:
        slab.give_back(begin)
    assert slab.taken == 0
    assert slab.take(size) == 0


def test_an_endpoint_that_is_closed_leaves_nothing_registered(stand_in: None) -> None:
    endpoint = NixlEndpoint(0)
    agent = endpoint.library.agent
    endpoint._slab(agent, "arriving", torch.device("cpu"))
    assert len(agent.registered) == 1  # type: ignore[attr-defined]
    assert endpoint.registered_bytes > 0
    endpoint.close()
    endpoint.close("twice")
    assert agent.registered == {}  # type: ignore[attr-defined]
    assert endpoint.registered_bytes == 0
    assert not endpoint._thread.is_alive()
    with pytest.raises(RuntimeError, match="nothing more is sent by NIXL: this rank has finished"):
        endpoint.metadata()


def refusal() -> str:
    with pytest.raises(RecipeError) as caught:
        library.open_library("rank 0")
    return str(caught.value)


def test_a_missing_package_is_named_with_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library, "find_spec", lambda _: None)
    message = refusal()
    assert message.startswith("run.transport: 'nixl' needs the package nixl: ")
    assert "[nixl]" in message
    assert message.endswith("or set run.transport=torch")


def test_another_version_is_named_with_the_remedy(stand_in: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library, "version", lambda _: "2.1.0")
    assert refusal().startswith("run.transport: 'nixl' needs nixl 1.x, not 2.1.0: ")


def test_a_package_without_a_method_is_named(stand_in: None, monkeypatch: pytest.MonkeyPatch) -> None:
    from nixl import _api

    monkeypatch.delattr(_api.nixl_agent, "send_notif")
    assert refusal().startswith("run.transport: nixl 1.5.1 has no send_notif: ")


def test_a_package_that_does_not_load_is_named(stand_in: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "nixl._api", None)
    assert refusal().startswith("run.transport: nixl 1.5.1 cannot be imported (")


def test_a_package_without_its_backend_is_named(stand_in: None, monkeypatch: pytest.MonkeyPatch) -> None:
    from nixl import _api

    make = _api.nixl_agent.__init__

    def init(self: object, *args: object) -> None:
        make(self, *args)
        self.backends = {}  # type: ignore[attr-defined]

    monkeypatch.setattr(_api.nixl_agent, "__init__", init)
    assert refusal().startswith("run.transport: nixl 1.5.1 has no backend UCX here: ")
