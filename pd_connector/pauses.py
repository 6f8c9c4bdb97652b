# SPDX-License-Identifier: Apache-2.0
"""Pauses between attempts that fail. They double."""

_MOST_DOUBLINGS = 64
"""More would not change a pause. A power of 1024 overflows a float, and some attempts fail for weeks."""


def doubled_s(first_s: float, doublings: int, longest_s: float) -> float:
    """Seconds of a pause that began as `first_s` and has doubled this number of times; at most `longest_s`.

    >>> [doubled_s(1.0, doublings, 30.0) for doublings in (0, 1, 4, 5, 1_000_000)]
    [1.0, 2.0, 16.0, 30.0, 30.0]
    """
    return min(longest_s, first_s * 2.0 ** min(doublings, _MOST_DOUBLINGS))
