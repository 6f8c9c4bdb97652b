# SPDX-License-Identifier: Apache-2.0
"""A settings file that can be edited while it is in use."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Generic, NamedTuple, TypeVar

T = TypeVar("T")


class _State(NamedTuple):
    """Attributes of a file that reveal a change."""

    inode: int
    changed_ns: int
    size: int


class Watched(Generic[T]):
    """The content of a file, read again when the file changes.

    Args:
        path: path of the file.
        parse: parses the file's bytes; its second argument is the file's name for error messages.
        error: the exception for an unreadable file; `parse` raises it too.

    Raises:
        The exception `error`: the file is invalid.
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
        """The new content, once after each valid change. An empty file counts only if it is found empty twice, because
        writing a file in place empties it first.

        Raises:
            The exception `error`: the file was changed and is invalid. `current` stays, and the error is raised once
            until the file changes again.
        """
        state = self._look()
        if state == self._state:
            return None
        if state is not None and not state.size and state != self._emptied:
            self._emptied = state
            return None
        self._state, self._emptied = state, None
        content = self._read()
        if content == self.current:
            return None
        self.current = content
        return content

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
