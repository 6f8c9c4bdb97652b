# SPDX-License-Identifier: Apache-2.0
"""What a carrier knows of the objects in the far store."""

import threading
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from pd_connector.pool.carrier.child import MOST_NAMES
from pd_connector.pool.carrier.client import FarClient
from pd_connector.pool.carrier.far_journal import FarJournal
from pd_connector.pool.far.seal import Seal

MOST_KNOWN = 1 << 18
"""Chunks of which the carrier knows that the far store has them. The oldest are forgotten first."""


class Stored(NamedTuple):
    """An object that was found."""

    name: str
    nbytes: int


class KnownObjects:
    """The chunks that were put into the far store, or found there. Any thread may use it.

    Attributes:
        journal: the same, for routers, and which chunks were missing.
        most_bytes: largest size of an object of the far store.
    """

    def __init__(self, seal: Seal, most_bytes: int) -> None:
        self._seal = seal
        self.journal = FarJournal()
        self.most_bytes = most_bytes
        self._lock = threading.Lock()
        self._there: OrderedDict[bytes, Stored] = OrderedDict()

    def __contains__(self, key: bytes) -> bool:
        return key in self._there

    def get(self, key: bytes) -> Stored | None:
        """Where a chunk is, without asking the far store; None if that is not known."""
        return self._there.get(key)

    def learn(self, key: bytes, stored: Stored | None) -> None:
        """A chunk was put or found; None: it is not there."""
        with self._lock:
            self._there.pop(key, None)
            if stored is not None:
                self._there[key] = stored
                while len(self._there) > MOST_KNOWN:
                    self._there.popitem(last=False)
        self.journal.note([key], stored is not None)

    def forget(self, keys: Iterable[bytes]) -> None:
        """It is not known any more whether these chunks are there. Routers are told nothing."""
        with self._lock:
            for key in keys:
                self._there.pop(key, None)

    def clear(self) -> None:
        """The far store may have lost its objects."""
        with self._lock:
            self._there.clear()

    def look(self, client: FarClient, keys: Sequence[bytes]) -> list[Stored | None]:
        """Ask the far store where each chunk is. Raises SilentError."""
        names = [(place, name) for place, key in enumerate(keys) for name in self._seal.names(key)]
        stored: list[Stored | None] = [None] * len(keys)
        before = [self.get(key) for key in keys]
        for start in range(0, len(names), MOST_NAMES):
            batch = names[start : start + MOST_NAMES]
            sizes = client.has([name for _, name in batch])
            for (place, name), size in zip(batch, sizes, strict=True):
                if 0 < size <= self.most_bytes and stored[place] is None:
                    stored[place] = Stored(name, size)
        for key, each, earlier in zip(keys, stored, before, strict=True):
            if each is not None or self.get(key) is earlier:  # else it was put meanwhile
                self.learn(key, each)
        return stored
