# SPDX-License-Identifier: Apache-2.0
"""Which peers get heartbeats, which have answered, and when a peer is looked at."""

from collections.abc import Iterator
from typing import Any

import pytest
import zmq
from support.agents import until

from pd_connector.agent.consuming.open_session import OpenSession
from pd_connector.agent.consuming.open_sessions import OpenSessions
from pd_connector.config import Config
from pd_connector.control.addresses import readable
from pd_connector.control.sockets import Connection
from pd_connector.protocol.wire.peers import Source

NOW = 100.0
CONFIG = Config(session_timeout_s=10.0)


class Standing:
    """One session with a producer that is played here."""

    def __init__(self, context: "zmq.Context[zmq.Socket[bytes]]") -> None:
        self._context = context
        self.producer = context.socket(zmq.ROUTER)
        port = self.producer.bind_to_random_port("tcp://127.0.0.1")
        self.sessions = OpenSessions(CONFIG, self)  # type: ignore[arg-type]
        source = Source("127.0.0.1", port, "")
        self.sessions.dial(source, 1, NOW)
        found = self.sessions.get(source)
        assert found is not None
        found.path = object()  # type: ignore[assignment]
        self.session: OpenSession = found
        self.sessions.heard(found)
        self.ask(NOW, hurried=True)
        self.answer()
        until(lambda: self.sessions.urgent or self.session in self.sessions.ready())
        self.sessions.received(found)
        self.sessions.heard(found)
        self.sessions.due(NOW + CONFIG.connect_timeout_s)  # of the handshake
        self.sessions.ready()

    def dial(self, source: Source) -> Connection:
        """As a dialler does."""
        return Connection(self._context, source.host, source.port, None)

    def ask(self, now: float, *, hurried: bool = False) -> None:
        self.sessions.send_heartbeats(lambda _: (), now, 1.0, hurried=hurried)

    def answer(self) -> None:
        assert self.producer.poll(60_000), "a heartbeat has come"
        sender, _ = self.producer.recv_multipart()
        self.producer.send_multipart([sender, b"answer"])

    def miss(self) -> None:
        """Wait for the answer; ZeroMQ's descriptor does not tell of it any more, as when a message is sent
        at that moment."""
        until(lambda: readable(self.session.connection.socket))

    def close(self) -> None:
        self.sessions.close()
        self.producer.close(linger=0)


@pytest.fixture
def standing() -> Iterator[Standing]:
    context: Any = zmq.Context()
    made = Standing(context)
    yield made
    made.close()
    context.destroy(linger=0)


def test_an_answer_of_which_the_descriptor_does_not_tell_is_found_a_moment_later(
    standing: Standing,
) -> None:
    sessions = standing.sessions
    standing.ask(NOW)
    standing.answer()
    standing.miss()
    assert not sessions.urgent
    assert sessions.ready() == [], "nobody would know"
    sessions.read_answers(NOW)
    assert not sessions.urgent, "most answers come by themselves"
    sessions.read_answers(sessions.answers_due)
    assert sessions.urgent
    assert sessions.ready() == [standing.session]
    assert sessions.received(standing.session) == [b"answer"]


def test_where_chunks_are_under_way_it_is_found_at_once(standing: Standing) -> None:
    standing.ask(NOW, hurried=True)
    standing.answer()
    standing.miss()
    assert standing.sessions.urgent
    assert standing.sessions.ready() == [standing.session]


def test_who_has_answered_is_looked_at_no_more(standing: Standing) -> None:
    sessions = standing.sessions
    standing.ask(NOW)
    sessions.heard(standing.session)
    assert sessions.answers_due == float("inf")
    assert sessions.due(NOW + CONFIG.session_timeout_s + 1) == []


def test_who_is_silent_is_looked_at_when_its_session_ends(standing: Standing) -> None:
    sessions, session = standing.sessions, standing.session
    standing.ask(NOW)
    sessions.read_answers(sessions.answers_due)
    assert sessions.due(session.deadline - 0.1) == []
    assert sessions.due(session.deadline) == [session]


def test_a_producer_has_the_timeout_to_answer_however_long_ago_it_was_asked_before(
    standing: Standing,
) -> None:
    sessions, session = standing.sessions, standing.session
    later = NOW + 3 * CONFIG.session_timeout_s  # with many sessions they are asked at this interval
    assert sessions.due(later) == []
    standing.ask(later)
    assert session.deadline == later + CONFIG.session_timeout_s
    standing.ask(later + 1)
    assert session.deadline == later + CONFIG.session_timeout_s, "it still owes the first answer"


def test_the_least_patient_producer_counts(standing: Standing) -> None:
    assert standing.sessions.patience_s == float("inf")
    standing.session.patience_s = 5.0
    assert standing.sessions.patience_s == 5.0


def test_what_came_with_an_answer_is_found_at_once(standing: Standing) -> None:
    sessions, session = standing.sessions, standing.session
    standing.ask(NOW)
    sender, _ = standing.producer.recv_multipart()
    for data in (b"answer", b"news"):
        standing.producer.send_multipart([sender, data])
    standing.miss()
    assert sessions.received(session) == [b"answer"]
    standing.miss()  # the news has come, too
    assert sessions.urgent
    assert sessions.ready() == [session]
    assert sessions.received(session) == [b"news"]
    assert not sessions.urgent
