# SPDX-License-Identifier: Apache-2.0
"""What a producer remembers of transfers that it no longer has, or that nobody wants."""

_REMEMBERED = 1024


class PastTransfers:
    """Used by one thread."""

    def __init__(self) -> None:
        # Whoever opens one of them need not wait for a prefill that will not come.
        self._ended: dict[str, None] = {}
        # Cancelled before their prefill ended, and until when that is remembered: the last offer,
        # when it comes, is freed at once.
        self._unwanted: dict[str, float] = {}

    def has_ended(self, transfer: str) -> bool:
        return transfer in self._ended

    def is_unwanted(self, transfer: str) -> bool:
        return transfer in self._unwanted

    def end(self, transfer: str) -> None:
        """It has ended. The last thousand are remembered."""
        self._ended[transfer] = None
        if len(self._ended) > _REMEMBERED:
            del self._ended[next(iter(self._ended))]

    def begin_again(self, transfer: str) -> None:
        """A new request has the same transfer."""
        self._ended.pop(transfer, None)

    def unwant(self, transfer: str, until: float) -> None:
        """Nobody wants it; remembered until this time."""
        self._unwanted[transfer] = until

    def forget_unwanted(self, transfer: str) -> None:
        """Its request has ended."""
        self._unwanted.pop(transfer, None)

    def tick(self, now: float) -> None:
        """Forget what was to be remembered until now."""
        self._unwanted = {t: until for t, until in self._unwanted.items() if until > now}
