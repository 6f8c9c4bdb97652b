# SPDX-License-Identifier: Apache-2.0
"""Chunks that an engine does not use since its caches were reset, because they may be from before."""

from collections.abc import Iterable

_MOST_COMPUTED = 1 << 20
"""Chunks computed since the reset that are remembered, if other hosts have chunks too. What is forgotten is computed again."""


class BeforeReset:
    """Used by two threads: the look-up thread begins, ends and reads it; the scheduler's thread adds computed chunks.

    Chunks that other hosts had at the reset cannot be listed, and can come to this host later. If there are other
    hosts, every chunk counts as from before the reset unless this engine has computed it since.
    """

    def __init__(self) -> None:
        self._before: set[bytes] = set()
        self._since: dict[bytes, None] | None = None

    def begin(self, keys: Iterable[bytes], *, other_hosts: bool) -> None:
        """The caches were reset.

        Args:
            keys: keys of the chunks that this host has, or that are being saved.
        """
        self._before = set(keys)
        self._since = {} if other_hosts else None

    def end(self) -> None:
        """All chunks may be used again."""
        self._before, self._since = set(), None

    def computed(self, keys: Iterable[bytes]) -> None:
        """This engine has computed these chunks since."""
        keys = list(keys)
        self._before.difference_update(keys)
        if (since := self._since) is not None:
            since.update(dict.fromkeys(keys))
            while len(since) > _MOST_COMPUTED:
                del since[next(iter(since))]

    def __bool__(self) -> bool:
        return bool(self._before) or self._since is not None

    def __len__(self) -> int:
        return len(self._before)

    def __contains__(self, key: bytes) -> bool:
        return key in self._before or (self._since is not None and key not in self._since)
