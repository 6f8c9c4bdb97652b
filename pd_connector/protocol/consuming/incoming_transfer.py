# SPDX-License-Identifier: Apache-2.0
"""A consumer's record of one transfer of one request."""

from collections.abc import Sequence
from dataclasses import dataclass

from pd_connector.errors import Cause
from pd_connector.kv.geometry import Geometry, Shard
from pd_connector.plan.route import meet
from pd_connector.protocol.consuming.audit import Comparison
from pd_connector.protocol.consuming.incoming import Action, Finished, Held, Load
from pd_connector.protocol.consuming.incoming_stream import IncomingStream
from pd_connector.protocol.wire import messages
from pd_connector.protocol.wire.final_token import FinalToken
from pd_connector.protocol.wire.header import ChunkHeader
from pd_connector.protocol.wire.peers import Peer, Source


@dataclass(slots=True)
class IncomingTransfer:
    """One transfer of one request, with a stream from each producer rank that holds a part of it."""

    request: str
    transfer: str
    streams: dict[Source, IncomingStream]
    load: Load | None = None  # None: the request waits for pages
    watched: bool = False  # the engine waits for `Held`
    keep: bool = False  # the producer must keep its pages until they were compared
    began: float = 0.0
    deadline: float = float("inf")  # of a watched hold
    engine_id: str = ""  # the producer must be this engine; "": any
    since: float = 0.0  # when it began to wait for its prefill
    nbytes: int = 0
    chunks: int = 0
    final_token: FinalToken | None = None
    comparison: Comparison | None = None  # of a load that compares

    @property
    def next_deadline(self) -> float:
        """The earliest of its deadlines and its streams' deadlines."""
        return min([self.deadline, *(stream.deadline for stream in self.streams.values())])

    @property
    def received(self) -> bool:
        """Whether every stream is received."""
        return all(stream.received for stream in self.streams.values())

    def accepted(self, source: Source, complete: bool, now: float) -> bool:
        """A rank has accepted. Returns whether this is the first message that its prefill has ended."""
        stream = self.streams[source]
        news = complete and not stream.complete
        if news:
            stream.complete = True
            stream.burst = not stream.accepted
            if self.load is not None and self.load.wait:
                self.began = now  # the prefill took until now, not the transfer
        stream.accepted = True
        return news

    def placed(self, source: Source, header: ChunkHeader) -> None:
        """A chunk is in its pages and verified."""
        del self.streams[source].missing[header.sequence]
        self.nbytes += header.nbytes
        self.chunks += 1

    def last_message(self, source: Source, cause: Cause | None) -> messages.Done | messages.Cancel:
        """The last message to a rank."""
        if cause is None:
            return messages.Done(self.transfer)
        return messages.Cancel(self.transfer, cause, self.streams[source].readers)

    def outcome(self, cause: Cause | None, detail: str, now: float) -> list[Action]:
        """The report to the engine at the end."""
        if self.load is not None:
            return [
                Finished(
                    self.request,
                    cause,
                    detail,
                    nbytes=self.nbytes,
                    chunks=self.chunks,
                    seconds=now - self.began,
                    final_token=self.final_token,
                    comparison=self.comparison,
                    source=next(iter(self.streams), None),
                )
            ]
        return [Held(self.request, cause, detail)] if self.watched else []

    def check_integrity(self) -> None:
        """Raises RuntimeError if it is in no legal state."""
        if self.load is not None:
            if (self.load.request, self.load.transfer) != (self.request, self.transfer):
                raise RuntimeError(f"loads {self.load.transfer} for request {self.load.request}")
            if self.watched or not self.streams:
                raise RuntimeError("is being loaded while it is watched, or from no producer")
            if self.received:
                raise RuntimeError("all KV has been received, and the load has not ended")
        for source, stream in self.streams.items():
            if stream.opened and self.load is None:
                raise RuntimeError(f"{source} was asked for KV, but nothing is loaded")
            try:
                stream.check_integrity()
            except RuntimeError as error:
                raise RuntimeError(f"{source}: {error}") from None


def streams(
    peers: Sequence[Peer],
    geometry: Geometry,
    shards: Sequence[Shard],
    *,
    waits_for_final_token: bool,
) -> dict[Source, IncomingStream]:
    """A stream for each rank of a producer that holds a part of this rank's shard.

    Args:
        peers: all ranks of the producer.
        geometry: geometry of this rank.
        shards: what all ranks of this engine hold.
        waits_for_final_token: see `IncomingStream`.
    """
    heads = frozenset[int]().union(*(group.shares for group in geometry.groups))
    return {
        peer.source: IncomingStream(
            sum(meet(peer.shard, shard, heads) for shard in shards), waits_for_final_token
        )
        for peer in peers
        if meet(peer.shard, geometry.shard, heads)
    }
