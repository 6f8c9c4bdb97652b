# SPDX-License-Identifier: Apache-2.0
"""Number of requests at the same minute of earlier days, in sums that a file keeps."""

from __future__ import annotations

from pathlib import Path

import msgspec

MINUTES = 24 * 60
LEAST_DAYS, MOST_DAYS = 2, 7
"""A minute is known from `LEAST_DAYS` on. Beyond `MOST_DAYS` the older ones count less and less."""
AROUND = 2
"""Minutes before and after that count, too: those of one minute are few."""
MOST_BYTES = 16 << 20


class DaysError(ValueError):
    """The file cannot be used; the message names it."""


class _Minutes(msgspec.Struct, forbid_unknown_fields=True):
    """A group's minutes of the day."""

    sums: list[float]
    days: list[int]


class Days:
    """Requests of each minute of the day, summed over days, by group. No clock: callers say the minute."""

    def __init__(self, groups: dict[str, _Minutes] | None = None) -> None:
        self._groups = groups or {}

    @classmethod
    def load(cls, path: Path) -> Days:
        """Read the file; without one, nothing is known yet.

        Raises:
            DaysError: the file cannot be read, or another program wrote it.
        """
        try:
            if not path.exists():
                if not path.parent.is_dir():
                    raise DaysError(f"days {path}: no such folder; make it, or name another file")
                return cls()
            if path.stat().st_size > MOST_BYTES:
                raise DaysError(
                    f"days {path}: must be at most {MOST_BYTES:,} bytes; name another file"
                )
            groups = msgspec.json.decode(path.read_bytes(), type=dict[str, _Minutes])
        except OSError as error:
            raise DaysError(f"days {path}: cannot be read ({error.strerror})") from None
        except msgspec.MsgspecError as error:
            raise DaysError(
                f"days {path}: was not written by the router ({error}); name another file"
            ) from None
        for name, minutes in groups.items():
            numbers = [*minutes.sums, *minutes.days]
            if len(minutes.sums) != MINUTES or len(minutes.days) != MINUTES or min(numbers) < 0:
                raise DaysError(
                    f"days {path}: group {name!r}: must have {MINUTES} sums and days from 0 on; name another file"
                )
        return cls(groups)

    def save(self, path: Path) -> None:
        """Write the file. Raises OSError."""
        fresh = path.with_name(path.name + ".new")
        fresh.write_bytes(msgspec.json.encode(self._groups))
        fresh.replace(path)

    def add(self, group: str, minute: int, requests: float) -> None:
        """A minute of the day has passed, in which this many requests came."""
        kept = self._groups.setdefault(group, _Minutes([0.0] * MINUTES, [0] * MINUTES))
        if kept.days[minute] >= MOST_DAYS:
            kept.sums[minute] *= (MOST_DAYS - 1) / kept.days[minute]
            kept.days[minute] = MOST_DAYS - 1
        kept.sums[minute] += requests
        kept.days[minute] += 1

    def per_s(self, group: str, minute: int) -> float | None:
        """Mean requests a second about this minute of the day; None if fewer than two days are known."""
        kept = self._groups.get(group)
        if kept is None:
            return None
        about = [(minute + n) % MINUTES for n in range(-AROUND, AROUND + 1)]
        if min(kept.days[n] for n in about) < LEAST_DAYS:
            return None
        return sum(kept.sums[n] / kept.days[n] for n in about) / len(about) / 60
