"""The optional package `nixl`: whether it is there and fits, and the part of it that is used. Imports no torch."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from typing import NamedTuple, Protocol, cast

from leaderless.base.errors import RecipeError
from leaderless.config.packaged_files import how_to_install

KEY = "run.transport"
BACKEND = "UCX"
"""Library below NIXL that moves bytes between processes: by shared memory, sockets, RDMA or between devices."""
MAJOR = 1
"""Major version of the package with which this works."""
REMEDY = f"or set {KEY}=torch"


class Registered(Protocol):
    """Memory that NIXL knows, as `register_memory` returns it."""


class Descriptors(Protocol):
    """Places in memory, as `get_xfer_descs` returns them."""


class TransferHandle(Protocol):
    """A transfer, as `initialize_xfer` returns it."""

    def release(self) -> None:
        """Free it; one that is in progress is canceled, or an error is raised if it cannot be."""


Place = tuple[int, int, int]
"""Address, number of bytes, and number of the device."""


class NixlAgent(Protocol):
    """The methods of `nixl._api.nixl_agent` that are called, with its own names of arguments."""

    def register_memory(
        self, reg_list: Sequence[tuple[int, int, int, str]], mem_type: str | None = None, backends: Sequence[str] = ()
    ) -> Registered:
        """Make memory known to the network, and to peers with its metadata."""

    def deregister_memory(self, dereg_list: Registered, backends: Sequence[str] = ()) -> None:
        """Take it back."""

    def get_agent_metadata(self) -> bytes:
        """How others connect to this agent, and all its memory."""

    def get_partial_agent_metadata(
        self,
        descs: Registered,
        inc_conn_info: bool = False,
        backends: Sequence[str] = (),
    ) -> bytes:
        """Some of its memory."""

    def add_remote_agent(self, metadata: bytes) -> bytes | str:
        """Take the metadata of another agent, and return its name."""

    def get_xfer_descs(self, descs: Sequence[Place], mem_type: str | None = None) -> Descriptors:
        """Describe places in memory."""

    def initialize_xfer(
        self,
        operation: str,
        local_descs: Descriptors,
        remote_descs: Descriptors,
        remote_agent: str,
        notif_msg: bytes = b"",
        backends: Sequence[str] = (),
    ) -> TransferHandle:
        """Prepare a transfer, of which the other agent is notified when it is done."""

    def transfer(self, handle: TransferHandle, notif_msg: bytes = b"") -> str:
        """Start a transfer, and return its state."""

    def check_xfer_state(self, handle: TransferHandle) -> str:
        """The state of a transfer: `DONE`, `PROC` or `ERR`."""

    def send_notif(self, remote_agent_name: str, notif_msg: bytes) -> None:
        """Send some bytes that need no registered memory."""

    def get_new_notifs(self, backends: Sequence[str] = ()) -> Mapping[str, Sequence[bytes]]:
        """What has come since the last call, by the sender's name, in its order."""


_METHODS = tuple(name for name in vars(NixlAgent) if not name.startswith("_"))


class NixlLibrary(NamedTuple):
    """The package, imported.

    Attributes:
        agent: A new agent of this process.
        errors: Types of errors that its methods raise.
        version: Version of the package.
    """

    agent: NixlAgent
    errors: tuple[type[Exception], ...]
    version: str


def check_nixl() -> str:
    """Return the version of the package.

    Raises:
        RecipeError: It is missing, or of a version with which this does not work.
    """
    if find_spec("nixl") is None:
        raise RecipeError.at(KEY, f"'nixl' needs the package nixl: {how_to_install('nixl')}, {REMEDY}")
    try:
        found = version("nixl")
    except PackageNotFoundError:
        reason = f"'nixl' needs the package nixl, whose version is not known here: {how_to_install('nixl')}, {REMEDY}"
        raise RecipeError.at(KEY, reason) from None
    if int(found.split(".")[0]) != MAJOR:
        reason = f"'nixl' needs nixl {MAJOR}.x, not {found}: {how_to_install('nixl')}, {REMEDY}"
        raise RecipeError.at(KEY, reason)
    return found


def open_library(name: str) -> NixlLibrary:
    """Import the package, and make an agent of this process under some name.

    Raises:
        RecipeError: The package is missing or does not fit, or cannot be used on this machine.
    """
    found = check_nixl()
    os.environ.setdefault("NIXL_LOG_LEVEL", "WARN")  # it would print about each agent
    try:
        api, bindings = import_module("nixl._api"), import_module("nixl._bindings")
    except ImportError as error:
        raise RecipeError.at(KEY, f"nixl {found} cannot be imported ({error}): {how_to_install('nixl')}") from error
    missing = [method for method in _METHODS if not callable(getattr(api.nixl_agent, method, None))]
    if missing:
        reason = f"nixl {found} has no {', '.join(missing)}: {how_to_install('nixl')}, {REMEDY}"
        raise RecipeError.at(KEY, reason)
    found_types = [one for one in vars(bindings).values() if isinstance(one, type)]
    errors: tuple[type[Exception], ...] = tuple(one for one in found_types if issubclass(one, Exception))
    failures: tuple[type[Exception], ...] = (*errors, RuntimeError)
    try:
        # Its own thread would take a sixth of a core while nothing is sent: the endpoint has one that sleeps longer.
        agent = api.nixl_agent(name, api.nixl_agent_config(enable_prog_thread=False, backends=[BACKEND]))
    except failures as error:
        raise RecipeError.at(KEY, f"nixl {found} does not start on this machine ({error}): {REMEDY}") from error
    if BACKEND not in agent.backends:
        raise RecipeError.at(KEY, f"nixl {found} has no backend {BACKEND} here: {how_to_install('nixl')}, {REMEDY}")
    return NixlLibrary(cast("NixlAgent", agent), errors, found)
