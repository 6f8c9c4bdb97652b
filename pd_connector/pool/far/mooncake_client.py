# SPDX-License-Identifier: Apache-2.0
"""Opens clients of Mooncake, for carriers and for lent memory."""

import socket
from typing import TYPE_CHECKING, Any
from urllib.parse import SplitResult, parse_qs

from pd_connector.errors import ConfigError

MISSING = ""
"""Why Mooncake's client cannot be imported; empty if it can."""
if TYPE_CHECKING:
    from mooncake.store import MooncakeDistributedStore as MooncakeDistributedStore
else:
    try:
        from mooncake.store import MooncakeDistributedStore
    except ImportError as error:  # the package is missing, or a library that it needs
        MooncakeDistributedStore, MISSING = None, str(error)
PORT = 50051
"""Port of the master, unless the address has another."""


def new_client(address: SplitResult, deadline_s: float, buffer_bytes: int) -> Any:
    """A client of Mooncake, which lends nothing so far.

    Args:
        buffer_bytes: bytes of memory through which objects pass.

    Raises:
        OSError: the master cannot be reached.
        ConfigError: Mooncake refuses.
    """
    given = {name: values[0] for name, values in parse_qs(address.query).items()}
    master = address.hostname or "", address.port or PORT
    host = given.get("host") or _own_address(master, deadline_s)
    client: Any = MooncakeDistributedStore()
    settings = (
        host,
        "P2PHANDSHAKE",  # so Mooncake's metadata server, which has no authentication, is never started
        0,  # bytes lent
        buffer_bytes,
        given.get("protocol", "tcp"),
        given.get("devices", ""),
        f"{master[0]}:{master[1]}",
    )
    if code := client.setup(*settings):
        raise ConfigError(f"Mooncake's client answers {code} to its setup with {settings}")
    return client


def _own_address(master: tuple[str, int], deadline_s: float) -> str:
    """The address of this host that the master's network sees. Raises OSError: the master cannot be reached."""
    with socket.create_connection(master, timeout=deadline_s) as channel:
        return str(channel.getsockname()[0])
