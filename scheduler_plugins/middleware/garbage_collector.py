# SPDX-License-Identifier: Apache-2.0
"""Python's garbage collector in an API server that has thousands of requests open.

An open request is hundreds of objects, none of them garbage. While requests become more, CPython
looks through all of them every few seconds, and every answer waits until it has: 0.1 to 0.3 s with
2,000 requests open, so that a flood of one class of users delays the first tokens of the others
whatever the engine's scheduler does.
"""

from __future__ import annotations

import gc

OLDEST_EVERY = 200
"""Collections of the middle generation for each of the oldest, which CPython makes after 10. At 7,000
containers for each of the former it is made when 1.4 million more are there than before: by several
thousand requests more, or by so much garbage, which is what this may cost in memory (some 100 MB)."""


def collect_less() -> None:
    """Let the oldest generation alone for longer. What somebody else has set higher stays."""
    first, second, third = gc.get_threshold()
    gc.set_threshold(first, second, max(third, OLDEST_EVERY))
