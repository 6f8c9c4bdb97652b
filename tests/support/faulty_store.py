# SPDX-License-Identifier: Apache-2.0
"""A store that is slow, or does not answer. It keeps nothing itself."""

import threading
import time
from collections.abc import Sequence
from typing import Any

from pd_connector.pool.store.base import Found, Reading, Store


class FaultyStore:
    """A store as an engine sees it whose every call and byte takes time.

    Attributes:
        call_s: seconds that each call takes.
        bytes_per_s: at which parts are read.
        silent: calls end when it is set; None: they end.
        calls: names of the calls so far.
    """

    def __init__(
        self, store: Store, call_s: float = 0.0, bytes_per_s: float = float("inf")
    ) -> None:
        self._store = store
        self.call_s, self.bytes_per_s = call_s, bytes_per_s
        self.silent: threading.Event | None = None
        self.calls: list[str] = []

    def _wait(self, name: str) -> None:
        self.calls.append(name)
        time.sleep(self.call_s)
        if self.silent is not None:
            self.silent.wait(60)

    def find(self, keys: Sequence[bytes]) -> list[Found | None]:
        self._wait("find")
        return self._store.find(keys)

    def read(self, key: bytes, part: str) -> Reading:
        self._wait("read")
        return _SlowReading(self._store.read(key, part), self)

    def begin(self, key: bytes, **more: Any) -> Any:
        self._wait("begin")
        return self._store.begin(key, **more)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)


class _SlowReading(Reading):
    def __init__(self, reading: Reading, store: FaultyStore) -> None:
        self._reading, self._of = reading, store
        self.nbytes, self.tier = reading.nbytes, reading.tier

    def into(self, buffer: memoryview, offset: int) -> None:
        self._of._wait("into")
        time.sleep(buffer.nbytes / self._of.bytes_per_s)
        self._reading.into(buffer, offset)

    def close(self) -> None:
        self._reading.close()
