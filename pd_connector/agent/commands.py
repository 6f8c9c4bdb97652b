# SPDX-License-Identifier: Apache-2.0
"""The commands that an engine submits to its agent, and their queue."""

import contextlib
import os
import queue
import threading
from collections.abc import Iterator
from typing import Any, NamedTuple

from pd_connector.errors import Cause
from pd_connector.kv.model import ModelFacts
from pd_connector.pool.jobs import Fill, Save
from pd_connector.protocol.consuming.incoming import Load
from pd_connector.protocol.producing.outgoing import Offer
from pd_connector.protocol.wire.peers import Peer


class Expect(NamedTuple):
    """This engine has queued a request that will offer this transfer."""

    transfer: str


class Computed(NamedTuple):
    """A prefill on offer has computed `tokens` tokens, in the model's layers below `stop_layer`; None: in all layers."""

    transfer: str
    request: str
    tokens: int
    stop_layer: int | None = None


class Revoke(NamedTuple):
    """The request was preempted: its pages belong to others now."""

    transfer: str
    request: str
    # Chunks gathered in this step of the engine or later are in doubt; the agent fills it in.
    doubtful_since: float = float("inf")


class Withdraw(NamedTuple):
    """The request with this transfer has ended and leaves no pages to fetch, although it may have offered some. No outcome
    follows."""

    transfer: str
    request: str


class Hold(NamedTuple):
    """A request waits in this engine and will load this transfer. With `watch`, the agent reports `Held` when there is
    KV to load. With `keep` the load is an audit: this engine computes the prompt, too."""

    request: str
    transfer: str
    peers: tuple[Peer, ...]
    watch: bool
    engine_id: str = ""  # the producer must be this engine; "": any
    keep: bool = False


class Drop(NamedTuple):
    """A request does not need its transfer any more."""

    request: str
    cause: Cause


class Distrust(NamedTuple):
    """An audit on a rank of this engine has found wrong KV of this producer."""

    engine_id: str  # of the producer
    why: str
    adapter: str = ""  # name and content of the adapter of this KV; empty for none


class ChangeModel(NamedTuple):
    """The engine serves other weights from now on. Earlier KV must not be used any more."""

    facts: ModelFacts


class ReadWeights(NamedTuple):
    """Progress of reading the weights' files, in bytes."""

    read_bytes: int
    nbytes: int  # of all files


class KnowWeights(NamedTuple):
    """All bytes of the weights that the engine serves have been read now: their fingerprint, and the draft model's."""

    weights: bytes
    draft: bytes


Command = (
    Expect
    | Offer
    | Computed
    | Revoke
    | Withdraw
    | Hold
    | Load
    | Drop
    | Distrust
    | ChangeModel
    | ReadWeights
    | KnowWeights
    | Save
    | Fill
)


class CommandQueue:
    """Commands on their way from the engine's thread to the agent's."""

    def __init__(self) -> None:
        self._commands: queue.SimpleQueue[tuple[Command, Any]] = queue.SimpleQueue()
        self.wakes = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        """Descriptor that becomes readable when there is a command, or after `wake`."""
        self._lock = threading.Lock()
        self._closed = False

    def put(self, command: Command, fence: Any) -> None:
        """Add a command. Pages are copied for it only after the device has done its work before `fence`."""
        self._commands.put((command, fence))
        self.wake()

    def wake(self) -> None:
        """Wake the thread that polls `wakes`. It does nothing after `close`: a thread that waited for a store can call
        it late, when the descriptor's number already belongs to another file."""
        with self._lock:
            if not self._closed:
                os.eventfd_write(self.wakes, 1)

    def drain(self) -> Iterator[tuple[Command, Any]]:
        """Take the waiting commands, each with its fence, in their order."""
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self.wakes)
        while not self._commands.empty():
            yield self._commands.get()

    def clear(self) -> None:
        """Forget the waiting commands."""
        for _ in self.drain():
            pass

    def close(self) -> None:
        with self._lock:
            self._closed = True
            os.close(self.wakes)
