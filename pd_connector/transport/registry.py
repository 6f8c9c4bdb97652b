# SPDX-License-Identifier: Apache-2.0
"""Makes the transports that a config names.

Other packages add transports by entry points of the group `pd_connector.transports`: the name is what users write into
the config key `transports` (and `Transport.name`), the object a function that takes `TransportParts` and returns a
`Transport`.
"""

import contextlib
from collections.abc import Callable
from typing import NamedTuple

from pd_connector.config import TRANSPORT_GROUP, TRANSPORTS, Config
from pd_connector.control.keys import CurveKeys
from pd_connector.control.sockets import Context
from pd_connector.errors import TransportError
from pd_connector.extensions import load_entry_points, unknown_name
from pd_connector.hosts import port_range
from pd_connector.memory.buffers import Buffers
from pd_connector.transport.base import Transport
from pd_connector.transport.shm.transport import ShmTransport
from pd_connector.transport.tcp import TcpTransport
from pd_connector.transport.tcp.connection import Pace


class TransportParts(NamedTuple):
    """What a transport is made of.

    Attributes:
        context: of all ZeroMQ sockets of this agent.
        config: the engine's settings; `config.permits` says which hosts may be bound and dialled.
        keys: of the control channel; None without a key.
        buffers: the slabs that chunks are gathered into and land in, and what is pinned of them.
    """

    context: Context
    config: Config
    keys: CurveKeys | None
    buffers: Buffers


MakeTransport = Callable[[TransportParts], Transport]
"""Raises TransportError where the transport cannot work on this machine."""


def make_transports(
    context: Context, config: Config, keys: CurveKeys | None, buffers: Buffers
) -> list[Transport]:
    """The transports of `config.transports`, in that order.

    Raises:
        TransportError: one of them cannot work on this machine.
        ConfigError: no package provides a transport of that name, or its package is broken.
    """
    parts = TransportParts(context, config, keys, buffers)
    made: list[Transport] = []
    with contextlib.ExitStack() as undo:
        for name in config.transports:
            make = _MAKERS.get(name) or _added_by_others(name)
            made.append(make(parts))
            undo.callback(made[-1].close)
        undo.pop_all()
    return made


def _added_by_others(name: str) -> MakeTransport:
    added = load_entry_points(TRANSPORT_GROUP).get(name)
    if added is None:
        raise unknown_name("transport", name, TRANSPORTS, TRANSPORT_GROUP, "transports")

    def make(parts: TransportParts) -> Transport:
        made = added.load()(parts)
        if not isinstance(made, Transport) or made.name != name:
            raise TransportError(
                f"{added.source} makes {made!r} for the entry point {name!r} of group "
                f"{TRANSPORT_GROUP}: wanted a pd_connector.transport.base.Transport whose `name` "
                f"is {name!r}"
            )
        return made

    return make


def _make_shm(parts: TransportParts) -> Transport:
    buffers = parts.buffers
    return ShmTransport(buffers.landing, buffers.sending, buffers.pins)


def _make_tcp(parts: TransportParts) -> Transport:
    config, keys, buffers = parts.config, parts.keys, parts.buffers
    # A dead connection is found, and its transfers fail, before its session counts as lost.
    silence_s = max(config.session_timeout_s / 2, 2 * config.heartbeat_s)
    return TcpTransport(
        buffers.private_landing,
        buffers.private_sending,
        config.host,
        config.permits,
        shared=keys.server_secret + keys.client_secret if keys else b"",
        pace=Pace(config.heartbeat_s, silence_s),
        ports=port_range(config.data_port),
    )


def _make_nixl(parts: TransportParts) -> Transport:
    from pd_connector.transport.nixl.transport import NixlTransport

    buffers, host = parts.buffers, parts.config.host
    if buffers.device_slots.slabs:
        try:
            return NixlTransport(buffers.landing, buffers.sending, host, buffers.device_slots)
        except TransportError as error:
            buffers.leave_device(str(error))
    return NixlTransport(buffers.landing, buffers.sending, host)


def _make_ucx(parts: TransportParts) -> Transport:
    from pd_connector.transport.ucx import UcxTransport

    return UcxTransport(parts.config.slot_bytes, parts.config.host)


_MAKERS: dict[str, MakeTransport] = {
    "shm": _make_shm,
    "tcp": _make_tcp,
    "nixl": _make_nixl,
    "ucx": _make_ucx,
}
