# SPDX-License-Identifier: Apache-2.0
"""Compiles the kernels of each route in the background. A compiler in the agent's thread would leave sessions
unanswered for seconds.
"""

import functools
import logging
import threading
from collections.abc import Callable

from pd_connector.compiler import BackgroundCompile
from pd_connector.plan.route import Route

logger = logging.getLogger("pd_connector.pages.paged_cache")


class WarmUp:
    """The routes whose kernels have been compiled. Used by one thread.

    Args:
        compile_for: compiles the kernels that gather (True) or scatter (False) chunks of a route. Another thread
            calls it once for each, one at a time; an exception is logged.
    """

    def __init__(self, compile_for: Callable[[Route, bool], None]) -> None:
        self._compile_for = compile_for
        self._turn = threading.Lock()
        self._compiles: dict[tuple[Route, bool], BackgroundCompile] = {}

    def begin(self, route: Route, gathers: bool) -> bool:
        """Start the compilation, unless it has begun; returns whether it has ended, with or without an error."""
        key = route, gathers
        if key not in self._compiles:
            work = functools.partial(self._compile, route, gathers)
            # Not a daemon: see `BackgroundCompile`.
            compiling = BackgroundCompile(work, "pd-compile", turn=self._turn, daemon=False)
            self._compiles[key] = compiling
            compiling.begin()
        return self._compiles[key].ended

    def usable(self, route: Route, gathers: bool) -> bool:
        """Whether kernels may take a chunk. Waits for a compilation that `begin` has started. Other kernels are
        compiled at their first launch."""
        compiling = self._compiles.get((route, gathers))
        return compiling is None or compiling.wait()

    def _compile(self, route: Route, gathers: bool) -> None:
        try:
            self._compile_for(route, gathers)
        except Exception as error:
            logger.error(
                "the kernels that %s layers %d-%d as %s cannot be compiled, and torch moves them plane by "
                "plane: %r",
                "gather" if gathers else "scatter",
                route.layers[0],
                route.layers[-1],
                route.codec,
                error,
            )
            raise
