# SPDX-License-Identifier: Apache-2.0
"""How long a far store has for an answer, by the speed that it has shown. Pure."""

CAUTIOUS_BYTES_S = 10e6
"""Bytes for which a call has one second more while the store's speed is not known. No call has longer than that."""
_ROOM = 4.0
"""A call may take this many times as long as its bytes have taken so far: other hosts use the same link."""
_NEW = 0.25
"""Weight of a new measurement."""
_MEASURED_BYTES = 1 << 20
"""A call that moves fewer bytes shows little about the store's speed."""


class Deadlines:
    """The deadlines of one client's calls that read objects.

    Args:
        least_s: the longest duration of a call that moves no bytes, in seconds.
    """

    def __init__(self, least_s: float) -> None:
        self._least_s = least_s
        self._byte_s = 0.0  # 0: not measured

    def of(self, nbytes: int) -> float:
        """The longest duration of a call that moves `nbytes` bytes, in seconds."""
        cautious_s = self._least_s + nbytes / CAUTIOUS_BYTES_S
        if not self._byte_s:
            return cautious_s
        return min(cautious_s, max(self._least_s, _ROOM * nbytes * self._byte_s))

    def took(self, nbytes: int, seconds: float) -> None:
        """A call was answered after this time."""
        if nbytes >= _MEASURED_BYTES:
            new = seconds / nbytes
            self._byte_s = (1 - _NEW) * self._byte_s + _NEW * new if self._byte_s else new

    def passed(self) -> None:
        """A call was not answered in time. The store may have become slower, so the next call has longer."""
        self._byte_s *= 2
