# SPDX-License-Identifier: Apache-2.0
"""How fast chunks have come from the far store lately. Pure."""

_OLD = 0.9
"""With each chunk, those before count this many times as much as they did."""


class Pace:
    """Used under its owner's lock."""

    def __init__(self) -> None:
        self._nbytes = self._took_s = 0.0

    def came(self, nbytes: int, seconds: float) -> None:
        """A chunk has come, this time after the one before it, or after it was requested."""
        self._nbytes = _OLD * self._nbytes + nbytes
        self._took_s = _OLD * self._took_s + seconds

    def seconds(self, nbytes: int) -> float:
        """How long `nbytes` bytes will take, in seconds; 0 if nothing has come so far."""
        return nbytes * self._took_s / self._nbytes if self._nbytes else 0.0
