# SPDX-License-Identifier: Apache-2.0
"""What the engine tells its agent: requests that come, go, and have KV to hand over."""

from typing import NamedTuple

from pd_connector.errors import Cause
from pd_connector.protocol.incoming import Load
from pd_connector.protocol.outgoing import Offer
from pd_connector.protocol.peers import Peer


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


class Withdraw(NamedTuple):
    """The request with this transfer has ended and leaves no pages to fetch."""

    transfer: str
    request: str


class Hold(NamedTuple):
    """A request that will load this transfer waits in this engine; with `watch`, until it is told
    that there is KV to load."""

    request: str
    transfer: str
    peers: tuple[Peer, ...]
    watch: bool


class Drop(NamedTuple):
    """A request no longer wants its transfer."""

    request: str
    cause: Cause


Command = Expect | Offer | Computed | Revoke | Withdraw | Hold | Load | Drop
