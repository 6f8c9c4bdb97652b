# SPDX-License-Identifier: Apache-2.0
"""Whether the codecs' compiled loops can be used. Where numba is missing (vLLM brings it), and until they
are compiled, torch computes the same, several times as slowly."""

import contextlib
import logging
import threading
from collections.abc import Iterator
from types import ModuleType

import torch

from pd_connector.codec.elements import Elements

logger = logging.getLogger("pd_connector.codec")


class Compiler:
    """Compiles once a process, in a thread of its own: nobody waits for it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._loops: ModuleType | None = None

    def begin(self) -> None:
        """Compile, if that has not begun. Returns at once."""
        with self._lock:
            if self._thread is None:
                self._thread = threading.Thread(
                    target=self._compile, name="pd-compile-codecs", daemon=True
                )
                self._thread.start()

    def wait(self) -> bool:
        """Compile to the end; returns whether there are loops."""
        self.begin()
        assert self._thread is not None
        self._thread.join()
        return self._loops is not None

    def loops_for(self, x: torch.Tensor, elements: Elements) -> ModuleType | None:
        """The module `loops`, if its functions are compiled and take such a block.

        Args:
            x: elements `[head, token, dim]`, or their codes.
            elements: what float elements are stored as.
        """
        fits = elements.dtype == "bfloat16" and x.is_contiguous() and x.device.type == "cpu"
        return self._loops if fits else None

    @contextlib.contextmanager
    def off(self) -> Iterator[None]:
        """Leave all to torch meanwhile: to compare."""
        loops, self._loops = self._loops, None
        try:
            yield
        finally:
            self._loops = loops

    def _compile(self) -> None:
        try:
            import numba

            if not numba.config.DISABLE_JIT:
                from pd_connector.codec import loops

                self._loops = loops
                logger.info("codecs on this CPU are computed by loops that numba has compiled")
        except Exception as error:  # whatever is wrong with numba here, codecs work without it
            logger.info("codecs on this CPU are computed by torch, not by numba: %r", error)


COMPILER = Compiler()
