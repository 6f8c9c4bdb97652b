# SPDX-License-Identifier: Apache-2.0
"""The record of one connection to a producer, from dialling to its end."""

import math
from collections.abc import Hashable
from dataclasses import dataclass
from typing import NamedTuple

from pd_connector.control.sockets import Connection
from pd_connector.errors import Cause
from pd_connector.protocol.consuming.incoming import ProducerSession
from pd_connector.protocol.wire.peers import Source
from pd_connector.transport.base import Transport


class ReceivePath(NamedTuple):
    """How chunks come from a producer."""

    transport: Transport
    expected: Hashable  # the transport's handle of the producer
    own: bool = False  # only this process writes into landing slots: it reads chunks from the producer's memory


@dataclass(slots=True)
class OpenSession:
    """One connection to a producer."""

    source: Source
    connection: Connection
    deadline: float  # for `Welcome`, then for the answer to a heartbeat
    last_wanted: float  # when a transfer last needed this producer
    path: ReceivePath | None = None  # since `Welcome`
    patience_s: float = math.inf  # the producer keeps leases this long without a heartbeat
    # The result of the handshake, from `Welcome` until kernels for its routes are compiled.
    agreed: ProducerSession | None = None
    has_event: bool = True  # the connection's monitor may have an event
    awaits_answer: bool = False  # a heartbeat was sent since the producer's last message
    # The content of the last heartbeat, and its messages. They are made again only if it changes.
    named: tuple[str, ...] = ()
    next_ms: int = 0
    heartbeats: tuple[bytes, ...] = ()

    @property
    def timeout_cause(self) -> Cause:
        """The cause of the session's end when its deadline has passed."""
        return Cause.UNREACHABLE if self.path is None else Cause.SESSION_LOST
