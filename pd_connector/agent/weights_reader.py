# SPDX-License-Identifier: Apache-2.0
"""Reads all bytes of the weights that an engine has loaded, beside its work.

Samples are read at once, and let KV pass. They do not show one row of a table of embeddings. So all bytes follow:
at several GB/s, mostly out of the page cache into which the engine has just read them.
"""

import logging
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from pd_connector.kv.checkpoint_files import CheckpointFiles
from pd_connector.kv.weights import full_fingerprint, read_weights

logger = logging.getLogger("pd_connector.agent.weights_reader")


class WeightsReader:
    """Starts its thread when made.

    Args:
        parts: the checkpoints that the model consists of, in the order of `kv.weights.read_weights`, which has
            taken samples of them. They are closed when they were read.
        cache: see `full_fingerprint`.
        tell: called with the fingerprint by the thread, unless it was stopped before.
    """

    def __init__(
        self, parts: Sequence[CheckpointFiles], cache: Path | None, tell: Callable[[bytes], None]
    ) -> None:
        self._parts = tuple(parts)
        self._cache = cache
        self._tell = tell
        self._stopped = False
        self._telling = threading.Lock()
        self._thread = threading.Thread(target=self._run, name="pd-weights", daemon=True)
        self._thread.start()

    @property
    def reads(self) -> bool:
        """Whether it has yet to tell what it finds."""
        return not self._stopped and self._thread.is_alive()

    def stop(self) -> None:
        """These weights are not those that the engine serves any more: nothing is told after this."""
        with self._telling:
            self._stopped = True

    def join(self, timeout_s: float) -> bool:
        """Wait for its end; returns whether it has come."""
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        began = time.monotonic()
        try:
            full = self._read()
        except (OSError, ValueError) as error:
            logger.warning("weights are compared by samples only: %s", error)
            return
        finally:
            nbytes = sum(file.size for part in self._parts for file in part.files)
            for part in self._parts:
                part.close()
        with self._telling:
            if self._stopped or not full:
                return
            took_s = time.monotonic() - began
            logger.info(
                "all bytes of the weights are known: %.3g GB in %.3g s", nbytes / 1e9, took_s
            )
            self._tell(full)

    def _read(self) -> bytes:
        for part in self._parts:
            assert part.weights is not None, "samples are taken first"
            full = full_fingerprint(part.files, self._cache, lambda: self._stopped)
            if not full:
                return b""
            part.look()
            if part.problem:
                raise ValueError(part.problem)
            part.weights = part.weights._replace(full=full)
        return read_weights(self._parts).full
