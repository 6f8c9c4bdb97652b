# SPDX-License-Identifier: Apache-2.0
"""Moves chunks between the pool of this host and a far store.

| thread | what it does |
|---|---|
| `pd-carrier-put` | follows the pool's journal, and puts new chunks into the far store (`putting.py`) |
| `pd-carrier-move` | brings requested chunks into the pool, each chunk once for all engines that wait (`bringing.py`) |
| of `server.py` | answer engines |

Each has a far client of its own, so a look-up does not wait for a chunk on its way.
"""

import threading
from collections.abc import Iterable, Sequence
from concurrent.futures import Future

from pd_connector.errors import PoolError
from pd_connector.hosts import without_secret
from pd_connector.pool.carrier.bringing import Bringing
from pd_connector.pool.carrier.client import FarClient, SilentError
from pd_connector.pool.carrier.counts import Counts
from pd_connector.pool.carrier.finding import gallop
from pd_connector.pool.carrier.known_objects import KnownObjects
from pd_connector.pool.carrier.messages import Brought, Checked, Sizes, Status
from pd_connector.pool.carrier.object import unpacked
from pd_connector.pool.carrier.putting import Putting
from pd_connector.pool.far.seal import Seal
from pd_connector.pool.store.base import Store
from pd_connector.pool.verify import InMemory, sound


class Carrier:
    """Any thread may call it.

    Attributes:
        journal: the chunks that it has put or seen in the far store, for routers.

    Args:
        store: this host's store.
        address: the far store's address, checked by `far_address`.
        most_bytes: largest size of an object of the far store.
        deadline_s: the longest wait for one answer of the far store.
        python: the Python whose environment has the far store's client; empty: this one.
    """

    def __init__(
        self,
        store: Store,
        seal: Seal,
        address: str,
        most_bytes: int,
        deadline_s: float,
        python: str = "",
    ) -> None:
        self._seal, self._shown = seal, without_secret(address)
        self._counts, self._objects = Counts(), KnownObjects(seal, most_bytes)
        self.journal = self._objects.journal
        self._clients = self._finds, self._gets, puts = tuple(
            FarClient(name, address, deadline_s, python) for name in ("find", "get", "put")
        )
        self._ends = threading.Event()
        shared = store, seal, self._objects, self._counts
        self._bringing = Bringing(*shared, self._gets, self._ends)
        self._putting = Putting(*shared, puts, self._opened, self._shown, self._ends)

    def find(self, keys: Sequence[bytes]) -> Sizes:
        """Which of the first chunks of a chain are there."""

        def sizes_of(places: Sequence[int]) -> list[int]:
            stored = self._objects.look(self._finds, [keys[place] for place in places])
            return [each.nbytes if each else 0 for each in stored]

        try:
            sizes = gallop(len(keys), sizes_of)
            # Not all of these were asked for: if an engine saves them, they are looked for then.
            self._objects.forget(keys[len(sizes) :])
            self.journal.note(keys[: len(sizes)], there=True)
            self._counts.add("finds_found" if sizes else "finds_none")
            self._counts.add("found", len(sizes))
            return Sizes(sizes, wait_s=self._bringing.wait_s(keys[: len(sizes)]))
        except SilentError:
            self._counts.add("silent_finds")
            return Sizes([], silent=True)

    def bring(self, keys: Iterable[bytes]) -> "list[Future[Brought]]":
        """Bring chunks into the host's memory. Those that are on their way already come once."""
        return self._bringing.bring(keys)

    @property
    def ended(self) -> int:
        """Chunks that have come to this host, or turned out not to come."""
        return self._bringing.ended

    def check(self, key: bytes, *, removes: bool) -> Checked:
        """Read a chunk of the far store and check it as engines do, without keeping it here.

        Args:
            removes: remove it there if it is damaged.
        """
        problems: list[str] = []
        read = False

        def take(_place: int, data: memoryview) -> None:
            nonlocal read
            if not data:
                return
            read = True
            try:
                opened = unpacked(key, self._seal.open(stored.name, data))
                for (name, _), part in zip(opened.table.parts, opened.parts, strict=True):
                    if problem := sound(key, name, InMemory(part)):
                        problems.append(f"{name}: {problem}")
            except PoolError as error:
                problems.append(str(error))

        try:
            (stored_there,) = self._objects.look(self._gets, [key])
            if stored_there is None:
                return Checked(0)
            stored = stored_there
            self._gets.get([stored.name], [stored.nbytes], take)
            if not read:
                if self._objects.look(self._gets, [key]) == [None]:  # removed meanwhile
                    return Checked(0)
                problems.append("listed, but cannot be read")
            if problems and removes:
                self._gets.remove([stored.name])
                self._objects.learn(key, None)
        except SilentError as error:
            return Checked(0, silent=f"the far store: {error}")
        return Checked(stored.nbytes, "; ".join(problems))

    def status(self) -> Status:
        """What was done so far."""
        clients = self._clients
        counts = self._counts.all()
        counts["client_restarts"] = sum(client.killed for client in clients)
        counts["errors"] = self._putting.errors + self._bringing.errors
        counts["errors"] += sum(client.errors for client in clients)
        silent = [client for client in clients if not client.is_ready]
        return Status(
            far=self._shown,
            sealed=self._seal.is_on,
            mark=self.journal.far,
            most_bytes=self._objects.most_bytes,
            problem=silent[0].problem or "is being opened" if silent else "",
            since_s=min(client.since_s for client in silent)
            if silent
            else max(client.since_s for client in clients),
            waiting=self._putting.waiting,
            bringing=self._bringing.under_way,
            counts=counts,
        )

    def children(self) -> list[int]:
        """Process ids of the far clients that are ready."""
        return [client.pid for client in self._clients if client.pid]

    def close(self) -> None:
        """End the threads and the far clients. Chunks stay."""
        self._ends.set()
        self._bringing.wake()
        for client in self._clients:
            client.close()
        self._putting.join()
        self._bringing.join()

    def _opened(self) -> int:
        """How often far clients were opened."""
        return sum(client.opened for client in self._clients)
