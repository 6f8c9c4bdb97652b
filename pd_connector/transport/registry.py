# SPDX-License-Identifier: Apache-2.0
"""Finds the transports that a config names, and makes them.

Other packages add transports by entry points of the group `pd_connector.transports`: the name is what users write into
the config key `transports` (and `Transport.name`), the object a subclass of `Transport`. Class attributes hold the
facts that the agent needs before the transport is made.
"""

import contextlib
import importlib
from collections.abc import Sequence
from typing import Any

from pd_connector.config import TRANSPORT_GROUP, TRANSPORTS
from pd_connector.errors import ConfigError
from pd_connector.extensions import load_entry_points, unknown_name
from pd_connector.memory.buffers import SlotUse
from pd_connector.transport.base import Transport, TransportParts

_BUILT_IN = {
    "shm": "pd_connector.transport.shm.transport:ShmTransport",
    "tcp": "pd_connector.transport.tcp.transport:TcpTransport",
    "nixl": "pd_connector.transport.nixl.transport:NixlTransport",
    "ucx": "pd_connector.transport.ucx.transport:UcxTransport",
}
"""Imported when a config names them: each imports a library of its own."""


def transport_classes(names: Sequence[str]) -> list[type[Transport]]:
    """The classes of these transports, in that order.

    Raises:
        ConfigError: no package provides a transport of that name, or its package is broken.
    """
    return [_built_in(name) or _added_by_others(name) for name in names]


def slot_use(names: Sequence[str]) -> SlotUse:
    """How these transports use a rank's slots. Raises ConfigError as `transport_classes`."""
    classes = transport_classes(names)
    return SlotUse(*(any(getattr(each, use) for each in classes) for use in SlotUse._fields))


def make_transports(parts: TransportParts) -> list[Transport]:
    """The transports of `parts.config.transports`, in that order.

    Raises:
        TransportError: one of them cannot work on this machine.
        ConfigError: as `transport_classes`.
    """
    made: list[Transport] = []
    with contextlib.ExitStack() as undo:
        for transport in transport_classes(parts.config.transports):
            made.append(transport.make(parts))
            undo.callback(made[-1].close)
        undo.pop_all()
    return made


def _built_in(name: str) -> type[Transport] | None:
    if name not in _BUILT_IN:
        return None
    module, _, attribute = _BUILT_IN[name].partition(":")
    transport: type[Transport] = getattr(importlib.import_module(module), attribute)
    return transport


def _added_by_others(name: str) -> type[Transport]:
    added = load_entry_points(TRANSPORT_GROUP).get(name)
    if added is None:
        raise unknown_name("transport", name, TRANSPORTS, TRANSPORT_GROUP, "transports")
    transport: Any = added.load()
    if isinstance(transport, type) and issubclass(transport, Transport) and transport.name == name:
        return transport
    raise ConfigError(
        f"{added.source}: entry point {name!r} of group {TRANSPORT_GROUP} is {transport!r}: must be a subclass of "
        f"pd_connector.transport.base.Transport whose `name` is {name!r}"
    )
