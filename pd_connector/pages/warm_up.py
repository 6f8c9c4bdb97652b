# SPDX-License-Identifier: Apache-2.0
"""Kernels are compiled in threads of their own, so that no chunk waits for a compiler in the agent's, in
which sessions would go unanswered for seconds.
"""

import logging
import threading
from collections.abc import Callable

from pd_connector.plan.route import Route

logger = logging.getLogger("pd_connector.pages.paged_cache")

Key = tuple[Route, bool]


class WarmUp:
    """Which routes' kernels have been compiled. Asked by one thread.

    Args:
        compile_for: compiles what chunks of a route need to be gathered (True) or scattered (False).
            Called once for each, one at a time, by another thread; what it raises is logged.
    """

    def __init__(self, compile_for: Callable[[Route, bool], None]) -> None:
        self._compile_for = compile_for
        self._turn = threading.Lock()
        self._threads: dict[Key, threading.Thread] = {}
        self._failed: set[Key] = set()

    def begin(self, route: Route, gathers: bool) -> bool:
        """Compile, unless that was begun before; returns whether it has ended, well or not."""
        key = route, gathers
        if key not in self._threads:
            # Not a daemon: a compiler that is ended midway may take the process with it.
            thread = threading.Thread(target=self._run, args=(key,), name="pd-compile")
            self._threads[key] = thread
            thread.start()
        return not self._threads[key].is_alive()

    def usable(self, route: Route, gathers: bool) -> bool:
        """Whether kernels may take a chunk. Waits for what `begin` has begun; what nobody has begun is
        compiled at its first launch."""
        key = route, gathers
        if key in self._threads:
            self._threads[key].join()
        return key not in self._failed

    def _run(self, key: Key) -> None:
        route, gathers = key
        try:
            with self._turn:
                self._compile_for(route, gathers)
        except Exception as error:
            self._failed.add(key)
            logger.error(
                "the kernels that %s layers %d-%d as %s cannot be compiled, and torch moves them block by "
                "block: %r",
                *("gather" if gathers else "scatter", route.layers[0], route.layers[-1]),
                *(route.codec, error),
            )
