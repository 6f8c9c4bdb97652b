# SPDX-License-Identifier: Apache-2.0
"""Python's garbage collector in an API server with thousands of open requests.

An open request is hundreds of objects, none of them garbage. While the number of requests grows, CPython traverses all
these objects every few seconds. Every answer waits for that: 0.1 to 0.3 s with 2,000 open requests. So a flood from one
class of users delays the first tokens of other classes, and the engine's scheduler cannot prevent it.
"""

from __future__ import annotations

import gc

OLDEST_EVERY = 200
"""Collections of the middle generation per collection of the oldest generation; CPython's default is 10. Each of the
former comes after 7,000 new containers, so the latter comes after 1.4 million new containers. These are several
thousand more requests, or garbage, which can cost about 100 MB of memory."""


def collect_less() -> None:
    """Collect the oldest generation less often. A higher value that is already set stays."""
    first, second, third = gc.get_threshold()
    gc.set_threshold(first, second, max(third, OLDEST_EVERY))
