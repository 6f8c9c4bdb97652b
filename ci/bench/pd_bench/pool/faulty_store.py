# SPDX-License-Identifier: Apache-2.0
"""A store whose calls and bytes take time, or that does not answer: what an engine makes of it is tested and measured."""

import threading
import time
from collections.abc import Callable
from typing import Any, cast

from pd_connector.pool.store.base import Reading, Store, Writing

_CALLS = ("find", "pin", "unpin", "was_stored", "begin", "read", "remove", "journal")
"""Calls that a slow store takes its time for."""


class FaultyStore:
    """Another store, made slow. It keeps nothing itself.

    Attributes:
        call_s: seconds that each call takes.
        bytes_per_s: at which parts are read and written.
        silent: calls end when it is set; None: they end.
        calls: names of the calls so far.
    """

    def __init__(
        self,
        store: Store,
        call_s: float = 0.0,
        bytes_per_s: float = float("inf"),
        silent: threading.Event | None = None,
    ) -> None:
        self._store = store
        self.call_s, self.bytes_per_s, self.silent = call_s, bytes_per_s, silent
        self.calls: list[str] = []

    def wait(self, nbytes: int = 0) -> None:
        """Take as long as a call takes."""
        time.sleep(self.call_s + nbytes / self.bytes_per_s)
        if self.silent is not None:
            self.silent.wait()

    def __getattr__(self, name: str) -> Any:
        attribute = getattr(self._store, name)
        return self._slowed(name, attribute) if name in _CALLS else attribute

    def _slowed(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def slow(*args: Any, **more: Any) -> Any:
            self.calls.append(name)
            self.wait()
            result = call(*args, **more)
            return _SlowFile(result, self) if isinstance(result, Reading | Writing) else result

        return slow


class _SlowFile(Reading, Writing):
    """A part that is read or written slowly."""

    def __init__(self, part: Reading | Writing, store: FaultyStore) -> None:
        self._part, self._of, self.nbytes = part, store, part.nbytes
        self.tier = getattr(part, "tier", "")

    def into(self, buffer: memoryview, offset: int) -> None:
        self._of.wait(buffer.nbytes)
        cast(Reading, self._part).into(buffer, offset)

    def write(self, offset: int, data: memoryview) -> None:
        self._of.wait(data.nbytes)
        cast(Writing, self._part).write(offset, data)

    def publish(self) -> bool:
        return cast(Writing, self._part).publish()

    def cancel(self) -> None:
        cast(Writing, self._part).cancel()

    def close(self) -> None:
        cast(Reading, self._part).close()

    def __exit__(self, *error: Any) -> None:
        self._part.__exit__(*error)
