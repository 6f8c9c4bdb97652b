# SPDX-License-Identifier: Apache-2.0
"""Sends the chunks of a producer: which is next, whether its pages are kept, and how it ended."""

import logging
from collections.abc import Callable, Iterator

from pd_connector.agent.page_gate import RevokedError
from pd_connector.agent.producing.consumer_sessions import ConsumerSessions
from pd_connector.agent.producing.in_flight import Key
from pd_connector.agent.producing.send_pipeline import SendPipeline
from pd_connector.agent.resources import RankResources
from pd_connector.errors import Cause, TransportError
from pd_connector.protocol.producing.outgoing import Action, SendChunk
from pd_connector.protocol.producing.producer import Producer
from pd_connector.protocol.wire import messages

logger = logging.getLogger("pd_connector.agent.producing.chunk_sender")


class ChunkSender:
    """Used by the agent's thread only.

    Args:
        say: sends a message to a consumer.
        act: carries out what the state machine wants done.
    """

    def __init__(
        self,
        resources: RankResources,
        producer: Producer,
        send_pipeline: SendPipeline,
        sessions: ConsumerSessions,
        say: Callable[[bytes, messages.Message], None],
        act: Callable[[list[Action]], None],
    ) -> None:
        self._telemetry = resources.telemetry
        self._steps = resources.steps
        self._producer = producer
        self._send_pipeline = send_pipeline
        self._sessions = sessions
        self._say = say
        self._act = act

    def ready(self) -> Iterator[SendChunk]:
        """Chunks that can be sent now. Each must be sent before the next is asked for."""
        compiling = self._sessions.compiling
        while not self._send_pipeline.full:
            send = self._producer.next_send({*self._send_pipeline.backpressured, *compiling})
            if send is None:
                return
            yield send

    def send(self, send: SendChunk, now: float) -> None:
        """Send a chunk, if its pages are still kept."""
        if not send.kept:
            self._producer.unsend(send)
            detail = f"tokens {send.chunk.first_token}-{send.chunk.stop_token} are not kept"
            self._act(self._producer.fail(send.session, send.transfer, Cause.WINDOW, detail))
            return
        self._begin_next()
        try:
            message = self._send_pipeline.post(send, self._sessions[send.session].path, now)
        except RevokedError:
            self._producer.unsend(send)
            return
        except TransportError as error:
            # Not the exception itself: its frames would keep the slot's memory.
            logger.warning("write for transfer %s cannot start: %s", send.transfer, str(error))
            self._act(self._producer.written(send.session, send.transfer, False, str(error)))
            return
        self._producer.gathered(send, self._steps.count)
        if send.early:  # counted first: who sees all chunks sees those that were early
            self._telemetry.count("early_chunks")
        self._telemetry.count("sent_chunks")
        if message is not None:
            self._say(send.session, message)

    def settle(self) -> None:
        """Nothing that was begun early is under way any more. Must follow the last `send` of a turn."""
        self._send_pipeline.settle()

    def _begin_next(self) -> None:
        """Have a device gather the chunk that probably follows while this one is posted."""
        if not self._send_pipeline.begins_early:
            return
        following = self._producer.peek_send(
            {*self._send_pipeline.backpressured, *self._sessions.compiling}
        )
        if following is not None and following.kept:
            self._send_pipeline.post_next(following, self._sessions[following.session].path)

    def chunk_ended(self, key: Key, ok: bool, detail: str) -> None:
        """A chunk has arrived, or certainly will not."""
        in_flight = self._send_pipeline.chunk_ended(key)
        if in_flight is None:
            return
        session, transfer = in_flight.session, in_flight.transfer
        if ok:
            self._telemetry.count("sent_bytes", in_flight.nbytes)
        else:
            logger.warning("chunk of transfer %s failed: %s", transfer, detail)
        self._act(self._producer.written(session, transfer, ok, detail))
