"""Rows and weights from rank to rank by NIXL, in place of torch's messages.

A sender copies its message, part after part, into memory that stays registered, and notifies the receiver of each; the
receiver reads it from there, without the sender's help where the network can, and the sender is notified by NIXL when
it may use the place again. Small messages are in the notification itself.

    sender                                              receiver
    copy a part into registered memory
    PART: number, bytes, address  ------------------->
                                                        read it into registered memory  (NIXL)
                                  <-------------------  TAKEN, when all of it is there
    copy the next part there                            copy it into the message

Two ranks connect when they first have a message for each other in a process group: they send each other the metadata of
their endpoints over it, in pairs, and each waits until the other has connected. Nothing is gathered, and ranks without
messages for each other never connect. What collectives do, and messages in the middle of a pass, stays with torch.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from leaderless.distributed.in_flight import Mark, mark
from leaderless.distributed.one_sided.frames import Frame, FrameKind
from leaderless.distributed.one_sided.library import BACKEND, NixlAgent, NixlLibrary, TransferHandle, open_library
from leaderless.distributed.one_sided.slabs import Slab
from leaderless.planner.memory.limits import MIB

WHOLE_BYTES = 1 << 13
"""Most bytes of a message that is sent within its notification."""
PART_BYTES, DEVICE_PART_BYTES = 2 * MIB, 16 * MIB
"""Most bytes of a part, in the memory of the host and of an accelerator, which needs time to start each."""
PARTS = 16
"""Largest parts for which a slab has room."""
POLL_S = 0.0001
"""Pause between two looks at what has come, where a thread waits for it."""
BUSY_S, IDLE_S = 0.001, 0.02
"""Pauses of the thread that looks while nobody waits: with messages in progress, and without."""
LINGER_S = 0.1
"""Time at the end for the last notifications to leave."""

_Key = tuple[str, int, int]
"""The peer's agent, the process group, and the position of a message among those that go this way."""


@dataclass(eq=False)
class NixlMessage:
    """A message that leaves or arrives.

    Attributes:
        peer: Rank at the other end.
        key: Name of the message for both ends.
        data: Its bytes; they are filled where it arrives.
        stream: Stream of the accelerator that has it, which fills or uses it.
        lane: Name of the memory from which it is sent.
        begun: Bytes whose transfer has begun.
        done: Bytes that have arrived, or been taken.
        places: Slab and place of each part that may be read, by its first byte.
        error: Reason that it cannot arrive; empty while it may.
    """

    peer: int
    key: _Key
    data: Tensor
    stream: torch.Stream | None
    lane: str = ""
    begun: int = 0
    done: int = 0
    places: dict[int, tuple[Slab, int]] = field(default_factory=dict)
    error: str = ""

    @property
    def is_over(self) -> bool:
        """Whether all is done, or nothing more can be."""
        return bool(self.error) or self.done == len(self.data)


class _Read(NamedTuple):
    """A part that is being read, or copied from where it was read."""

    message: NixlMessage
    frame: Frame
    slab: Slab
    place: int
    handle: TransferHandle


class _Copy(NamedTuple):
    """A part on an accelerator's stream: what follows once the stream has come so far."""

    mark: Mark
    frame: Frame | None
    agent: str
    slab: Slab
    place: int


