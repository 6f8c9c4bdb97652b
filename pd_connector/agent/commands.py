# SPDX-License-Identifier: Apache-2.0
"""What the engine tells its agent: requests that come, go, and have KV to hand over."""

import contextlib
import os
import queue
from collections.abc import Iterator
from typing import Any, NamedTuple

from pd_connector.errors import Cause
from pd_connector.kv.model import ModelFacts
from pd_connector.pool.jobs import Fill, Save
from pd_connector.protocol.consuming.incoming import Load
from pd_connector.protocol.producing.outgoing import Offer
from pd_connector.protocol.wire.peers import Peer


class Expect(NamedTuple):
    """A request that will offer this transfer has been queued in this engine."""

    transfer: str


class Computed(NamedTuple):
    """A prefill whose KV is on offer has come further: to `tokens` tokens, in the model's layers
    below `stop_layer`, or in all of them."""

    transfer: str
    request: str
    tokens: int
    stop_layer: int | None = None


class Revoke(NamedTuple):
    """The request was preempted: its pages are no longer its own."""

    transfer: str
    request: str
    # What was gathered in this step of the engine, or later, is in doubt; filled in by the agent.
    doubtful_since: float = float("inf")


class Withdraw(NamedTuple):
    """The request with this transfer has ended and leaves no pages to fetch, also where it has
    offered some before. Nothing is reported for it afterwards."""

    transfer: str
    request: str


class Hold(NamedTuple):
    """A request that will load this transfer waits in this engine. With `watch`, its engine wants
    to hear (`Held`) when there is KV to load. With `keep`, it is computed here to be compared."""

    request: str
    transfer: str
    peers: tuple[Peer, ...]
    watch: bool
    engine_id: str = ""  # the producer must be this engine; "": any
    keep: bool = False


class Drop(NamedTuple):
    """A request no longer wants its transfer."""

    request: str
    cause: Cause


class Distrust(NamedTuple):
    """An audit on some rank of this engine has found that KV of this producer is wrong."""

    engine_id: str  # of the producer
    why: str
    adapter: str = ""  # that the KV was computed with, by name and content; empty for none


class ChangeModel(NamedTuple):
    """The engine serves other weights from now on: KV of before must not be used with KV of after."""

    facts: ModelFacts


class ReadWeights(NamedTuple):
    """So many bytes of the files of the weights have been read now."""

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
        """Descriptor that turns readable when there is a command, or after `wake`."""

    def put(self, command: Command, fence: Any) -> None:
        """Add a command. `fence` orders the engine's device work before the command's copies."""
        self._commands.put((command, fence))
        self.wake()

    def wake(self) -> None:
        """Let the thread that polls `wakes` look again."""
        os.eventfd_write(self.wakes, 1)

    def drain(self) -> Iterator[tuple[Command, Any]]:
        """Commands that wait, each with its fence, in the order in which they were put."""
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self.wakes)
        while not self._commands.empty():
            yield self._commands.get()

    def clear(self) -> None:
        """Forget what waits."""
        for _ in self.drain():
            pass

    def close(self) -> None:
        os.close(self.wakes)
