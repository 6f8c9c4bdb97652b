# SPDX-License-Identifier: Apache-2.0
"""Makes the transports a config names."""

from pd_connector.buffers import Buffers
from pd_connector.config import Config
from pd_connector.security import CurveKeys
from pd_connector.session import Context
from pd_connector.transport.base import Transport
from pd_connector.transport.shm import ShmTransport
from pd_connector.transport.tcp import TcpTransport
from pd_connector.transport.tcp.connection import Pace
from pd_connector.transport.tcp_v1 import TcpV1Transport


def make_transports(
    context: Context, config: Config, keys: CurveKeys | None, buffers: Buffers
) -> list[Transport]:
    """The transports of `config.transports`, in that order. Raises TransportError."""
    landing, sending = buffers.landing, buffers.sending
    made: list[Transport] = []
    for name in config.transports:
        if name == "nixl":
            from pd_connector.transport.nixl import NixlTransport

            made.append(NixlTransport(landing, sending, config.host))
        elif name == "shm":
            made.append(ShmTransport(landing, sending, buffers.pins, buffers.cache))
        elif name == "ucx":
            from pd_connector.transport.ucx import UcxTransport

            made.append(UcxTransport(config.slot_bytes, config.host))
        else:
            where = config.host, config.permits
            memory = buffers.private_landing, buffers.private_sending
            shared = keys.server_secret + keys.client_secret if keys else b""
            made.append(TcpTransport(*memory, *where, shared, _pace(config)))
            made.append(TcpV1Transport(context, config.slot_bytes, *where, keys))
    return made


def _pace(config: Config) -> Pace:
    """A dead connection is found, and a transfer over it failed, before its session counts as lost."""
    silence_s = max(config.session_timeout_s / 2, 2 * config.heartbeat_s)
    return Pace(config.heartbeat_s, silence_s)
