"""A thin wrapper of NIXL's agent: registered memory, peers, reads, notifications.

Only one thread uses the agent. NIXL gets only addresses and lengths, built here from validated messages.
NIXL's own serialised descriptor lists are pickles and are never accepted. The only opaque data from a peer is
NIXL's agent metadata (connection details and remote keys).
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from nixl import _bindings as bindings
from nixl._api import nixl_agent, nixl_agent_config
from numpy.typing import NDArray

from engine.memory.caches import Caches
from kv_transfer.nixl.descriptors import Descriptors, Indices
from wire.errors import TransferError
from wire.messages.handoff import RankMemory, Region

log = logging.getLogger(__name__)

# When imported, NIXL gives its logger a handler that writes to stdout in NIXL's own format.
_nixl_log = logging.getLogger("nixl")
_nixl_log.handlers.clear()
_nixl_log.propagate = True
_nixl_log.setLevel(logging.WARNING)

# NIXL's exceptions have no common base class.
NIXL_ERRORS = (
    bindings.nixlBackendError,
    bindings.nixlCancelledError,
    bindings.nixlInvalidParamError,
    bindings.nixlMismatchError,
    bindings.nixlNotAllowedError,
    bindings.nixlNotFoundError,
    bindings.nixlNotSupportedError,
    bindings.nixlRemoteDisconnectError,
    bindings.nixlRepostActiveError,
    bindings.nixlUnknownError,
)

TransferState = Literal["busy", "done", "failed"]
Ranges = NDArray[np.uint64]
"""``[n, 3]``, one row per range: our address, the peer's address, bytes."""

# Without NVLink, as between processes on one GPU, UCX would not read by CUDA IPC: it would have the lender
# copy each block over TCP, a thousand times slower. UCX looks for the variable when an agent is made.
os.environ.setdefault("UCX_CUDA_IPC_ENABLE_GET_ZCOPY", "on")

_STATES: dict[str, TransferState] = {"PROC": "busy", "DONE": "done", "ERR": "failed"}


