# SPDX-License-Identifier: Apache-2.0
"""What a connection brings."""

from typing import NamedTuple

from pd_connector.memory.destination import Destination
from pd_connector.transport.tcp.frames import ChunkHead


class Greeted(NamedTuple):
    """The peer expects to be written to."""


class Acked(NamedTuple):
    """The chunk with this token has landed at the peer."""

    token: int


class Arrived(NamedTuple):
    """A chunk has landed here."""

    head: ChunkHead
    payload: memoryview | Destination  # where it lies already
    verified: bool  # by the tags of all its records


Event = Greeted | Acked | Arrived
