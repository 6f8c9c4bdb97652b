# SPDX-License-Identifier: Apache-2.0
"""A consumer's fetch of a transfer: the messages to its producers, from the first to the last."""

from collections import deque

from pd_connector.config import Config
from pd_connector.errors import Cause
from pd_connector.kv.geometry import Geometry
from pd_connector.plan.coverage import uncovered
from pd_connector.protocol.consuming.audit import AuditBook
from pd_connector.protocol.consuming.grants import Grants
from pd_connector.protocol.consuming.incoming import (
    Action,
    Dial,
    PlaceStates,
    ProducerSession,
    Stalled,
    Tell,
)
from pd_connector.protocol.consuming.incoming_transfer import IncomingTransfer
from pd_connector.protocol.consuming.incoming_transfers import IncomingTransfers
from pd_connector.protocol.consuming.peer_backoff import PeerBackoff
from pd_connector.protocol.wire import messages
from pd_connector.protocol.wire.peers import Source

_MOST_UNSENT = 1024
"""Most last messages that are kept for a producer without a session. The oldest are forgotten first."""


class Fetches:
    """The fetches of a consumer. Used by one thread.

    Args:
        geometry: geometry of this rank.
        sessions: with producers, as they come and go.
        needs_final_token: a load is of no use without the producer's final token.
        audits: results of audits; None if producers need not pass one.
    """

    def __init__(
        self,
        config: Config,
        geometry: Geometry,
        transfers: IncomingTransfers,
        sessions: dict[Source, ProducerSession],
        grants: Grants,
        *,
        needs_final_token: bool,
        audits: AuditBook | None,
    ) -> None:
        self._config = config
        self._geometry = geometry
        self._transfers = transfers
        self._sessions = sessions
        self._grants = grants
        self._needs_final_token = needs_final_token
        self._audits = audits
        self._stalls = PeerBackoff(config.stall_timeout_s)
        # Last messages to producers without a session, each with the time when it was due.
        self._unsent: dict[Source, deque[tuple[float, messages.Done | messages.Cancel]]] = {}

    def ask_all(self, incoming: IncomingTransfer, now: float) -> list[Action]:
        """Ask every producer of the transfer."""
        return [action for s in incoming.streams for action in self.ask(incoming, s, now)]

    def ask(self, incoming: IncomingTransfer, source: Source, now: float) -> list[Action]:
        """Send a producer the next message about a transfer. Without a session, dial first."""
        session = self._sessions.get(source)
        if session is None:
            return [Dial(source, len(incoming.streams))]
        if incoming.transfer not in self._transfers:  # ended by a failure with another rank
            return []
        if incoming.engine_id not in ("", session.engine_id):
            detail = f"engine {session.engine_id} answers, {incoming.engine_id} was wanted"
            return self.finish(incoming, Cause.UNREACHABLE, f"{detail} (restarted since?)", now)
        if incoming.watched or (incoming.keep and incoming.load is None):
            return [Tell(source, messages.Watch(incoming.transfer, incoming.keep))]
        if incoming.load is None or incoming.streams[source].opened:
            return []
        return self._open(incoming, source, now)

    def _open(self, incoming: IncomingTransfer, source: Source, now: float) -> list[Action]:
        load, stream, session = incoming.load, incoming.streams[source], self._sessions[source]
        assert load is not None
        coded = session.coded
        if self._audits is not None:
            producer = session.counterpart(source, coded=coded)
            if problem := self._audits.problem(producer, load.adapter, compares=load.compares):
                return self.finish(incoming, *problem, now)
            if load.compares and self._audits.has_passed(producer, load.adapter):
                # This path has passed: take the other one, if that has not.
                coded ^= self.unaudited(source, load.adapter) != ""
        if problem := stream.prepare(load, session, self._config.slot_bytes, coded=coded):
            return self.finish(incoming, *problem, now)
        if pause := self._stalls.pause((source, session.epoch), now):
            return self.finish(incoming, Cause.STALLED, pause, now)
        self._stalls.tries((source, session.epoch), now)
        stream.opened = True
        limit_s = self._config.wait_timeout_s if load.wait else self._config.stall_timeout_s
        stream.deadline = now + limit_s
        self._transfers.schedule(incoming)
        # A prefill that has not ended would leave its slots unused.
        most = 0 if load.wait else stream.planned
        slots = self._grants.grant(load.transfer, source, stream, most)
        return [Tell(source, stream.opening(load, session, slots))]

    def unaudited(self, source: Source, adapter: str) -> str:
        """See `Consumer.unaudited`."""
        session = self._sessions.get(source)
        if self._audits is None or session is None:
            return ""
        for counterpart in session.counterparts(source):
            if not self._audits.has_passed(counterpart, adapter):
                return counterpart.path
        return ""

    def accept(self, source: Source, message: messages.Accept, now: float) -> list[Action]:
        """See `Consumer.accept`."""
        incoming = self._transfers.get(message.transfer)
        stream = incoming.streams.get(source) if incoming else None
        if incoming is None or stream is None or not stream.opened:
            return []
        stream.provisional = message.provisional and not message.complete
        # Chunks into slots granted with `Open` may have overtaken this message.
        if message.chunks != stream.planned:
            detail = f"producer plans {message.chunks} chunks, {stream.planned} wanted"
            return self.finish(incoming, Cause.CHUNK_MISMATCH, detail, now)
        if message.final_token is not None and incoming.load is not None:
            if problem := message.final_token.problem(incoming.transfer, incoming.load.identity):
                return self.finish(incoming, *problem, now)
            incoming.final_token = message.final_token
        if incoming.accepted(source, message.complete, now):
            stream.deadline = now + self._config.stall_timeout_s
            self._transfers.schedule(incoming)
        return self.go_on(incoming, source, now)

    def go_on(self, incoming: IncomingTransfer, source: Source, now: float) -> list[Action]:
        """Let a rank send more. When all ranks have sent their parts, the load ends."""
        stream = incoming.streams[source]
        if not stream.received:
            self._grants.wait(incoming.transfer, source, stream)
            return self._grants.grant_free(now)
        if stream.burst:
            seconds = now - stream.first_landed
            session = self._sessions[source]
            session.measured(stream.nbytes_after_first, seconds, coded=stream.coded)
        if not incoming.received:
            return self._grants.grant_free(now)
        routes = tuple(tuple(stream.routes) for stream in incoming.streams.values())
        if missing := uncovered(routes, self._geometry):
            detail = f"no rank of the producer has sent {missing}"
            return self.finish(incoming, Cause.GEOMETRY, detail, now)
        if incoming.comparison is not None:
            producers = [
                self._sessions[source].counterpart(source, coded=stream.coded)
                for source, stream in incoming.streams.items()
            ]
            wrong = incoming.comparison.judge(producers, [r for pair in routes for r in pair])
            cause, detail = wrong or (None, "")
            return self.finish(incoming, cause, detail, now)
        if self._needs_final_token and incoming.final_token is None:
            detail = "the producer sent KV alone, and this engine needs its final token, too"
            return self.finish(incoming, Cause.WORDS, detail, now)
        if incoming.load is not None and incoming.load.state_token:
            return [PlaceStates(incoming.transfer, incoming.request)]
        return self.finish(incoming, None, "", now)

    def look_after(self, incoming: IncomingTransfer, now: float) -> list[Action]:
        """End the fetch if a deadline of it has passed."""
        if incoming.deadline <= now:
            detail = "no KV within wait_timeout_s"
            return self.finish(incoming, Cause.WAIT_TIMEOUT, detail, now)
        for source, stream in incoming.streams.items():
            if stream.received or (stream.complete and not stream.slots):
                stream.deadline = now + self._config.stall_timeout_s  # it waits for us
            if stream.deadline <= now:
                cause, detail = stream.timeout
                if cause is not Cause.STALLED:
                    return self.finish(incoming, cause, detail, now)
                self.stalled(source, self._sessions[source], incoming, now)
                return [*self.finish(incoming, cause, detail, now), Stalled(source)]
        self._transfers.schedule(incoming)
        return []

    def stalled(
        self, source: Source, session: ProducerSession, incoming: IncomingTransfer, now: float
    ) -> None:
        """A transfer has stalled: no chunk came from this producer. Either side can notice it."""
        self._stalls.waited((source, session.epoch), incoming.began, now)

    def placed(self, source: Source) -> None:
        """A chunk of this producer was verified."""
        self._stalls.answered((source, self._sessions[source].epoch))

    def pulse(self, source: Source, engine_age_s: float, now: float) -> list[Action]:
        """If the producer's engine has made no step for `engine_timeout_s`, end the transfers that have waited for its
        prefill for that long."""
        limit_s = self._config.engine_timeout_s
        if engine_age_s <= limit_s:
            return []
        actions: list[Action] = []
        detail = f"the producer's engine has made no step for {engine_age_s:.0f} s"
        for transfer in self._transfers.of_source(source):
            incoming = self._transfers.get(transfer)
            if incoming is None or incoming.since + limit_s > now:
                continue
            waits = incoming.load is not None and not incoming.streams[source].complete
            if waits or incoming.watched:
                actions += self.finish(incoming, Cause.ENGINE_HUNG, detail, now)
        return actions

    def finish(
        self, incoming: IncomingTransfer, cause: Cause | None, detail: str, now: float
    ) -> list[Action]:
        """End the fetch: tell its producers, take its slots back, and report to the engine.

        Args:
            cause: None if all KV has come.
        """
        transfer = incoming.transfer
        self._transfers.remove(transfer)
        until = now + self._config.lease_s
        actions: list[Action] = []
        for source, stream in incoming.streams.items():
            message = incoming.last_message(source, cause)
            if source in self._sessions:
                actions.append(Tell(source, message))
            else:
                unsent = self._unsent.setdefault(source, deque(maxlen=_MOST_UNSENT))
                unsent.append((now, message))
            cancelled = cause is not None and source in self._sessions
            self._grants.end_stream(transfer, source, stream, until, cancelled=cancelled)
        return actions + incoming.outcome(cause, detail, now) + self._grants.grant_free(now)

    def send_unsent(self, source: Source) -> list[Action]:
        """Send the last messages of transfers that wait for a session with this producer, except for transfers that
        have begun again."""
        unsent = self._unsent.pop(source, ())
        return [Tell(source, last) for _, last in unsent if last.transfer not in self._transfers]

    def forget_unsent(self, now: float) -> None:
        """Drop last messages that have waited for `lease_s`: the producer's leases have ended by now."""
        for source, unsent in list(self._unsent.items()):
            while unsent and unsent[0][0] + self._config.lease_s <= now:
                unsent.popleft()
            if not unsent:
                del self._unsent[source]

    def check_integrity(self) -> None:
        """Raises RuntimeError if messages wait although their producer has a session."""
        if unsent := self._unsent.keys() & self._sessions.keys():
            raise RuntimeError(f"messages to {sorted(unsent)} are kept back, and sessions stand")
