# SPDX-License-Identifier: Apache-2.0
"""A consumer opens a session with a producer: it connects, sends `Hello`, and checks the `Welcome`."""

import logging
from collections.abc import Sequence

from pd_connector.agent.consuming.open_session import ReceivePath
from pd_connector.agent.handshake import RefusedError, check_welcome, hello
from pd_connector.agent.resources import RankResources
from pd_connector.control.sockets import Connection
from pd_connector.errors import Cause, PDConnectorError, TransportError
from pd_connector.kv.coding import RAW, permitted
from pd_connector.kv.model import ModelFacts, described, model_digest
from pd_connector.plan.route import Route
from pd_connector.plan.sizes import bytes_per_token
from pd_connector.protocol.consuming.codec_choice import CodecChoice
from pd_connector.protocol.consuming.incoming import ProducerSession
from pd_connector.protocol.wire import messages
from pd_connector.protocol.wire.peers import Source

logger = logging.getLogger("pd_connector.agent.consuming.dialler")


class Dialler:
    """Used by the agent's thread only."""

    def __init__(self, resources: RankResources) -> None:
        config = resources.config
        self._context = resources.context
        self._config = config
        self._keys = resources.keys
        self._identity = resources.identity
        self._cache = resources.cache
        self._transports = {transport.name: transport for transport in resources.transports}
        self._codecs = list(permitted(config.codec, config.codec_max_error))

    def dial(self, source: Source) -> Connection:
        """Connect and send `Hello`. It is also sent while this engine does not know its weights yet. The producer then
        refuses the session, but over the connection this engine can still cancel its transfers.

        Raises RefusedError if the address is not allowed, or cannot be dialled.
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
        greeting = hello(self._identity, geometry, self._codecs, transports)
        connection.send(messages.encode(greeting))
        return connection

    def change_model(self, facts: ModelFacts) -> None:
        """The engine serves other weights, or knows them now."""
        self._identity = self._identity._replace(facts=facts)

    def welcomed(
        self, source: Source, welcome: messages.Welcome
    ) -> tuple[ReceivePath, ProducerSession]:
        """The result of the handshake: how chunks come, and the session.

        Raises RefusedError if the two ranks cannot work together.
        """
        routes = check_welcome(welcome, self._identity, self._cache.geometry, self._codecs)
        plain = self._plain(welcome, routes)
        facts = welcome.facts
        transport = self._transports.get(welcome.transport)
        if transport is None:
            detail = f"welcome to transport {welcome.transport!r}, which was not offered"
            raise RefusedError(Cause.MALFORMED_MESSAGE, detail)
        try:
            expected = transport.expect(welcome.transport_address)
        except TransportError as error:
            raise RefusedError(Cause.TRANSPORT, str(error)) from None
        path = ReceivePath(transport, expected, own=welcome.read)
        direct = (
            welcome.read
            and welcome.direct
            and self._cache.on_host
            and transport.direct(path.expected)
        )
        codecs = sorted({route.codec for route in routes})
        direction = "read from pages" if direct else "read" if welcome.read else "written"
        way = f"{transport.label or transport.name}, {direction}"
        logger.info(
            "session with %s:%d: transport %s, codecs %s",
            *source[:2],
            way,
            ",".join(codecs) or "none",
        )
        self._log_unused_codec(source, welcome.codecs, codecs)
        return path, ProducerSession(
            epoch=welcome.epoch,
            slot_bytes=welcome.slot_bytes,
            routes=routes,
            read=welcome.read,
            direct=direct,
            writes_late=transport.one_sided and not path.own,
            way=way,
            engine_id=welcome.engine_id,
            model=model_digest(facts),
            model_text=described(facts),
            plain=plain,
            choice=CodecChoice(bytes_per_token(plain) / bytes_per_token(routes)) if plain else None,
        )

    def _plain(self, welcome: messages.Welcome, routes: tuple[Route, ...]) -> tuple[Route, ...]:
        """The same routes with codec `raw`, if this side can choose between the two codecs; otherwise empty."""
        if self._config.codec != "auto" or not welcome.plain:
            return ()
        plain = check_welcome(welcome, self._identity, self._cache.geometry, [RAW.name])
        alike = [route.codec for route in plain] == [route.codec for route in routes]
        return () if alike else plain

    def _log_unused_codec(self, source: Source, theirs: Sequence[str], used: Sequence[str]) -> None:
        """Log if KV comes uncoded although the config names a codec."""
        codec = self._config.codec
        if codec in ("auto", RAW.name) or list(used) != [RAW.name]:
            return
        if codec not in theirs:
            why = f"that engine permits {', '.join(theirs)}: set its config key codec, too"
        else:
            why = "its cache has no more bits an element than the codec (docs/codecs.md)"
        logger.warning("codec %s is not used with %s:%d: %s", codec, *source[:2], why)