class TransferAgent:
    """NIXL's agent, named after this process's incarnation, with its registered tensors."""

    def __init__(self, name: str, tensors: Sequence[torch.Tensor]) -> None:
        # No progress thread: the transfer thread polls exactly while there is something to move.
        self._agent = nixl_agent(name, nixl_agent_config(enable_prog_thread=False, backends=["UCX"]))
        self.name = name
        self._lists: set[PreparedList] = set()
        self._registered: list[Any] = []
        for tensor in tensors:
            self.register(tensor)

    def register(self, tensor: torch.Tensor) -> None:
        """Lets NIXL write to a tensor, and lets peers read it that get :attr:`metadata` from now on."""
        if tensor.numel() > 0:
            self._registered.append(self._agent.register_memory([tensor]))

    @property
    def metadata(self) -> bytes:
        data: bytes = self._agent.get_agent_metadata()
        return data

    def add_peer(self, metadata: bytes) -> str:
        """Makes a peer's memory readable and returns the peer's name. Raises :class:`TransferError`."""
        try:
            name = self._agent.add_remote_agent(metadata)
            self._agent.make_connection(name)
        except NIXL_ERRORS as error:
            raise TransferError(f"NIXL can't connect to the peer: {error}") from error
        try:
            return name.decode() if isinstance(name, bytes) else str(name)
        except UnicodeDecodeError as error:  # NIXL accepts any bytes as a name
            with contextlib.suppress(*NIXL_ERRORS):
                self._agent.remove_remote_agent(name)
            raise TransferError(f"the name in the peer's metadata isn't UTF-8: {name!r:.80}") from error

    def remove_peer(self, name: str) -> None:
        """Disconnects from a peer. Reads of it that are under way don't stop: their bytes still land."""
        if name == self.name:
            return
        try:
            self._agent.remove_remote_agent(name)
        except NIXL_ERRORS as error:
            log.info("peer %s was already gone: %s", name, error)

    def read(self, peer: str, ranges: Ranges, *, local: Region, remote: Region) -> Read:
        """Posts one READ of all ``ranges``. Raises :class:`TransferError` if NIXL refuses it.

        ``local`` and ``remote`` give the kind of memory and the device of the addresses.
        """
        try:
            handle = self._agent.initialize_xfer(
                "READ",
                self._descriptors(ranges[:, 0], ranges[:, 2], local),
                self._descriptors(ranges[:, 1], ranges[:, 2], remote),
                peer,
            )
            state = _STATES[self._agent.transfer(handle)]
        except NIXL_ERRORS as error:
            raise TransferError(f"the read could not be started: {error}") from error
        return Read(self._agent, handle, state)

    def _descriptors(self, addresses: NDArray[np.uint64], lengths: NDArray[np.uint64], region: Region) -> Any:
        rows = np.empty((len(addresses), 3), dtype=np.uint64)  # np.stack takes 4 times as long
        rows[:, 0], rows[:, 1], rows[:, 2] = addresses, lengths, region.device_id
        return self._agent.get_xfer_descs(rows, region.memory)

    def prepare(self, peer: str | None, descriptors: Descriptors, region: Region) -> PreparedList:
        """Prepares a list of a peer's memory, or of our own, for :meth:`read_listed`.

        ``region`` gives the kind of memory and the device of all descriptors. Raises :class:`TransferError`.
        """
        addresses, lengths = descriptors[:, 0], descriptors[:, 1]
        try:
            handle = self._agent.prep_xfer_dlist(peer or "", self._descriptors(addresses, lengths, region))
        except NIXL_ERRORS as error:
            message = f"NIXL can't take a list of {len(descriptors)} descriptors: {error}"
            raise TransferError(message) from error
        prepared = PreparedList(handle)
        self._lists.add(prepared)
        return prepared

    def release(self, prepared: PreparedList) -> None:
        """Gives a list back to NIXL."""
        self._lists.remove(prepared)
        try:
            self._agent.release_dlist_handle(prepared.handle)
        except NIXL_ERRORS as error:
            log.info("a list of descriptors could not be released: %s", error)

    def read_listed(
        self, local: PreparedList, local_indices: Indices, remote: PreparedList, remote_indices: Indices
    ) -> Read:
        """Posts one READ from entries of ``remote`` to entries of ``local``.

        Raises :class:`TransferError` if NIXL refuses it.
        """
        try:
            handle = self._agent.make_prepped_xfer(
                "READ", local.handle, local_indices, remote.handle, remote_indices
            )
            state = _STATES[self._agent.transfer(handle)]
        except NIXL_ERRORS as error:
            raise TransferError(f"the read could not be started: {error}") from error
        return Read(self._agent, handle, state)

    def notify(self, peer: str, message: bytes) -> None:
        """Sends a notification. Raises :class:`TransferError` if the peer is gone."""
        try:
            self._agent.send_notif(peer, message)
        except NIXL_ERRORS as error:
            raise TransferError(f"the notification could not be sent: {error}") from error

    def poll(self) -> Iterable[tuple[str, bytes]]:
        """Lets NIXL make progress; returns the notifications that have arrived, with their senders' names."""
        by_peer: dict[str, list[bytes]] = self._agent.get_new_notifs()
        return [(sender, message) for sender, messages in by_peer.items() for message in messages]

    def close(self) -> None:
        for prepared in list(self._lists):
            self.release(prepared)
        for registered in self._registered:
            self._agent.deregister_memory(registered)
        self._registered = []
        del self._agent


@dataclass(frozen=True, eq=False)
class PreparedList:
    """A list of descriptors in NIXL; reads name its entries by index. This object doesn't keep the agent
    alive."""

    handle: Any


class Read:
    """One READ under way."""

    def __init__(self, agent: Any, handle: Any, state: TransferState) -> None:
        self._agent = agent
        self._handle = handle
        self._state = state

    def poll(self) -> TransferState:
        """Returns the read's state; "failed" also if the peer is gone."""
        if self._state == "busy":
            try:
                self._state = _STATES[self._agent.check_xfer_state(self._handle)]
            except NIXL_ERRORS as error:
                log.info("a read failed: %s", error)
                self._state = "failed"
        return self._state

    def release(self) -> None:
        """Gives NIXL's handle back. Call it only if the read is done or has failed, or its peer is
        removed."""
        try:
            self._agent.release_xfer_handle(self._handle)
        except NIXL_ERRORS as error:
            log.info("a transfer handle could not be released: %s", error)


def memory_of(caches: Caches, agent: TransferAgent) -> RankMemory:
    """Returns the message that tells other servers about a rank's pools, which are registered with
    ``agent``."""
    return RankMemory(
        caches.kv_layout, caches.state_layout, agent.metadata, region_of(caches.kv), region_of(caches.state)
    )


def region_of(tensor: torch.Tensor) -> Region:
    """Returns a contiguous tensor's place in memory, as NIXL addresses it."""
    return Region(
        address=tensor.data_ptr(),
        num_bytes=tensor.numel() * tensor.element_size(),
        device_id=max(tensor.get_device(), 0),
        memory="VRAM" if tensor.is_cuda else "DRAM",
    )
