# SPDX-License-Identifier: Apache-2.0
"""Calls a far store through a child process, which is killed and started again when a call passes its deadline."""

import contextlib
import logging
import mmap
import os
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import NoReturn

import msgspec

from pd_connector.pool.carrier.child import MOST_MESSAGE, Answer, Call, Open
from pd_connector.pool.carrier.lasting import LastingThread
from pd_connector.pool.far.environment import command

logger = logging.getLogger("pd_connector.pool.carrier")

START_S = 180.0
"""Longest start of a child, in seconds: it may import a large package, and connect."""
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.5, 10.0
"""How long a child that died, or was killed, is not started again."""
_KEPT_BYTES = 64 << 20
"""Shared memory that stays between calls."""
_LEAST_BYTES_S = 10e6
"""Bytes for which a call has one second more."""
_answers = msgspec.msgpack.Decoder(Answer)


class SilentError(Exception):
    """The far store does not answer, or refuses to."""


class FarClient:
    """One child, and calls to it. Any thread may call; calls wait for each other.

    Attributes:
        problem: why no calls can be made; empty if they can be made.
        since_s: Unix time of the last change between the two.

    Args:
        name: its purpose, for logs.
        address: the store's address.
        deadline_s: longest duration of a call that moves no bytes.
        python: the Python that runs the child; empty: this one.
    """

    def __init__(self, name: str, address: str, deadline_s: float, python: str = "") -> None:
        self._name, self._address, self._deadline_s = name, address, deadline_s
        self._python = python
        self._lock = threading.Lock()
        self._shared = os.memfd_create(f"pd-far-{name}", os.MFD_CLOEXEC)
        self._memory: mmap.mmap | None = None
        self._number = 0
        self._ends, self._broken = threading.Event(), threading.Event()
        self._ready: tuple[subprocess.Popen[bytes], socket.socket] | None = None
        self.problem = "is being opened"
        self.since_s = time.time()
        self.killed = self.opened = 0
        self._pause_s = _FIRST_PAUSE_S
        self._keeper = LastingThread(f"pd-far-{name}", self._keep, self._ends)

    @property
    def is_ready(self) -> bool:
        """Whether calls can be made."""
        return self._ready is not None

    @property
    def pid(self) -> int:
        """The child's process id; 0 if there is none."""
        return self._ready[0].pid if self._ready else 0

    @property
    def errors(self) -> int:
        """Number of errors of the thread that keeps the child. It continues after each."""
        return self._keeper.errors

    def has(self, names: Sequence[str]) -> list[int]:
        """The bytes of each object. Raises SilentError."""
        with self._lock:
            return self._call("has", names)

    def remove(self, names: Sequence[str]) -> None:
        """Remove objects. Raises SilentError."""
        with self._lock:
            self._call("remove", names)

    def get(
        self, names: Sequence[str], sizes: Sequence[int], take: Callable[[int, memoryview], None]
    ) -> None:
        """Read objects of these sizes.

        Args:
            take: called for each object that was read, with its index and its bytes. Another process can still change
                the bytes.

        Raises:
            SilentError: the store does not answer.
        """
        with self._lock, self._memory_of(sum(sizes)) as memory:
            read, start = self._call("get", names, sizes), 0
            for place, (nbytes, size) in enumerate(zip(read, sizes, strict=True)):
                if 0 < nbytes <= size:
                    with memory[start : start + nbytes] as data:
                        take(place, data)
                start += size

    def put(
        self,
        names: Sequence[str],
        sizes: Sequence[int],
        fill: Callable[[int, memoryview], None],
    ) -> list[bool]:
        """Write objects of these sizes. Returns which were taken.

        Args:
            fill: called with an object's index and a buffer; writes the object there.

        Raises:
            SilentError: the store does not answer.
        """
        with self._lock, self._memory_of(sum(sizes)) as memory:
            start = 0
            for place, size in enumerate(sizes):
                with memory[start : start + size] as room:
                    fill(place, room)
                start += size
            return [bool(value) for value in self._call("put", names, sizes)]

    def close(self) -> None:
        """End the child."""
        self._ends.set()
        self._broken.set()
        self._keeper.join()
        with self._lock, contextlib.suppress(OSError):
            if self._memory is not None:
                self._memory.close()
            os.close(self._shared)

    @contextlib.contextmanager
    def _memory_of(self, nbytes: int) -> Iterator[memoryview]:
        """The shared memory for a call. Large memory is freed after the call. Raises SilentError if there is no child,
        also after `close`."""
        if self._ready is None:
            raise SilentError(self.problem)
        if self._memory is None or nbytes > len(self._memory):
            os.ftruncate(self._shared, max(nbytes, mmap.PAGESIZE))
            self._memory = mmap.mmap(self._shared, max(nbytes, mmap.PAGESIZE))
        with memoryview(self._memory) as memory:
            yield memory
        if len(self._memory) > _KEPT_BYTES:
            self._memory.close()
            self._memory = None
            os.ftruncate(self._shared, 0)

    def _call(self, method: str, names: Sequence[str], sizes: Sequence[int] = ()) -> list[int]:
        ready = self._ready
        if ready is None:
            raise SilentError(self.problem)
        self._number += 1
        call = Call(self._number, method, list(names), list(sizes))
        deadline_s = self._deadline_s + sum(sizes) / _LEAST_BYTES_S
        try:
            answer = _exchanged(ready[1], msgspec.msgpack.encode(call), deadline_s)
            if answer.number != call.number or len(answer.values) not in (0, len(names)):
                raise ValueError("an answer to another call")
        except TimeoutError:
            self._break(f"has not answered for {deadline_s:.2f} s")
        except (OSError, ValueError, EOFError) as error:
            self._break(f"its client has died ({error!r})")
        if answer.problem:
            self._break(answer.problem)
        return answer.values or [0] * len(names)

    def _break(self, problem: str) -> NoReturn:
        """Kill the child, and drop its memory: late writes of the child must not reach the next call."""
        self._set(None, problem)
        self.killed += 1
        self._broken.set()
        raise SilentError(problem) from None

    def _set(
        self, ready: "tuple[subprocess.Popen[bytes], socket.socket] | None", problem: str
    ) -> None:
        """Calls can be made from now on, or cannot."""
        if (ready is None) is not (self._ready is None):
            self.since_s = time.time()
        self._ready, self.problem = ready, problem

    def _keep(self) -> None:
        """Start the child, and wait until it is broken."""
        self._broken.clear()
        if self._ends.is_set():  # since before that
            return
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with ours:
            with theirs:
                process = self._started(theirs)
            try:
                self._opened(process, ours)
                began_s = time.monotonic()
                while not self._broken.wait(0.2):
                    if process.poll() is not None:
                        self._set(None, "its client has died")
                        break
                if time.monotonic() - began_s > _LONGEST_PAUSE_S:
                    self._pause_s = _FIRST_PAUSE_S
            except (OSError, ValueError, EOFError, SilentError) as error:
                self._set(None, str(error))
            finally:
                self._set(None, self.problem)
                process.kill()
                process.wait()
        if self._ends.is_set():
            return
        logger.warning(
            "far store (%s): %s; it is opened again in %.1f s, and engines compute meanwhile",
            self._name,
            self.problem,
            self._pause_s,
        )
        self._ends.wait(self._pause_s)
        self._pause_s = min(2 * self._pause_s, _LONGEST_PAUSE_S)

    def _started(self, theirs: socket.socket) -> "subprocess.Popen[bytes]":
        shared = self._shared
        descriptors = str(theirs.fileno()), str(shared)
        return subprocess.Popen(
            command(self._python, "pd_connector.pool.carrier.child", *descriptors),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            pass_fds=(theirs.fileno(), shared),
        )

    def _opened(self, process: "subprocess.Popen[bytes]", channel: socket.socket) -> None:
        message = msgspec.msgpack.encode(Open(self._address, self._deadline_s))
        channel.sendall(message)
        until_s = time.monotonic() + START_S
        while True:
            channel.settimeout(0.2)
            try:
                answer = _decoded(channel.recv(MOST_MESSAGE))
                break
            except TimeoutError:
                if self._ends.is_set() or time.monotonic() > until_s:
                    raise SilentError(f"could not be opened within {START_S:g} s") from None
        if answer.problem:
            raise SilentError(f"could not be opened: {answer.problem}")
        self.opened += 1
        self._set((process, channel), "")
        logger.info("far store (%s): in use", self._name)


def _exchanged(channel: socket.socket, message: bytes, deadline_s: float) -> Answer:
    channel.settimeout(deadline_s)
    channel.sendall(message)
    return _decoded(channel.recv(MOST_MESSAGE))


def _decoded(data: bytes) -> Answer:
    if not data:
        raise EOFError("it ended")
    return _answers.decode(data)
