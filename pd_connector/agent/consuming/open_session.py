# SPDX-License-Identifier: Apache-2.0
"""One connection to a producer, from dialling to its end."""

import math
from collections.abc import Hashable
from dataclasses import dataclass
from typing import NamedTuple

from pd_connector.control.sockets import Connection
from pd_connector.errors import Cause
from pd_connector.kv.model import ModelFacts
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
    last_wanted: float  # when something was last wanted of this producer
    path: ReceivePath | None = None  # since `Welcome`
    facts: ModelFacts | None = None  # of the producer, as it has told them up to now
    patience_s: float = math.inf  # of the producer, without a heartbeat
    # Since `Welcome`, until kernels for its routes are compiled: what was agreed on.
    agreed: ProducerSession | None = None
    has_event: bool = True  # something may have happened to the connection
    asked: bool = False  # a heartbeat has gone out since the producer last spoke
    # What the last heartbeat said, and the messages that say so: at rest they stay the same.
    named: tuple[str, ...] = ()
    next_ms: int = 0
    heartbeats: tuple[bytes, ...] = ()

    @property
    def timeout_cause(self) -> Cause:
        """What it means that the deadline has passed."""
        return Cause.UNREACHABLE if self.path is None else Cause.SESSION_LOST
