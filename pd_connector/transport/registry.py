# SPDX-License-Identifier: Apache-2.0
"""Makes the transports a config names."""

from pd_connector.config import Config
from pd_connector.control.keys import CurveKeys
from pd_connector.control.sockets import Context
from pd_connector.memory.buffers import Buffers
from pd_connector.transport.base import Transport
from pd_connector.transport.shm.transport import ShmTransport
from pd_connector.transport.tcp import TcpTransport


def make_transports(
    context: Context, config: Config, keys: CurveKeys | None, buffers: Buffers
) -> list[Transport]:
    """The transports of `config.transports`, in that order. Raises TransportError."""
    landing, sending = buffers.landing, buffers.sending
    made: list[Transport] = []
    for name in config.transports:
        if name == "nixl":
            from pd_connector.transport.nixl.transport import NixlTransport

            made.append(NixlTransport(landing, sending, config.host))
        elif name == "shm":
            made.append(ShmTransport(landing, sending, buffers.pins))
        elif name == "ucx":
            from pd_connector.transport.ucx import UcxTransport

            made.append(UcxTransport(config.slot_bytes, config.host))
        else:
            made.append(TcpTransport(context, config.host, config.slot_bytes, config.permits, keys))
    return made
