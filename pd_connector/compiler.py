# SPDX-License-Identifier: Apache-2.0
"""Compilation in the background; until it ends, callers use a slower path or do other work."""

import contextlib
import importlib
import logging
import threading
from collections.abc import Callable, Iterator
from types import ModuleType

logger = logging.getLogger("pd_connector.compiler")


class BackgroundCompile:
    """One compilation, in a thread of its own, begun once.

    Attributes:
        problem: what the compiler raised; None if it went well or has not ended.

    Args:
        compile_it: compiles. What it raises becomes `problem`.
        name: name of the thread.
        turn: compilations that share this lock run one after the other.
        daemon: whether the process may end during the compilation. A compiler that writes files or forks
            can crash the process if it is stopped midway.
    """

    def __init__(
        self,
        compile_it: Callable[[], object],
        name: str,
        *,
        turn: "threading.Lock | None" = None,
        daemon: bool,
    ) -> None:
        self.problem: Exception | None = None
        self._compile_it = compile_it
        self._turn = turn or threading.Lock()
        self._begin = threading.Lock()
        self._thread = threading.Thread(target=self._run, name=name, daemon=daemon)
        self._begun = False

    @property
    def begun(self) -> bool:
        return self._begun

    @property
    def ended(self) -> bool:
        """Whether the compilation has begun and ended, with or without an error."""
        return self._begun and not self._thread.is_alive()

    def begin(self) -> None:
        """Start the compilation if it has not begun. Returns at once. Any thread may call."""
        with self._begin:
            if not self._begun:
                self._thread.start()
                self._begun = True

    def wait(self) -> bool:
        """Wait until the compilation has ended; returns whether it went well."""
        self.begin()
        self._thread.join()
        return self.problem is None

    def _run(self) -> None:
        try:
            with self._turn:
                self._compile_it()
        except Exception as error:
            self.problem = error


class Compiler:
    """A module of loops that numba compiles at its import. Callers use a slower path until the loops are compiled,
    or always if numba is missing.

    Args:
        module: the name of the module.
        what: what its loops compute, for the log.
    """

    def __init__(self, module: str, what: str) -> None:
        self._module = module
        self._what = what
        self._loops: ModuleType | None = None
        self._work = BackgroundCompile(self._compile, f"pd-compile-{what}", daemon=True)

    @property
    def loops(self) -> ModuleType | None:
        """The module, if its functions are compiled."""
        return self._loops

    def begin(self) -> None:
        """Start the compilation if it has not begun. Returns at once."""
        self._work.begin()

    def wait(self) -> bool:
        """Wait until the compilation has ended; returns whether there are loops."""
        self._work.wait()
        return self._loops is not None

    @contextlib.contextmanager
    def off(self) -> Iterator[None]:
        """Hide the loops for the duration, to compare with the slower path."""
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
        except Exception as error:  # any fault of numba: everything works without it
            logger.info("%s on this CPU: without numba, which is slower: %r", self._what, error)
