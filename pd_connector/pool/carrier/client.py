# SPDX-License-Identifier: Apache-2.0
"""Calls a far store through a child process, which is killed and started again when a call passes its deadline.

Objects are read in several calls. While the caller takes what one call has read, the child reads for the next
call, so the link to the store is not idle:

    child     | read 1 | read 2 | read 3 | ...
    caller             | take 1 | take 2 | ...

The two calls have different halves of the memory that both processes share.
"""

import contextlib
import logging
import mmap
import os
import socket
import subprocess
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple, NoReturn

import msgspec

from pd_connector.pool.carrier.child import MOST_MESSAGE, Answer, Call, Open
from pd_connector.pool.carrier.deadlines import CAUTIOUS_BYTES_S, Deadlines
from pd_connector.pool.carrier.lasting import LastingThread
from pd_connector.pool.far.environment import command

logger = logging.getLogger("pd_connector.pool.carrier")

START_S = 180.0
"""Longest start of a child, in seconds: it may import a large package, and connect."""
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.5, 10.0
"""How long a child that died, or was killed, is not started again."""
_GET_BYTES = 4 << 20
"""Bytes that one call reads, unless a single object has more. Engines wait for the first call, and for what follows the
last one."""
_HALF_BYTES = 64 << 20
"""Two calls may be under way at once if neither reads more bytes."""
_KEPT_BYTES = 2 * _HALF_BYTES
"""Shared memory that stays between calls."""
_answers = msgspec.msgpack.Decoder(Answer)
_Child = tuple["subprocess.Popen[bytes]", socket.socket]
Take = Callable[[int, memoryview], None]


class SilentError(Exception):
    """The far store does not answer, or refuses to."""


class Reads(NamedTuple):
    """Objects that one call reads.

    Attributes:
        first, stop: indices of the objects, from `first` up to `stop`.
        start: where the first one lies in the shared memory.
    """

    first: int
    stop: int
    nbytes: int
    start: int

    @property
    def is_alone(self) -> bool:
        """Whether no other call may be under way meanwhile."""
        return self.nbytes > _HALF_BYTES


def split(sizes: Sequence[int]) -> list[Reads]:
    """The calls that read objects of these sizes. A stranger can write large objects, so at most one large object is in
    memory at a time."""
    runs, first, nbytes = [], 0, 0
    for place, size in enumerate(sizes):
        if place > first and nbytes + size > _GET_BYTES:
            runs.append((first, place, nbytes))
            first, nbytes = place, 0
        nbytes += size
    if first < len(sizes):
        runs.append((first, len(sizes), nbytes))
    half = max((nbytes for *_, nbytes in runs if nbytes <= _HALF_BYTES), default=0)
    return [
        Reads(*run, start=0 if run[2] > _HALF_BYTES else number % 2 * half)
        for number, run in enumerate(runs)
    ]


class _UnderWay(NamedTuple):
    """A call that was sent to the child."""

    call: Call
    child: _Child
    nbytes: int
    sent_s: float


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
        self._ready: _Child | None = None
        self._deadlines = Deadlines(deadline_s)
        self._answered_s = 0.0
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

    def get(self, names: Sequence[str], sizes: Sequence[int], take: Take) -> None:
        """Read objects of these sizes, in several calls.

        Args:
            take: called for each object, in their order, with its index and its bytes; none if it was not read. Another
                process can still change the bytes.

        Raises:
            SilentError: the store does not answer. Objects that were taken before are whole.
        """
        if not (calls := split(sizes)):
            return
        with self._lock, self._memory_of(max(c.start + c.nbytes for c in calls)) as memory:
            child = self._child()
            under_way: deque[tuple[Reads, _UnderWay]] = deque()

            def finish() -> None:
                reads, call = under_way.popleft()
                started_s = max(call.sent_s, self._answered_s)
                read = self._received(call, self._deadlines.of(call.nbytes))
                self._deadlines.took(call.nbytes, self._answered_s - started_s)
                start = reads.start
                for place, nbytes in enumerate(read, reads.first):
                    whole = 0 < nbytes <= sizes[place]
                    with memory[start : start + nbytes if whole else start] as data:
                        take(place, data)
                    start += sizes[place]

            try:
                for reads in calls:
                    if under_way and (reads.is_alone or under_way[0][0].is_alone):
                        finish()
                    part = slice(reads.first, reads.stop)
                    call = self._sent(child, "get", names[part], sizes[part], reads.start)
                    under_way.append((reads, call))
                    if len(under_way) == 2:
                        finish()
                while under_way:
                    finish()
            except SilentError:
                raise
            except BaseException:  # of `take`: the next call waits until the child writes no more
                with contextlib.suppress(SilentError):
                    for _, call in under_way:
                        self._received(call, self._deadlines.of(call.nbytes))
                raise

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
        deadline_s = self._deadline_s + sum(sizes) / CAUTIOUS_BYTES_S
        return self._received(self._sent(self._child(), method, names, sizes), deadline_s)

    def _child(self) -> _Child:
        """Raises SilentError."""
        child = self._ready
        if child is None:
            raise SilentError(self.problem)
        return child

    def _sent(
        self,
        child: _Child,
        method: str,
        names: Sequence[str],
        sizes: Sequence[int],
        start: int = 0,
    ) -> _UnderWay:
        """Have a child begin a call, after the call that is under way. Raises SilentError."""
        self._number += 1
        call = Call(self._number, method, list(names), list(sizes), start)
        channel = child[1]
        try:
            channel.settimeout(self._deadline_s)
            channel.sendall(msgspec.msgpack.encode(call))
        except OSError as error:
            self._break(child, f"its client has died ({error!r})")
        return _UnderWay(call, child, sum(sizes), time.monotonic())

    def _received(self, under_way: _UnderWay, deadline_s: float) -> list[int]:
        """The values of the answer, which comes within this time from now. Raises SilentError."""
        call, child = under_way.call, under_way.child
        channel = child[1]
        try:
            channel.settimeout(deadline_s)
            answer = _decoded(channel.recv(MOST_MESSAGE))
            if answer.number != call.number or len(answer.values) not in (0, len(call.names)):
                raise ValueError("an answer to another call")
        except TimeoutError:
            self._deadlines.passed()
            self._break(child, f"has not answered for {deadline_s:.2f} s")
        except (OSError, ValueError, EOFError) as error:
            self._break(child, f"its client has died ({error!r})")
        if answer.problem:
            self._break(child, answer.problem)
        self._answered_s = time.monotonic()
        return answer.values or [0] * len(call.names)

    def _break(self, child: _Child, problem: str) -> NoReturn:
        """Kill the child: its late writes must not reach the next call. Another one is started after its end."""
        if self._ready is child:  # else it is gone already
            self._set(None, problem)
            self.killed += 1
            self._broken.set()
        raise SilentError(problem) from None

    def _set(self, ready: _Child | None, problem: str) -> None:
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


def _decoded(data: bytes) -> Answer:
    if not data:
        raise EOFError("it ended")
    return _answers.decode(data)
