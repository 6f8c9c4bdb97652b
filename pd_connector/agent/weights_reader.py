# SPDX-License-Identifier: Apache-2.0
"""Reads all bytes of the weights that an engine loads, beside its work.

Until the weights were read, no KV is handed over, loaded from the pool or saved. So reading starts when the engine
begins to load them, and goes on while it compiles and captures graphs. Most bytes come from the page cache, because the
engine reads the same files. The result is cached on disk, so the next start has it at once.
"""

import json
import logging
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pd_connector
from pd_connector.kv.checkpoint_files import CheckpointFiles
from pd_connector.kv.weights import cache_file, known_fingerprint, usable
from pd_connector.remedies import weights_read

logger = logging.getLogger("pd_connector.agent.weights_reader")

_PROGRAM = (
    "import sys; sys.path.append(sys.argv[1]); "
    "from pd_connector.agent.weights_program import main; main()"
)
_ROOT = str(Path(pd_connector.__file__).parents[1])
_MOST_RUNS = 2
"""Runs of the program that end without the weights, before they count as unknown."""
_SAY_S = 10.0
"""Time between two lines of the log while weights are read."""


class WeightsReader:
    """Reads one checkpoint. Starts when made. At its end `part.weights` is set, or `part.problem`.

    Args:
        part: its files stay open until their owner closes them.
        cache: see `kv.weights.fingerprint`.

    Attributes:
        read_bytes: number of bytes read so far.
        stopped: the result is not needed any more.
    """

    def __init__(self, part: CheckpointFiles, cache: Path | None) -> None:
        self.part = part
        self.read_bytes = 0
        self._tell: list[tuple[Callable[[], None], Callable[[], None]]] = []
        self._lock = threading.Lock()
        self.stopped = self._over = False
        self._program: subprocess.Popen[str] | None = None
        self._thread: threading.Thread | None = None
        with suppress(OSError, ValueError):
            part.weights = part.weights or known_fingerprint(part.files, cache)
        if part.weights or part.problem:
            self.read_bytes = part.nbytes
            return
        self._thread = threading.Thread(
            target=self._run, args=(cache,), name="pd-weights", daemon=True
        )
        self._thread.start()

    def tell(self, progressed: Callable[[], None], ended: Callable[[], None]) -> None:
        """Register callbacks, called in the reader's thread: `progressed` now and then, `ended` once at the end. If the
        reader has ended already, `ended` is called now. If the reader is stopped first, it is never called."""
        with self._lock:
            if self._thread is not None and not self._over:
                self._tell.append((progressed, ended))
                return
        ended()

    def stop(self) -> None:
        """Stop reading: the result is not needed any more."""
        with self._lock:
            self.stopped = True
            self._tell.clear()
            if self._program is not None:
                self._program.kill()

    def join(self, timeout_s: float) -> bool:
        """Wait until its thread ends, at most `timeout_s` seconds. Returns whether it has ended."""
        if self._thread is None:
            return True
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _run(self, cache: Path | None) -> None:
        began = said = time.monotonic()
        weights, problem = b"", "the program that reads them has failed; this log has its error"
        try:
            for kind, value in self._tries(usable(cache)):
                if kind == "read":
                    self.read_bytes = min(int(value), self.part.nbytes)
                    for progressed, _ in list(self._tell):
                        progressed()
                else:
                    weights, problem = bytes.fromhex(value), ""
                if time.monotonic() >= said + _SAY_S:
                    said = time.monotonic()
                    logger.info("%s", weights_read(self.read_bytes, self.part.nbytes))
            self.part.look()
        except Exception as error:  # whatever it is, others wait for the end
            problem = f"they cannot be read: {error}"
        with self._lock:
            if self.stopped:
                return
            self._over = True
            self.part.problem = self.part.problem or problem
            if not self.part.problem:
                self.part.weights, self.read_bytes = weights, self.part.nbytes
                gb, took_s = self.part.nbytes / 1e9, time.monotonic() - began
                logger.info("all bytes of the weights are known: %.3g GB in %.3g s", gb, took_s)
        for _, ended in self._tell:
            ended()

    def _tries(self, cache: Path | None) -> Iterator[list[str]]:
        """The program's output lines. The program is run again if it was killed, for example when memory was short for
        a moment."""
        for _ in range(_MOST_RUNS):
            line: list[str] = []
            for line in self._lines(cache):
                yield line
            if self.stopped or line[:1] == ["weights"]:
                return

    def _lines(self, cache: Path | None) -> Iterator[list[str]]:
        """The program's output lines, up to its result or its end. Reading stops there, because a process that the
        engine has forked can keep the pipe open."""
        with suppress(OSError):  # an engine may have bound its threads to one core each
            own = {core for task in os.listdir("/proc/self/task") for core in _cores(int(task))}
            os.sched_setaffinity(0, own)
        files = [(str(file.path), file.descriptor) for file in self.part.files]
        order = json.dumps([str(cache) if cache else None, files])
        command = [sys.executable, "-P", "-c", _PROGRAM, _ROOT]
        with subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            pass_fds=[descriptor for _, descriptor in files],
            text=True,
        ) as program:
            assert program.stdin is not None
            assert program.stdout is not None
            with self._lock:
                self._program = program
                if self.stopped:
                    program.kill()
            program.stdin.write(order + "\n")
            program.stdin.flush()
            for line in program.stdout:
                words = line.split()
                yield words
                if words[0] == "weights":
                    return


def reading(part: CheckpointFiles) -> WeightsReader:
    """The reader of a checkpoint; made and started now if there is none yet."""
    if part.reader is None or part.reader.stopped:
        part.reader = WeightsReader(part, cache_file())
    reader: WeightsReader = part.reader
    return reader


def _cores(task: int) -> set[int]:
    try:
        return os.sched_getaffinity(task)
    except OSError:  # it has just ended
        return set()
