# SPDX-License-Identifier: Apache-2.0
"""What two ranks must agree on before KV passes: schema, engine, model, routes and a transport."""

from collections.abc import Hashable, Sequence
from typing import NamedTuple

from pd_connector.errors import (
    Cause,
    PDConnectorError,
    TransportError,
    UnsupportedGeometryError,
)
from pd_connector.kv.geometry import Geometry, without_drafts
from pd_connector.kv.model import ModelFacts, drafts_alike, model_problem
from pd_connector.plan.route import Route, lacking, routes
from pd_connector.protocol import messages
from pd_connector.transport.base import Transport

_OUR_SCHEMAS = f"{messages.OLDEST_SCHEMA}-{messages.SCHEMA}"


class Identity(NamedTuple):
    """Who a rank is, as its peers see it. Each start of an agent has another `epoch`."""

    engine_id: str
    epoch: int
    model: bytes  # as schema 2 has it
    facts: ModelFacts | None = None


class RefusedError(PDConnectorError):
    """The two ranks cannot work together; `cause` is what is counted."""

    def __init__(self, cause: Cause, detail: str) -> None:
        super().__init__(detail)
        self.cause = cause


def hello(
    identity: Identity,
    wanted: str,
    geometry: Geometry,
    codecs: Sequence[str],
    transports: Sequence[Transport],
) -> messages.Hello:
    """A consumer's first message, to a producer that should be the engine `wanted` (any if "")."""
    return messages.Hello(
        newest=messages.SCHEMA,
        oldest=messages.OLDEST_SCHEMA,
        engine_id=identity.engine_id,
        expected_engine_id=wanted,
        model=identity.model,
        geometry=geometry,
        codecs=list(codecs),
        transports={transport.name: transport.address() for transport in transports},
        readable=[transport.name for transport in transports if transport.readable],
        facts=identity.facts,
    )


def check_hello(
    message: messages.Hello, identity: Identity, geometry: Geometry, codecs: Sequence[str]
) -> tuple[int, tuple[Route, ...]]:
    """On the producer, check a `Hello`.

    Returns:
        The schema to speak, and the routes to that consumer.

    Raises:
        RefusedError: they do not fit together.
    """
    schema = messages.common_schema(message.newest, message.oldest)
    if schema is None:
        theirs = f"{message.oldest}-{message.newest}"
        raise RefusedError(
            Cause.VERSION, f"wire schema: producer speaks {_OUR_SCHEMAS}, consumer {theirs}"
        )
    if message.expected_engine_id not in ("", identity.engine_id):
        raise RefusedError(
            Cause.UNREACHABLE,
            f"engine {identity.engine_id} answers here, {message.expected_engine_id} was wanted "
            "(restarted since?)",
        )
    mine, facts = identity.facts, message.facts
    if mine is not None and facts is not None:
        _check_model(mine, facts)
    elif message.model != identity.model:
        raise RefusedError(
            Cause.MODEL,
            f"model fingerprint {identity.model.hex()} here, {message.model.hex()} there: "
            "both engines must serve the same weights and config",
        )
    return schema, _routes(
        _shared(geometry, mine, facts),
        _shared(message.geometry, mine, facts),
        codecs,
        message.codecs,
    )


def check_welcome(
    message: messages.Welcome,
    wanted: str,
    geometry: Geometry,
    codecs: Sequence[str],
    facts: ModelFacts | None = None,
) -> tuple[Route, ...]:
    """On the consumer, check a `Welcome` of a producer that should be the engine `wanted` (any if
    ""); returns the routes from it. `facts` are the consumer's own.

    Raises:
        RefusedError: they do not fit together.
    """
    if not messages.OLDEST_SCHEMA <= message.schema <= messages.SCHEMA:
        raise RefusedError(
            Cause.VERSION,
            f"wire schema: producer chose {message.schema}, consumer speaks {_OUR_SCHEMAS}",
        )
    if wanted not in ("", message.engine_id):
        raise RefusedError(
            Cause.UNREACHABLE, f"engine {message.engine_id} answers, {wanted} was wanted"
        )
    ours, theirs = facts, message.facts
    if ours is not None and theirs is not None:
        _check_model(theirs, ours)
    return _routes(
        _shared(message.geometry, ours, theirs),
        _shared(geometry, ours, theirs),
        message.codecs,
        codecs,
    )


def connect(message: messages.Hello, transports: Sequence[Transport]) -> tuple[Transport, Hashable]:
    """On the producer, connect by the first of its transports that reaches the consumer.

    Returns:
        That transport, and its link to the consumer.

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


def _check_model(producer: ModelFacts, consumer: ModelFacts) -> None:
    if problem := model_problem(producer, consumer):
        raise RefusedError(Cause.MODEL, problem)


def _shared(geometry: Geometry, ours: ModelFacts | None, theirs: ModelFacts | None) -> Geometry:
    """What may pass of a cache: not the draft model's layers, unless both have the same draft."""
    if ours is not None and theirs is not None and drafts_alike(ours, theirs):
        return geometry
    return without_drafts(geometry)


def _routes(
    source: Geometry, destination: Geometry, offered: Sequence[str], accepted: Sequence[str]
) -> tuple[Route, ...]:
    if missing := lacking(source, destination):
        raise RefusedError(
            Cause.GEOMETRY,
            f"the producer has no KV of {missing}: both engines must cache the same layers",
        )
    try:
        return routes(source, destination, offered, accepted)
    except UnsupportedGeometryError as error:
        raise RefusedError(Cause.GEOMETRY, str(error)) from None
