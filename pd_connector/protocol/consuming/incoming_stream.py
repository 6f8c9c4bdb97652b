# SPDX-License-Identifier: Apache-2.0
"""What a consumer knows of one rank of a producer that sends it a part of a transfer."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from pd_connector.errors import Cause
from pd_connector.plan.chunks import Chunk, chunk_limit, plan
from pd_connector.plan.route import Route
from pd_connector.protocol.consuming.incoming import Load, ProducerSession
from pd_connector.protocol.wire import messages


@dataclass(slots=True)
class IncomingStream:
    """What one rank of the producer sends."""

    readers: int  # ranks of this engine that read from it
    waits_for_final_token: bool = False  # not received before the prefill has ended, and told so
    deadline: float = float("inf")
    waits: bool = False  # for a prefill that need not have ended
    opened: bool = False
    accepted: bool = False
    provisional: bool = False  # not received before the prefill has ended: it may be refused
    complete: bool = False  # the prefill has ended
    burst: bool = False  # it had ended before anything was sent
    slots: list[int] = field(default_factory=list)  # granted to it
    coded: bool = True  # not all of it in `raw`
    routes: Sequence[Route] = ()  # on which it comes
    chunk_bytes: int = 0  # at most
    planned: int = 0  # chunks
    missing: dict[int, Chunk] = field(default_factory=dict)  # those not in pages yet, by sequence
    first_landed: float = 0.0
    nbytes_after_first: int = 0

    @property
    def received(self) -> bool:
        """Whether all that it sends is in pages, and all that it tells has been told."""
        told = self.complete or not (self.waits_for_final_token or self.provisional)
        return self.accepted and told and not self.missing

    @property
    def early(self) -> bool:
        """Whether its slots may lie unused, because its prefill is under way."""
        return self.waits and not self.complete

    @property
    def timeout(self) -> tuple[Cause, str]:
        """What a passed deadline means."""
        if not self.opened:
            return Cause.UNREACHABLE, "no session within connect_timeout_s"
        if not self.complete:
            late = "the prefill did not end within wait_timeout_s"
            mute = "the request says that the prefill has ended; its producer has not confirmed that within stall_timeout_s"
            return Cause.WAIT_TIMEOUT, late if self.waits else mute
        return Cause.STALLED, "no chunk within stall_timeout_s"

    def prepare(
        self, load: Load, session: ProducerSession, slot_bytes: int, *, coded: bool
    ) -> tuple[Cause, str] | None:
        """Plan chunks that fit the slots of both sides; returns why there is no plan, if so."""
        self.coded, self.waits = coded, load.wait
        self.routes = session.routes if self.coded else session.plain
        self.chunk_bytes = chunk_limit(
            self.routes,
            load.stop_token - load.first_token,
            min(session.slot_bytes, slot_bytes),
            session.bytes_per_s,
            read=session.read,
            direct=session.direct,
        )
        try:
            chunks = plan(
                self.routes,
                load.first_token,
                load.stop_token,
                self.chunk_bytes,
                streamed=load.wait,
            )
        except ValueError as error:
            return Cause.GEOMETRY, str(error)
        self.missing = {chunk.sequence: chunk for chunk in chunks}
        self.planned = len(chunks)
        return None

    def opening(self, load: Load, session: ProducerSession, slots: list[int]) -> messages.Open:
        """What asks its producer for this stream, into these slots to begin with."""
        return messages.Open(
            transfer=load.transfer,
            identity=load.identity,
            first_token=load.first_token,
            stop_token=load.stop_token,
            wait=load.wait,
            slots=slots,
            chunk_bytes=self.chunk_bytes,
            readers=self.readers,
            bytes_per_s=int(session.bytes_per_s or 0),
            direct=session.direct,
            provisional=True,
            coded=self.coded,
        )

    def landed(self, nbytes: int, now: float) -> None:
        """Take note of the link's speed: of what came after the first chunk."""
        if self.first_landed:
            self.nbytes_after_first += nbytes
        else:
            self.first_landed = now

    def check_integrity(self) -> None:
        """Raises RuntimeError if it is in no legal state."""
        if self.accepted and not self.opened:
            raise RuntimeError("accepted, but was never asked")
        if self.complete and not self.accepted:
            raise RuntimeError("has sent all, but never accepted")
        if (self.slots or self.planned) and not self.opened:
            raise RuntimeError(f"has slots {self.slots}, but was never asked")
        if len(self.missing) > self.planned:
            raise RuntimeError(f"{len(self.missing)} chunks are missing of {self.planned}")
        if len(self.slots) > len(self.missing):
            raise RuntimeError(f"has slots {self.slots} for {len(self.missing)} chunks")
        if len(set(self.slots)) < len(self.slots):
            raise RuntimeError(f"has a slot twice: {self.slots}")
