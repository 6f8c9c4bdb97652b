# SPDX-License-Identifier: Apache-2.0
"""Modules of loops that numba compiles when they are imported, and whether they can be used yet. Where numba
is missing (vLLM brings it), and until they are compiled, whoever wants them has a slower way."""

import contextlib
import importlib
import logging
import threading
from collections.abc import Iterator
from types import ModuleType

logger = logging.getLogger("pd_connector.compiler")


class Compiler:
    """Compiles once a process, in a thread of its own: nobody waits for it.

    Args:
        module: the name of the module.
        what: what its loops compute, for the log.
    """

    def __init__(self, module: str, what: str) -> None:
        self._module = module
        self._what = what
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._loops: ModuleType | None = None

    @property
    def loops(self) -> ModuleType | None:
        """The module, if its functions are compiled."""
        return self._loops

    def begin(self) -> None:
        """Compile, if that has not begun. Returns at once."""
        with self._lock:
            if self._thread is None:
                name = f"pd-compile-{self._what}"
                self._thread = threading.Thread(target=self._compile, name=name, daemon=True)
                self._thread.start()

    def wait(self) -> bool:
        """Compile to the end; returns whether there are loops."""
        self.begin()
        assert self._thread is not None
        self._thread.join()
        return self._loops is not None

    @contextlib.contextmanager
    def off(self) -> Iterator[None]:
        """There are no loops meanwhile: to compare."""
        loops, self._loops = self._loops, None
        try:
            yield
        finally:
            self._loops = loops

    def _compile(self) -> None:
        try:
            import numba

            if not numba.config.DISABLE_JIT:
                self._loops = importlib.import_module(self._module)
                logger.info("%s on this CPU: by loops that numba has compiled", self._what)
        except Exception as error:  # whatever is wrong with numba here, all works without it
            logger.info("%s on this CPU: without numba, which is slower: %r", self._what, error)
