# SPDX-License-Identifier: Apache-2.0
"""A consumer's record of one producer rank that sends a part of a transfer: its chunks, its slots and its deadline."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec

from pd_connector.errors import Cause
from pd_connector.plan.chunks import Chunk, chunk_limit, plan
from pd_connector.plan.route import Route
from pd_connector.protocol.consuming.incoming import Load, ProducerSession
from pd_connector.protocol.wire import messages


@dataclass(slots=True)
class IncomingStream:
    """The part of a transfer that one rank of the producer sends."""

    readers: int  # ranks of this engine that read from the producer's rank
    waits_for_final_token: bool = False  # it is complete only with the producer's final token
    deadline: float = float("inf")
    waits: bool = False  # its prefill need not have ended
    opened: bool = False  # `Open` was sent
    accepted: bool = False  # `Accept` has come
    provisional: bool = False  # the producer may still refuse it until the prefill has ended
    complete: bool = False  # the prefill has ended
    burst: bool = False  # it had ended before the first `Accept`
    slots: list[int] = field(default_factory=list)  # granted to it
    coded: bool = True  # along `ProducerSession.routes`; otherwise along `plain`
    routes: Sequence[Route] = ()  # along which it comes
    chunk_bytes: int = 0  # of a payload, at most
    planned: int = 0  # chunks
    missing: dict[int, Chunk] = field(
        default_factory=dict
    )  # chunks that are not in pages yet, by sequence
    first_landed: float = 0.0
    nbytes_after_first: int = 0

    @property
    def received(self) -> bool:
        """Whether all chunks are in pages, and the end of the prefill was reported if it is needed."""
        confirmed = self.complete or not (self.waits_for_final_token or self.provisional)
        return self.accepted and confirmed and not self.missing

    @property
    def early(self) -> bool:
        """Whether its prefill is under way, so that its slots may lie unused."""
        return self.waits and not self.complete

    @property
    def timeout(self) -> tuple[Cause, str]:
        """Cause and detail of its end when its deadline has passed."""
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
        """Plan chunks that fit the slots of both sides. Returns why that is not possible, as (cause, detail), or None."""
        self.coded, self.waits = coded, load.wait
        self.routes = session.routes if self.coded else session.plain
        states = next((route for route in self.routes if route.section is not None), None)
        if states is not None and not (load.state_token or load.compares):
            detail = f"layers {states.layers[0]}-{states.layers[-1]} keep states, and the request says not after which token"
            return Cause.GEOMETRY, detail
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
                state_token=load.state_token,
            )
        except ValueError as error:
            return Cause.GEOMETRY, str(error)
        self.missing = {chunk.sequence: chunk for chunk in chunks}
        self.planned = len(chunks)
        return None

    def opening(self, load: Load, session: ProducerSession, slots: list[int]) -> messages.Open:
        """The message that opens this stream, and grants these slots."""
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
            state_token=load.state_token or msgspec.UNSET,
            compares=load.compares or msgspec.UNSET,
        )

    def landed(self, nbytes: int, now: float) -> None:
        """A chunk has landed: count the bytes after the first chunk, for the link's rate."""
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
