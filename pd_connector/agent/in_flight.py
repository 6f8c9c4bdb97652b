# SPDX-License-Identifier: Apache-2.0
"""A chunk on its way to a consumer, and the way that it takes."""

from collections.abc import Hashable
from typing import NamedTuple

from pd_connector.transport.base import Transport

OFFERED = "offered"
"""Stands for a transport's name in the keys of chunks that the consumer reads."""

Key = tuple[str, int]
"""A transport's name and its token for a write, or `OFFERED` and the number of the offer."""


class SendPath(NamedTuple):
    """How chunks get to a consumer."""

    transport: Transport
    link: Hashable  # of the transport
    read: bool  # chunks are offered to be read


class InFlight(NamedTuple):
    """A chunk on its way."""

    session: bytes
    transfer: str
    send_slot: int | None  # None: it is sent or read from where its pages lie
    nbytes: int
    deadline: float
    most: float = float("inf")  # such chunks that its session may have at a time
    in_order: bool = False  # it arrives after the chunks that were written to its session before it
