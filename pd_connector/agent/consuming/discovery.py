# SPDX-License-Identifier: Apache-2.0
"""Finds the ranks of an engine. Each rank names all ranks, so one host and port are enough."""

import time

import zmq

from pd_connector.agent.handshake import RefusedError
from pd_connector.config import Config
from pd_connector.control.addresses import numeric
from pd_connector.control.keys import CurveKeys
from pd_connector.control.sockets import Connection
from pd_connector.errors import Cause, MalformedMessageError, PDConnectorError
from pd_connector.protocol.wire import messages
from pd_connector.protocol.wire.peers import Peer, Source

_POLL_MS = 20


def ask_ranks(config: Config, host: str, port: int, deadline: float) -> tuple[Peer, ...]:
    """All ranks of the engine that has a rank at this address. Blocks until the answer has come.

    Args:
        config: the settings, with the key that all engines share.
        host, port: the control channel of any rank.
        deadline: in seconds, on `time.monotonic`.

    Raises:
        RefusedError: the address is not allowed, or no rank answers there.
    """
    if not config.permits(host):
        raise RefusedError(
            Cause.INSECURE_ADDRESS,
            f"rank at {host!r}, and no key is set: only loopback is dialled then",
        )
    keys = CurveKeys.derive(config.key) if config.key else None
    with zmq.Context[zmq.Socket[bytes]]() as context:
        try:
            connection = Connection(context, numeric(host), port, keys)
        except (PDConnectorError, OSError) as error:
            raise RefusedError(Cause.UNREACHABLE, str(error)) from None
        try:
            connection.send(messages.encode(messages.AskRanks()))
            return _answer(connection, f"{host}:{port}", deadline)
        finally:
            connection.close()


def _answer(connection: Connection, name: str, deadline: float) -> tuple[Peer, ...]:
    problem = Cause.UNREACHABLE, "no answer"
    while time.monotonic() < deadline:
        for data in connection.receive():
            return _peers(data, name)
        # Go on: a rank that starts may listen a moment later.
        problem = connection.lost() or problem
        if problem[0] is Cause.AUTHENTICATION:
            break
        connection.socket.poll(_POLL_MS)
    raise RefusedError(problem[0], f"{name} was asked for its engine's ranks: {problem[1]}")


def _peers(data: bytes, name: str) -> tuple[Peer, ...]:
    try:
        answer = messages.decode_producer_message(data)
    except MalformedMessageError as error:
        raise RefusedError(Cause.MALFORMED_MESSAGE, f"{name}: {error}") from None
    if isinstance(answer, messages.Reject):
        raise RefusedError(
            Cause.VERSION, f"{name} does not report the ranks of its engine: {answer.detail}"
        )
    if not isinstance(answer, messages.Ranks) or not answer.ranks:
        raise RefusedError(Cause.MALFORMED_MESSAGE, f"{name} reports no ranks: {answer}")
    return tuple(
        Peer(Source(rank.host, rank.port, answer.engine_id), rank.shard) for rank in answer.ranks
    )
