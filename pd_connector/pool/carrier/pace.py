# SPDX-License-Identifier: Apache-2.0
"""How fast chunks have come from the far store lately. Pure."""

_HALF_S = 1.0
"""After this time of transfer, in seconds, what has come counts half as much. One call of the far store brings several
chunks at once, so the last few chunks alone show no speed."""


class Pace:
    """Used under its owner's lock."""

    def __init__(self) -> None:
        self._nbytes = self._took_s = 0.0

    def came(self, nbytes: int, seconds: float) -> None:
        """A chunk has come, this time after the one before it, or after it was requested."""
        kept = 0.5 ** (seconds / _HALF_S)
        self._nbytes = kept * self._nbytes + nbytes
        self._took_s = kept * self._took_s + seconds

    def seconds(self, nbytes: int) -> float:
        """How long `nbytes` bytes will take, in seconds; 0 if nothing has come so far."""
        return nbytes * self._took_s / self._nbytes if self._nbytes else 0.0
