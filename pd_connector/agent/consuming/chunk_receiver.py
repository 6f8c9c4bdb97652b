# SPDX-License-Identifier: Apache-2.0
"""Takes chunks in: reads those that were left, gives the landed ones to the state machine, and places them."""

import logging
from collections.abc import Callable, Sequence
from functools import partial

from pd_connector.agent.confined import confined
from pd_connector.agent.consuming.open_session import OpenSession
from pd_connector.agent.consuming.open_sessions import OpenSessions
from pd_connector.agent.consuming.receive_pipeline import ReceivePipeline
from pd_connector.agent.page_gate import AbandonedError, RevokedError
from pd_connector.agent.resources import RankResources
from pd_connector.errors import Cause, MalformedMessageError
from pd_connector.memory.destination import Destination
from pd_connector.memory.device_bytes import Payload
from pd_connector.protocol.consuming.consumer import Consumer
from pd_connector.protocol.consuming.incoming import Action, PlaceChunk, PlaceStates
from pd_connector.protocol.wire import messages
from pd_connector.protocol.wire.header import decode_header
from pd_connector.transport.base import Landed

logger = logging.getLogger("pd_connector.agent.consuming.chunk_receiver")


class ChunkReceiver:
    """Used by the agent's thread only.

    Args:
        act: carries out what the state machine wants done.
    """

    def __init__(
        self,
        resources: RankResources,
        consumer: Consumer,
        receive_pipeline: ReceivePipeline,
        sessions: OpenSessions,
        act: Callable[[Sequence[Action], float], None],
    ) -> None:
        self._telemetry = resources.telemetry
        self._cache = resources.cache
        self._consumer = consumer
        self._receive_pipeline = receive_pipeline
        self._sessions = sessions
        self._act = act

    def read_left(
        self,
        session: OpenSession,
        left: messages.LeftInSlot | messages.LeftInPages,
        now: float,
    ) -> None:
        """Fetch a chunk that the producer left: from its send slot into the landing slot that was granted for it,
        or from its pages straight into ours.

        Raises TransportError if the read cannot start.
        """
        source = session.source
        wanted = self._consumer.granted(source, left.transfer, left.slot)
        if (
            session.path is None
            or not wanted
            or self._receive_pipeline.is_reading(source, left.slot)
        ):
            self._sessions.send(session, messages.Taken(left.number))
            return
        pieces = self._receive_pipeline.begin_read(source, session.path, left)
        if pieces is not None:
            self._take_in(Landed(left.header, left.slot, pieces), now)

    def landed(self, landed: Sequence[Landed], now: float) -> None:
        """Chunks have landed; each counts once it fits the plan and its checksum is right."""
        for number, landing in enumerate(landed, 1):
            following = landed[number] if number < len(landed) else None
            if following and not following.problem and isinstance(following.payload, Payload):
                self._cache.scatter_next(following.payload)
            give_up = partial(self._give_up, landing, now)
            with confined(self._telemetry, "taking in a chunk", give_up):
                self._take_in(landing, now)
        self._cache.settle()

    def destination(self, encoded: bytes, slot: int, nbytes: int) -> Destination | None:
        """The pages of a chunk that begins to arrive, if it may be decrypted into them."""
        try:
            header = decode_header(encoded)
        except MalformedMessageError:
            return None  # it will be dropped when it has landed
        place = self._consumer.landings.expected(header, slot) if header.nbytes == nbytes else None
        return (
            self._receive_pipeline.destination(place, self._consumer.landings.awaits)
            if place
            else None
        )

    def place(self, place: PlaceChunk) -> tuple[Cause | None, str]:
        """Copy a chunk into its pages; returns what was wrong with it."""
        session = self._sessions.get(place.source)
        assert session is not None
        assert session.path is not None  # it has been granted the slot
        path = session.path
        return self._placed(
            place.header.transfer, "chunk", lambda: self._receive_pipeline.place(place, path)
        )

    def place_states(self, states: PlaceStates) -> tuple[Cause | None, str]:
        """Write the states of a load into their pages; returns what went wrong."""

        def write() -> tuple[Cause | None, str]:
            self._receive_pipeline.place_states(states.request)
            return None, ""

        return self._placed(states.transfer, "state", write)

    def _placed(
        self, transfer: str, what: str, place: Callable[[], tuple[Cause | None, str]]
    ) -> tuple[Cause | None, str]:
        try:
            return place()
        except RevokedError:
            return Cause.ABORTED, "the request was dropped"
        except AbandonedError:
            raise
        except Exception as error:  # a codec or transport, which may be another package's
            logger.exception("a %s of transfer %s was not placed", what, transfer)
            self._telemetry.count("session_errors")
            return Cause.INTERNAL, f"the {what} could not be decoded or copied: {error!r}"

    def _take_in(self, landing: Landed, now: float) -> None:
        slot, problem = landing.slot, landing.problem
        try:
            header = decode_header(landing.header)
        except MalformedMessageError as error:
            # Not the exception itself: its frames would keep the slot's memory.
            logger.warning("chunk with an unreadable header dropped: %s", str(error))
            self._telemetry.count("stale_chunks", cause=Cause.MALFORMED_MESSAGE)
            self._tell_taken(slot)
            return
        if problem:
            logger.warning("chunk of transfer %s not read: %s", header.transfer, problem)
        actions = self._consumer.landings.landed(
            header, slot, landing.payload, now, problem=problem, verified=landing.verified
        )
        if not actions:
            self._telemetry.count("stale_chunks", cause=Cause.UNKNOWN_TRANSFER)
        self._act(actions, now)
        self._tell_taken(slot)

    def _give_up(self, landing: Landed, now: float) -> None:
        """An error with a chunk ends its transfer."""
        transfer = decode_header(landing.header).transfer
        detail = "an unexpected error, see this log"
        self._act(self._consumer.give_up(transfer, detail, now), now)
        self._tell_taken(landing.slot)

    def _tell_taken(self, slot: int) -> None:
        """Tell the producer that a chunk has been read, if one was left for this landing slot."""
        for source, taken in self._receive_pipeline.end_read(slot):
            if session := self._sessions.get(source):
                self._sessions.send(session, taken)
