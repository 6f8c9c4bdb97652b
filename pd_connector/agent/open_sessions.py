# SPDX-License-Identifier: Apache-2.0
"""A consumer's sessions with producers, from dialling to their end: connections and deadlines."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from pd_connector.agent.dialler import Dialler
from pd_connector.agent.inbox import ReceivePath
from pd_connector.config import Config
from pd_connector.control.sockets import Connection
from pd_connector.errors import Cause
from pd_connector.protocol import messages
from pd_connector.protocol.incoming import ProducerSession
from pd_connector.protocol.peers import Source

_TRANSFERS_PER_HEARTBEAT = 256
"""Keeps heartbeats below `messages.MAX_MESSAGE_BYTES`; there are several if more are wanted."""


@dataclass(slots=True)
class OpenSession:
    """One connection to a producer."""

    connection: Connection
    deadline: float  # for `Welcome`, then for any message
    path: ReceivePath | None = None  # since `Welcome`
    # Since `Welcome`, until kernels for its routes are compiled: what was agreed on.
    agreed: ProducerSession | None = None

    def send(self, message: messages.Message) -> None:
        self.connection.send(messages.encode(message))

    def send_heartbeat(self, transfers: Sequence[str]) -> None:
        """Speak for these transfers, and for the session itself if there are none."""
        size = _TRANSFERS_PER_HEARTBEAT
        for first in range(0, max(1, len(transfers)), size):
            self.send(messages.Heartbeat(list(transfers[first : first + size])))

    @property
    def timeout_cause(self) -> Cause:
        """What it means that the deadline has passed."""
        return Cause.UNREACHABLE if self.path is None else Cause.SESSION_LOST


class OpenSessions:
    """All of them, by producer. Used by the agent's thread only."""

    def __init__(self, config: Config, dialler: Dialler) -> None:
        self._config = config
        self._dialler = dialler
        self._sessions: dict[Source, OpenSession] = {}

    def __len__(self) -> int:
        return len(self._sessions)

    def __iter__(self) -> Iterator[tuple[Source, OpenSession]]:
        """Every session that exists when the iteration begins."""
        return iter(list(self._sessions.items()))

    @property
    def pollables(self) -> list[object]:
        connections = [session.connection for session in self._sessions.values()]
        return [socket for c in connections for socket in (c.socket, c.monitor)]

    @property
    def compiling(self) -> bool:
        """Whether sessions wait for kernels to be compiled."""
        return any(session.agreed for session in self._sessions.values())

    def get(self, source: Source) -> OpenSession | None:
        return self._sessions.get(source)

    def holds(self, source: Source, session: OpenSession) -> bool:
        """Whether this is still the session with that producer."""
        return self._sessions.get(source) is session

    def dial(self, source: Source, now: float) -> None:
        """Open a session; nothing, if there is one.

        Raises RefusedError if the address may not be dialled or cannot be.
        """
        if source not in self._sessions:
            connection = self._dialler.dial(source)
            deadline = now + self._config.connect_timeout_s
            self._sessions[source] = OpenSession(connection, deadline)

    def heard(self, session: OpenSession, now: float) -> None:
        """The producer has spoken. Before the session stands only `Welcome` counts."""
        if session.path is not None:
            session.deadline = now + self._config.session_timeout_s

    def end(self, source: Source) -> None:
        """Close the connection; what was sent before is still delivered, if that is possible."""
        self._sessions.pop(source).connection.close()

    def close(self) -> None:
        for session in self._sessions.values():
            session.connection.close()
        self._sessions.clear()
