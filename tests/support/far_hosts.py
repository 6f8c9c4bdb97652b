# SPDX-License-Identifier: Apache-2.0
"""Hosts of tests: each has a pool of its own, and a carrier."""

from collections.abc import Callable
from pathlib import Path

from pd_connector.pool.carrier.carrier import Carrier
from pd_connector.pool.carrier.server import CarrierServer
from pd_connector.pool.far.seal import Seal
from pd_connector.pool.store.local import LocalStore, Space
from pd_connector.pool.store.reaching import ReachingStore
from support.waits import until

KEY = b"k" * 32


class Host:
    """A host.

    Attributes:
        own: the store of its engines, without a carrier.
        store: the same, with it.
    """

    def __init__(
        self,
        folder: Path,
        address: str,
        keys: tuple[bytes, ...],
        memory: int,
        deadline_s: float,
        python: str = "",
    ) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder / "pool"
        self.address, self.keys, self.deadline_s, self.python = address, keys, deadline_s, python
        self.own = LocalStore(Space(self.folder, memory))
        self.store = ReachingStore(self.own, self.folder)
        self.start()

    def start(self) -> None:
        self.carried = LocalStore(Space(self.folder, 64 << 20, chosen=False))
        seal, most_bytes = Seal(self.keys), 512 << 20
        self.carrier = Carrier(
            self.carried, seal, self.address, most_bytes, self.deadline_s, self.python
        )
        self.server = CarrierServer(self.carrier, self.folder)

    def ready(self) -> "Host":
        until(lambda: len(self.carrier.children()) == 3, "far clients", 90)
        return self

    def count(self, name: str) -> int:
        return self.carrier.status().counts.get(name, 0)

    def stop(self) -> None:
        """End the carrier."""
        self.server.close()
        self.carrier.close()
        self.carried.close()

    def close(self) -> None:
        self.store.carrier.close()
        self.stop()
        self.own.close()


NewHost = Callable[..., Host]
