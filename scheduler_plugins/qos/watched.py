# SPDX-License-Identifier: Apache-2.0
"""A settings file that may be edited while it is in use."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Generic, NamedTuple, TypeVar

T = TypeVar("T")


class _State(NamedTuple):
    """By which a change is noticed."""

    inode: int
    changed_ns: int
    size: int


class Watched(Generic[T]):
    """What a file holds, read again when it changes.

    Args:
        path: of the file.
        parse: reads the file's bytes; also given the name under which errors speak of it.
        error: the exception for a file that cannot be read; `parse` raises it, too.

    Raises:
        The exception `error`: the file cannot be used.
    """

    def __init__(
        self, path: Path, parse: Callable[[bytes, str], T], error: Callable[[str], Exception]
    ) -> None:
        self._path = path
        self._parse = parse
        self._error = error
        self._state = self._look()
        self._emptied: _State | None = None
        self.current = self._read()

    def changed(self) -> T | None:
        """The new content, once after each change that can be used. A file that was emptied counts when it
        is found so twice: whoever writes a file in place empties it first.

        Raises:
            The exception `error`: the file was changed to something that cannot be used; `current`
                stays, and nothing more is said until the file changes again.
        """
        state = self._look()
        if state == self._state:
            return None
        if state is not None and not state.size and state != self._emptied:
            self._emptied = state
            return None
        self._state, self._emptied = state, None
        found = self._read()
        if found == self.current:
            return None
        self.current = found
        return found

    def _look(self) -> _State | None:
        try:
            status = self._path.stat()
        except OSError:
            return None
        return _State(status.st_ino, status.st_mtime_ns, status.st_size)

    def _read(self) -> T:
        try:
            text = self._path.read_bytes()
        except OSError as error:
            raise self._error(f"{self._path}: cannot be read ({error.strerror})") from None
        return self._parse(text, str(self._path))