class NixlEndpoint:
    """What one rank sends and receives by NIXL, in all its process groups and threads.

    Attributes:
        rank: This rank.
        library: Package, and its agent of this process.
    """

    def __init__(self, rank: int) -> None:
        """Start NIXL here; nothing is sent yet.

        Raises:
            RecipeError: NIXL is missing, does not fit, or cannot be used here.
        """
        self.rank = rank
        self.library: NixlLibrary = open_library(f"rank {rank}")
        self._misunderstood: tuple[type[Exception], ...] = (*self.library.errors, ValueError)
        self._agent: NixlAgent | None = self.library.agent
        self._lock = threading.RLock()
        self._names: dict[tuple[int, int], str] = {}  # by process group and rank
        self._ranks: dict[str, int] = {}
        self._lost: dict[str, str] = {}  # reasons, by agent
        self._numbers: dict[tuple[str, int, int], int] = {}
        self._sending: dict[_Key, NixlMessage] = {}
        self._receiving: dict[_Key, NixlMessage] = {}
        self._waiting: dict[str, deque[NixlMessage]] = {}  # for room, by lane, in their order
        self._announced: dict[_Key, deque[Frame]] = {}
        self._reads: list[_Read] = []
        self._copies: list[_Copy] = []
        self._slabs: dict[tuple[str, torch.device], Slab] = {}
        self._kept: list[Slab] = []  # not registered any more
        self._known: set[tuple[str, int]] = set()
        self._closed = ""
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="nixl", daemon=True)
        self._thread.start()

    @property
    def registered_bytes(self) -> int:
        """Bytes of registered memory."""
        return sum(len(slab.memory) for slab in self._slabs.values())

    @property
    def peers(self) -> tuple[int, ...]:
        """Ranks with which this one has connected, ascending."""
        return tuple(sorted(set(self._ranks.values())))

    def is_connected(self, tag: int, peer: int) -> bool:
        """Whether a rank has sent its metadata in a process group. Both ends know it at the same message."""
        return (tag, peer) in self._names

    def metadata(self) -> Tensor:
        """[bytes] uint8: how others connect to this endpoint."""
        with self._open() as agent:
            return torch.frombuffer(bytearray(agent.get_agent_metadata()), dtype=torch.uint8)

    def connect(self, tag: int, peer: int, metadata: Tensor) -> None:
        """Take the metadata that a rank has sent in a process group."""
        with self._open() as agent:
            try:
                name = agent.add_remote_agent(metadata.numpy().tobytes())
            except self.library.errors as error:
                raise RuntimeError(f"rank {peer} cannot be reached by NIXL: {error}") from error
            text = name if isinstance(name, str) else name.decode()
            self._names[tag, peer], self._ranks[text] = text, peer

    def begin(
        self,
        tag: int,
        lane: str,
        sent: Sequence[tuple[int, Tensor]],
        received: Sequence[tuple[int, Tensor]],
    ) -> list[NixlMessage]:
        """Begin to send messages to connected ranks, and to receive messages, each a contiguous tensor of some bytes.

        Args:
            tag: Number of the process group.
            lane: Name of a thread's process group, which sends from memory of its own; empty for the main thread's.
            sent: Messages by receiver.
            received: Memory for messages, by sender.
        """
        with self._open():
            arriving = [self._message(tag, peer, data, "from") for peer, data in received]
            leaving = [self._message(tag, peer, data, "to") for peer, data in sent]
            for message in arriving:
                self._receiving[message.key] = message
            for message in leaving:
                message.lane = lane
                self._sending[message.key] = message
                self._waiting.setdefault(lane, deque()).append(message)
            self.progress()
        return [*arriving, *leaving]

    def _message(self, tag: int, peer: int, data: Tensor, way: str) -> NixlMessage:
        name = self._names[tag, peer]
        counter = f"{way} {name}", tag, peer
        number = self._numbers[counter] = self._numbers.get(counter, 0) + 1
        stream = None if data.device.type == "cpu" else torch.accelerator.current_stream(data.device)
        return NixlMessage(peer, (name, tag, number), data.view(-1).view(torch.uint8), stream)

    def progress(self) -> None:
        """Look at what has come, and do what it allows. Any thread may call it, and does so for all."""
        with self._lock:
            agent = self._agent
            if agent is None:
                return
            for name, notifications in agent.get_new_notifs().items():
                for data in notifications:
                    try:
                        self._take(agent, name, Frame.decode(data))
                    except self._misunderstood as error:
                        self._lose(name, f"cannot be understood ({error})")
            self._continue_copies(agent)
            self._continue_reads(agent)
            self._begin_reads(agent)
            self._announce(agent)
            if self._lost:
                self._end_lost()

    def close(self, reason: str = "") -> None:
        """Stop, and leave nothing registered. With a reason, peers that wait for this rank stop waiting, too."""
        self._stop.set()
        if threading.current_thread() is not self._thread:
            self._thread.join()
        with self._lock:
            agent = self._agent
            if agent is None:
                return
            self._closed = reason or "this rank has finished"
            if reason:
                for message in (*self._sending.values(), *self._receiving.values()):
                    message.error = message.error or reason
                for name in self._ranks:
                    with suppress(*self.library.errors):
                        agent.send_notif(name, Frame(FrameKind.CLOSED, content=reason.encode()).encode())
            self._cancel(agent)
            self._agent = None
            for slab in self._slabs.values():
                with suppress(*self.library.errors):
                    slab.deregister()
            # A peer may still be reading: it fails, or finds the bytes that it was promised.
            self._kept, self._slabs = [*self._slabs.values()], {}
            self.library = self.library._replace(agent=None)  # type: ignore[arg-type]

    def _cancel(self, agent: NixlAgent) -> None:
        """End reads, and let the last notifications leave."""
        end = time.monotonic() + LINGER_S
        pending = [read.handle for read in self._reads]
        self._reads.clear()
        while time.monotonic() < end and self._ranks:
            for handle in list(pending):
                with suppress(*self.library.errors):
                    handle.release()
                    pending.remove(handle)
            agent.get_new_notifs()
            time.sleep(POLL_S)

    @contextmanager
    def _open(self) -> Iterator[NixlAgent]:
        with self._lock:
            if self._agent is None:
                raise RuntimeError(f"nothing more is sent by NIXL: {self._closed}")
            yield self._agent

    def _run(self) -> None:
        """Look while nobody waits, so that peers need not wait until this rank does."""
        while not self._stop.wait(BUSY_S if self._sending or self._receiving else IDLE_S):
            try:
                self.progress()
            except Exception as error:  # noqa: BLE001 - whoever waits raises it
                with self._lock:
                    for message in (*self._sending.values(), *self._receiving.values()):
                        message.error = message.error or f"{type(error).__name__}: {error}"

    def call(self, tag: int, peers: Sequence[int]) -> None:
        """Notify ranks of nothing, to notice that they cannot be reached."""
        with self._open() as agent:
            for peer in peers:
                self._notify(agent, self._names[tag, peer], Frame(FrameKind.HERE, tag))

    def forget(self, messages: Sequence[NixlMessage]) -> None:
        """Drop messages that are over."""
        with self._lock:
            for message in messages:
                for kept in (self._sending, self._receiving):
                    if kept.get(message.key) is message:
                        del kept[message.key]

    def _lose(self, name: str, reason: str) -> None:
        """Note that a peer cannot be reached any more; the first reason counts."""
        self._lost.setdefault(name, f"rank {self._ranks.get(name)} {reason}")

    def _end_lost(self) -> None:
        """End messages to and from lost peers, but not those that are being read: a peer may stop right behind them."""
        read = {read.message.key for read in self._reads}
        for message in (*self._sending.values(), *self._receiving.values()):
            if message.key[0] in self._lost and message.key not in read and not message.is_over:
                message.error = self._lost[message.key[0]]

    def _notify(self, agent: NixlAgent, name: str, frame: Frame) -> None:
        try:
            agent.send_notif(name, frame.encode())
        except self.library.errors as error:
            self._lose(name, f"cannot be reached any more ({error})")

    def _take(self, agent: NixlAgent, name: str, frame: Frame) -> None:
        """Use a notification."""
        if frame.kind == FrameKind.HERE:
            return
        if frame.kind == FrameKind.CLOSED:
            self._lose(name, f"has stopped: {frame.content.decode()}")
            return
        key = name, frame.tag, frame.number
        if frame.kind != FrameKind.TAKEN:
            if frame.kind == FrameKind.PART and frame.content:
                agent.add_remote_agent(frame.content)
            self._announced.setdefault(key, deque()).append(frame)
            return
        message = self._sending.get(key)
        if message is None:
            return
        message.done += frame.span
        if frame.begin in message.places:
            slab, place = message.places.pop(frame.begin)
            slab.give_back(place)

    def _begin_reads(self, agent: NixlAgent) -> None:
        """Read what has been announced and is expected, as far as there is room."""
        for key in [key for key in self._announced if key in self._receiving]:
            message, frames = self._receiving[key], self._announced[key]
            while frames:
                frame = frames[0]
                if frame.size != len(message.data):
                    message.error = (
                        f"rank {message.peer} sends {frame.size} bytes, but {len(message.data)} are expected"
                    )
                elif frame.kind == FrameKind.WHOLE:
                    with _on(message.stream):
                        message.data.copy_(torch.frombuffer(bytearray(frame.content), dtype=torch.uint8))
                    message.done += frame.span
                    self._notify(agent, key[0], Frame(FrameKind.TAKEN, *frame[1:6]))
                elif not self._read(agent, message, frame):
                    break
                frames.popleft()
            if not frames:
                del self._announced[key]

    def _read(self, agent: NixlAgent, message: NixlMessage, frame: Frame) -> bool:
        """Begin to read a part, if there is room for it."""
        slab = self._slab(agent, "arriving", message.data.device)
        place = slab.take(frame.span)
        if place is None:
            return False
        here = agent.get_xfer_descs([(slab.address(place), frame.span, slab.device_number)], slab.kind)
        kind, number = ("DRAM", 0) if frame.device < 0 else ("VRAM", frame.device)
        there = agent.get_xfer_descs([(frame.address, frame.span, number)], kind)
        taken = Frame(FrameKind.TAKEN, *frame[1:6]).encode()
        try:
            handle = agent.initialize_xfer("READ", here, there, message.key[0], taken, [BACKEND])
            agent.transfer(handle)
        except self.library.errors as error:
            slab.give_back(place)
            self._lose(message.key[0], f"cannot be read from ({error})")
            return True
        self._reads.append(_Read(message, frame, slab, place, handle))
        return True

    def _continue_reads(self, agent: NixlAgent) -> None:
        """Put parts that have arrived where they belong."""
        reads, self._reads = self._reads, []
        for read in reads:
            message, frame = read.message, read.frame
            try:
                state = agent.check_xfer_state(read.handle)
            except self.library.errors as error:
                state = f"ERR {error}"
            if state == "PROC":
                self._reads.append(read)
                continue
            with suppress(*self.library.errors):
                read.handle.release()
            if state != "DONE":
                self._lose(message.key[0], f"could not be read from ({state})")
                read.slab.give_back(read.place)
                continue
            with _on(message.stream):
                arrived = read.slab.place(read.place, frame.span)
                message.data[frame.begin : frame.begin + frame.span].copy_(arrived)
                if message.stream is None:
                    read.slab.give_back(read.place)
                else:
                    copied = mark(message.data.device)
                    self._copies.append(_Copy(copied, None, message.key[0], read.slab, read.place))
            message.done += frame.span

    def _announce(self, agent: NixlAgent) -> None:
        """Copy parts into registered memory, as far as there is room, and let their receivers know."""
        for lane, waiting in self._waiting.items():
            while waiting and (waiting[0].is_over or self._announce_part(agent, lane, waiting[0])):
                if waiting[0].is_over or waiting[0].begun == len(waiting[0].data):
                    waiting.popleft()

    def _announce_part(self, agent: NixlAgent, lane: str, message: NixlMessage) -> bool:
        """Announce the next part of a message, if there is room for it."""
        data, (name, tag, number) = message.data, message.key
        size, begin = len(data), message.begun
        if size <= WHOLE_BYTES:
            with _on(message.stream):
                content = data.cpu().numpy().tobytes()
            message.begun = size
            self._notify(agent, name, Frame(FrameKind.WHOLE, tag, number, size, 0, size, content=content))
            return True
        slab = self._slab(agent, f"leaving {lane}", data.device)
        span = min(size - begin, _part_bytes(data.device))
        place = slab.take(span)
        if place is None:
            return False
        message.begun += span
        message.places[begin] = slab, place
        device = -1 if message.stream is None else slab.device_number
        frame = Frame(FrameKind.PART, tag, number, size, begin, span, slab.address(place), device)
        with _on(message.stream):
            slab.place(place, span).copy_(data[begin : begin + span], non_blocking=True)
            if message.stream is not None:  # the part is there when the stream has come so far
                self._copies.append(_Copy(mark(data.device), frame, name, slab, place))
                return True
        self._notify_part(agent, name, slab, frame)
        return True

    def _notify_part(self, agent: NixlAgent, name: str, slab: Slab, frame: Frame) -> None:
        """Announce a part; the first one in a slab tells the receiver how to read from it."""
        if (name, id(slab)) not in self._known:
            self._known.add((name, id(slab)))
            frame = frame._replace(content=slab.metadata)
        self._notify(agent, name, frame)

    def _continue_copies(self, agent: NixlAgent) -> None:
        """Go on behind copies that an accelerator has finished."""
        copies, self._copies = self._copies, []
        for copy in copies:
            if not copy.mark.query():
                self._copies.append(copy)
            elif copy.frame is None:
                copy.slab.give_back(copy.place)
            else:
                self._notify_part(agent, copy.agent, copy.slab, copy.frame)

    def _slab(self, agent: NixlAgent, use: str, device: torch.device) -> Slab:
        """The registered memory for a use."""
        if (use, device) not in self._slabs:
            self._slabs[use, device] = Slab(agent, PARTS * _part_bytes(device), device)
        return self._slabs[use, device]


def _part_bytes(device: torch.device) -> int:
    return PART_BYTES if device.type == "cpu" else DEVICE_PART_BYTES


def _on(stream: torch.Stream | None) -> AbstractContextManager[object]:
    """Let copies be in the order of a stream."""
    if stream is None:
        return nullcontext()
    context: AbstractContextManager[object] = torch.get_device_module(stream.device).stream(stream)
    return context
