# SPDX-License-Identifier: Apache-2.0
"""The handshake of two ranks: they agree on schema, engine, model, routes and transport before KV passes."""

from collections.abc import Hashable, Sequence
from typing import NamedTuple

import msgspec

from pd_connector.errors import (
    Cause,
    PDConnectorError,
    TransportError,
    UnsupportedGeometryError,
)
from pd_connector.kv.geometry import Geometry, has_drafts, without_drafts
from pd_connector.kv.model import (
    ModelFacts,
    draft_problem,
    drafts_alike,
    model_problem,
    unread_problem,
)
from pd_connector.plan.coverage import lacking
from pd_connector.plan.route import Route, routes
from pd_connector.plan.rules import RULES
from pd_connector.protocol.wire import messages
from pd_connector.protocol.wire.final_token import unsent
from pd_connector.transport.base import Transport


class RankIdentity(NamedTuple):
    """A rank as its peers see it. Each start of an agent has a new `epoch`."""

    engine_id: str
    epoch: int
    facts: ModelFacts
    tells: tuple[str, ...] = ()  # what it sends besides KV (`final_token`)
    needs: tuple[str, ...] = ()  # what it must get besides KV


class RefusedError(PDConnectorError):
    """The two ranks cannot work together. Metrics count `cause`."""

    def __init__(self, cause: Cause, detail: str) -> None:
        super().__init__(detail)
        self.cause = cause


def hello(
    identity: RankIdentity,
    geometry: Geometry,
    codecs: Sequence[str],
    transports: Sequence[Transport],
) -> messages.Hello:
    """A consumer's first message. It names no engine: `Welcome` says which engine has answered, and each transfer names
    the engine that it needs."""
    plain = geometry.needs_schema == 1
    return messages.Hello(
        newest=messages.SCHEMA,
        oldest=messages.oldest_schema(geometry),
        engine_id=identity.engine_id,
        expected_engine_id="",
        facts=identity.facts,
        geometry=geometry if plain else messages.UNTOLD,
        codecs=list(codecs),
        transports={transport.name: transport.address() for transport in transports},
        readable=[transport.name for transport in transports if transport.readable],
        needs=list(identity.needs),
        extended=msgspec.UNSET if plain else geometry,
    )


def check_hello(
    message: messages.Hello, identity: RankIdentity, geometry: Geometry, codecs: Sequence[str]
) -> tuple[int, tuple[Route, ...]]:
    """On the producer, check a `Hello`.

    Returns:
        The schema to use, and the routes to that consumer.

    Raises:
        RefusedError: the two ranks do not fit together.
    """
    oldest = messages.oldest_schema(geometry)
    schema = messages.common_schema(message.newest, message.oldest, oldest)
    if schema is None:
        spoken = f"{message.oldest}-{message.newest}"
        older = "consumer" if message.newest < oldest else "producer"
        raise RefusedError(
            Cause.VERSION,
            f"wire schema: producer speaks {_schemas(geometry)}, consumer {spoken}: upgrade pd-connector on the {older}",
        )
    if message.expected_engine_id not in ("", identity.engine_id):
        raise RefusedError(
            Cause.UNREACHABLE,
            f"engine {identity.engine_id} answers here, {message.expected_engine_id} was wanted "
            "(restarted since?)",
        )
    mine, theirs = identity.facts, message.facts
    _check_model(mine, theirs, message.cache)
    if missing := unsent(message.needs, identity.tells):
        raise RefusedError(
            Cause.WORDS,
            f"engine {identity.engine_id} does not send {missing} with its KV (it sends "
            f"{', '.join(identity.tells) or 'nothing else'}), and engine {message.engine_id} cannot go on without it",
        )
    source, destination = _shared(geometry, mine, theirs), _shared(message.cache, mine, theirs)
    return schema, _routes(source, destination, codecs, message.codecs, schema)


def check_welcome(
    message: messages.Welcome, identity: RankIdentity, geometry: Geometry, codecs: Sequence[str]
) -> tuple[Route, ...]:
    """On the consumer, check a `Welcome`; returns the routes from that producer.

    Raises:
        RefusedError: the two ranks do not fit together.
    """
    if not messages.oldest_schema(geometry) <= message.schema <= messages.SCHEMA:
        raise RefusedError(
            Cause.VERSION,
            f"wire schema: producer chose {message.schema}, consumer speaks {_schemas(geometry)}",
        )
    if message.slot_bytes < (least := RULES[message.schema].min_chunk_bytes):
        detail = f"the producer's slots have {message.slot_bytes} bytes, must have {least} at least"
        raise RefusedError(Cause.GEOMETRY, detail)  # a plan would have millions of chunks
    mine, theirs = identity.facts, message.facts
    _check_model(theirs, mine, geometry)
    source, destination = _shared(message.geometry, mine, theirs), _shared(geometry, mine, theirs)
    return _routes(source, destination, message.codecs, codecs, message.schema)


def connect(message: messages.Hello, transports: Sequence[Transport]) -> tuple[Transport, Hashable]:
    """On the producer, connect by its first transport that reaches the consumer.

    Returns:
        The transport, and its link to the consumer.

    Raises:
        RefusedError: no transport reaches it.
    """
    problems: list[str] = []
    for transport in transports:
        address = message.transports.get(transport.name)
        if address is None:
            problems.append(f"{transport.name}: not offered")
            continue
        try:
            return transport, transport.connect(address)
        except TransportError as error:
            problems.append(str(error))
    offered = ", ".join(message.transports) or "none"
    raise RefusedError(Cause.NO_TRANSPORT, f"consumer offers {offered}; here {'; '.join(problems)}")


def _schemas(geometry: Geometry) -> str:
    """The schemas that this rank speaks."""
    return f"{messages.oldest_schema(geometry)}-{messages.SCHEMA}"


def _check_model(producer: ModelFacts, consumer: ModelFacts, destination: Geometry) -> None:
    """Raises RefusedError unless both serve the same model, and all layers of `destination` get their KV."""
    if problem := unread_problem(producer, consumer):
        raise RefusedError(Cause.UNREAD, problem)
    if problem := model_problem(producer, consumer):
        raise RefusedError(Cause.MODEL, problem)
    if has_drafts(destination) and (problem := draft_problem(producer, consumer)):
        raise RefusedError(Cause.DRAFT, problem)


def _shared(geometry: Geometry, ours: ModelFacts, theirs: ModelFacts) -> Geometry:
    """The layers of a cache that pass: all, but without the draft model's layers unless both have the same draft
    model."""
    return geometry if drafts_alike(ours, theirs) else without_drafts(geometry)


def _routes(
    source: Geometry,
    destination: Geometry,
    offered: Sequence[str],
    accepted: Sequence[str],
    schema: int,
) -> tuple[Route, ...]:
    """The routes of a session. They follow the rules of this schema version."""
    if missing := lacking(source, destination):
        raise RefusedError(
            Cause.GEOMETRY,
            f"the producer has no KV of {missing}: both engines must cache the same layers",
        )
    try:
        return routes(source, destination, offered, accepted, RULES[schema])
    except UnsupportedGeometryError as error:
        raise RefusedError(Cause.GEOMETRY, str(error)) from None
