# SPDX-License-Identifier: Apache-2.0
"""How a consumer opens a session with a producer: it connects and says `Hello`, and takes the
`Welcome` or not."""

import logging

from pd_connector import wire
from pd_connector.codec import permitted
from pd_connector.errors import Cause, PDConnectorError, TransportError
from pd_connector.handshake import RefusedError, hello, judge_welcome
from pd_connector.inbox import Way
from pd_connector.incoming import Session, Source
from pd_connector.session import Connection
from pd_connector.station import Station

logger = logging.getLogger("pd_connector.dialler")


class Dialler:
    """Used by the agent's thread only."""

    def __init__(self, station: Station) -> None:
        config = station.config
        self._context = station.context
        self._config = config
        self._keys = station.keys
        self._identity = station.identity
        self._cache = station.cache
        self._transports = {transport.name: transport for transport in station.transports}
        self._codecs = list(permitted(config.codec, config.codec_max_error))

    def dial(self, source: Source) -> Connection:
        """Connect and say `Hello`.

        Raises RefusedError if the address may not be dialled or cannot be.
        """
        if not self._config.permits(source.host):
            raise RefusedError(
                Cause.INSECURE_ADDRESS,
                f"producer at {source.host!r}, and no key is set: only loopback is dialled then. "
                "Set PD_CONNECTOR_KEY to one secret on every engine",
            )
        try:
            connection = Connection(self._context, source.host, source.port, self._keys)
        except PDConnectorError as error:
            raise RefusedError(Cause.UNREACHABLE, str(error)) from None
        transports = list(self._transports.values())
        geometry = self._cache.geometry
        greeting = hello(self._identity, source.engine_id, geometry, self._codecs, transports)
        connection.send(wire.encode(greeting))
        return connection

    def welcomed(self, source: Source, welcome: wire.Welcome) -> tuple[Way, Session]:
        """What was agreed on: how chunks come, and what is known of the producer.

        Raises RefusedError if the two ranks cannot work together.
        """
        routes = judge_welcome(welcome, source.engine_id, self._cache.geometry, self._codecs)
        transport = self._transports.get(welcome.transport)
        if transport is None:
            detail = f"welcome to transport {welcome.transport!r}, which was not offered"
            raise RefusedError(Cause.MALFORMED_MESSAGE, detail)
        try:
            way = Way(transport, transport.expect(welcome.transport_address))
        except TransportError as error:
            raise RefusedError(Cause.TRANSPORT, str(error)) from None
        direct = (
            welcome.read
            and welcome.direct
            and self._cache.on_host
            and transport.direct(way.expected)
        )
        logger.info(
            "session with %s:%d: transport %s, %s, codecs %s",
            *source[:2],
            transport.label or transport.name,
            "read from pages" if direct else "read" if welcome.read else "written",
            ",".join(sorted({route.codec for route in routes})) or "none",
        )
        return way, Session(welcome.epoch, welcome.slot_bytes, routes, welcome.read, direct)
