"""Agents that read each other's memory by asking for it, which a thread of each answers."""

from __future__ import annotations

import ctypes
import json
import socket
import struct
import threading
import uuid
from collections import deque

from nixl._bindings import nixlMismatchError, nixlNotAllowedError, nixlNotFoundError, nixlRemoteDisconnectError

HEADER = struct.Struct("<iqq")
NOTE, ASK, DATA, REFUSED = range(4)


class nixl_agent_config:  # noqa: N801 - its name
    def __init__(
        self,
        enable_prog_thread=True,
        enable_listen_thread=False,
        listen_port=0,
        capture_telemetry=False,
        num_threads=0,
        backends=("UCX",),
        sync_mode=None,
    ):
        self.backends = backends


class nixl_xfer_handle:  # noqa: N801 - its name
    def __init__(self, agent, local, remote, name, notification):
        self.agent, self.local, self.remote, self.name, self.notification = agent, local, remote, name, notification
        self.state, self.number = "NEW", None

    def release(self):
        if self.state == "PROC":
            self.agent.handles.pop(self.number, None)
            self.state = "ERR"


class nixl_agent:  # noqa: N801 - its name
    def __init__(self, agent_name, nixl_conf=None, instantiate_all=False):
        self.name, self.backends = agent_name, dict.fromkeys(nixl_conf.backends, 1)
        self.registered, self.addresses, self.sections = {}, {}, {}
        self.links, self.handles, self.notifications = {}, {}, deque()
        self.lock = threading.RLock()
        self.server = socket.socket(socket.AF_UNIX)
        self.address = f"\0nixl-{uuid.uuid4().hex}"
        self.server.bind(self.address)
        self.server.listen(64)
        threading.Thread(target=self._accept, daemon=True).start()

    def register_memory(self, reg_list, mem_type=None, backends=()):
        assert mem_type == "DRAM"
        for address, size, device, _ in reg_list:
            assert device == 0
            self.registered[address, size] = uuid.uuid4().hex
        return [(address, size) for address, size, *_ in reg_list]

    def deregister_memory(self, dereg_list, backends=()):
        for place in dereg_list:
            if self.registered.pop(place, None) is None:
                raise nixlNotFoundError("NIXL_ERR_NOT_FOUND")

    def get_agent_metadata(self):
        return self.get_partial_agent_metadata(list(self.registered), True)

    def get_partial_agent_metadata(self, descs, inc_conn_info=False, backends=()):
        places = [[*place, self.registered[tuple(place)]] for place in descs]
        return json.dumps([self.name, self.address if inc_conn_info else "", places]).encode()

    def add_remote_agent(self, metadata):
        try:
            name, address, places = json.loads(metadata)
        except ValueError:
            raise nixlMismatchError("NIXL_ERR_MISMATCH") from None
        if not address and name not in self.addresses:
            raise nixlNotFoundError("NIXL_ERR_NOT_FOUND")
        if address and self.addresses.setdefault(name, address) != address:
            raise nixlNotAllowedError("NIXL_ERR_NOT_ALLOWED")
        for begin, size, key in places:
            if self.sections.setdefault((name, begin, size), key) != key:
                raise nixlNotAllowedError("NIXL_ERR_NOT_ALLOWED")
        return name.encode()

    def get_xfer_descs(self, descs, mem_type=None):
        assert mem_type == "DRAM"
        return list(descs)

    def initialize_xfer(self, operation, local_descs, remote_descs, remote_agent, notif_msg=b"", backends=()):
        assert operation == "READ"
        (local,), (remote,) = local_descs, remote_descs
        assert local[1] == remote[1]
        known = [(begin, size) for name, begin, size in self.sections if name == remote_agent]
        for (address, size, _), places in ((local, self.registered), (remote, known)):
            if not any(begin <= address and address + size <= begin + most for begin, most in places):
                raise nixlNotFoundError("NIXL_ERR_NOT_FOUND")
        return nixl_xfer_handle(self, local, remote, remote_agent, notif_msg)

    def transfer(self, handle, notif_msg=b""):
        with self.lock:
            handle.number, handle.state = id(handle), "PROC"
            self.handles[handle.number] = handle
            address, size, _ = handle.remote
            self._send(handle.name, ASK, handle.number, struct.pack("<qq", address, size))
        return handle.state

    def check_xfer_state(self, handle):
        if handle.state == "GONE":
            raise nixlRemoteDisconnectError("NIXL_ERR_REMOTE_DISCONNECT")
        return handle.state

    def send_notif(self, remote_agent_name, notif_msg, backend=None):
        if backend is not None:
            raise TypeError("genNotif(): incompatible function arguments")  # as in 1.5.1, which gives no list
        self._send(remote_agent_name, NOTE, 0, notif_msg)

    def get_new_notifs(self, backends=()):
        found = {}
        while self.notifications:
            name, note = self.notifications.popleft()
            found.setdefault(name, []).append(note)
        return found

    def _send(self, name, kind, number, content):
        """Send over the connection that this agent has made."""
        with self.lock:
            try:
                if name not in self.links:
                    link = socket.socket(socket.AF_UNIX)
                    link.connect(self.addresses[name])
                    own = self.name.encode()
                    link.sendall(struct.pack("<i", len(own)) + own)
                    self.links[name] = link
                    threading.Thread(target=self._listen, args=(link, name), daemon=True).start()
                self.links[name].sendall(HEADER.pack(kind, number, len(content)) + content)
            except OSError:
                raise nixlRemoteDisconnectError("NIXL_ERR_REMOTE_DISCONNECT") from None

    def _accept(self):
        while True:
            link, _ = self.server.accept()
            (size,) = struct.unpack("<i", _exactly(link, 4))
            name = _exactly(link, size).decode()
            threading.Thread(target=self._listen, args=(link, name), daemon=True).start()

    def _listen(self, link, name):
        """Take what comes over a connection."""
        while header := _exactly(link, HEADER.size):
            kind, number, size = HEADER.unpack(header)
            content = _exactly(link, size)
            if kind == NOTE:
                self.notifications.append((name, content))
            elif kind == ASK:
                self._answer(link, number, *struct.unpack("<qq", content))
            else:
                self._arrive(number, content if kind == DATA else None)
        for handle in list(self.handles.values()):
            if handle.name == name:
                handle.state = "GONE"

    def _answer(self, link, number, address, size):
        is_known = any(begin <= address and address + size <= begin + most for begin, most in list(self.registered))
        content = ctypes.string_at(address, size) if is_known else b""
        link.sendall(HEADER.pack(DATA if is_known else REFUSED, number, len(content)) + content)

    def _arrive(self, number, content):
        handle = self.handles.pop(number, None)
        if handle is None:
            return
        if content is None:
            handle.state = "ERR"
            return
        ctypes.memmove(handle.local[0], content, len(content))
        self._send(handle.name, NOTE, 0, handle.notification)
        handle.state = "DONE"


def _exactly(link, size):
    """As many bytes as asked for; fewer once the other end is gone."""
    parts, missing = [], size
    while missing:
        try:
            part = link.recv(missing)
        except OSError:
            part = b""
        if not part:
            return b""
        parts.append(part)
        missing -= len(part)
    return b"".join(parts)
