# SPDX-License-Identifier: Apache-2.0
"""Streams and events of a GPU that is not there. Work is queued, and runs as late as a wait allows, or in any
other order that streams and events permit, by seed."""

import random
import sys
import threading
from collections import deque
from collections.abc import Callable
from typing import Any

import torch

PACKAGES = ("pd_connector", "pd_kernels")
NAMES_OF_A_PLACE = 3


class Event:
    """A place in a stream's work, as `torch.cuda.Event`."""

    def __init__(self, *_: Any, **__: Any) -> None:
        self.stream: Stream | None = None
        self.place = 0

    def record(self, stream: "Stream | None" = None) -> None:
        self.stream = stream or STREAMS.current
        self.place = self.stream.queued

    @property
    def happened(self) -> bool:
        return self.stream is None or self.stream.done >= self.place

    def query(self) -> bool:
        return self.happened

    def wait(self, stream: "Stream | None" = None) -> None:
        (stream or STREAMS.current).wait_event(self)

    def synchronize(self) -> None:
        if STREAMS.waits_here() and self.stream is not None:
            STREAMS.finish(self.stream, self.place)


class Stream:
    """Work that runs in its order, as `torch.cuda.Stream`."""

    def __init__(self, device: Any = None, priority: int = 0, handle: int = 0, **_: Any) -> None:
        self.device, self.priority = device, priority
        self.cuda_stream = handle or STREAMS.new_handle()
        self.work: deque[Callable[[], None] | Event] = deque()
        self.queued = self.done = 0
        STREAMS.all.append(self)

    def wait_event(self, event: Event) -> None:
        if STREAMS.waits_here():
            STREAMS.queue(event, self)

    def wait_stream(self, stream: "Stream") -> None:
        self.wait_event(stream.record_event())

    def record_event(self, event: Event | None = None) -> Event:
        event = event or Event()
        event.record(self)
        return event

    def query(self) -> bool:
        return not self.work

    def synchronize(self) -> None:
        if STREAMS.waits_here():
            STREAMS.finish(self, self.queued)

    @property
    def blocked(self) -> bool:
        return not self.work or (isinstance(self.work[0], Event) and not self.work[0].happened)


class Streams:
    """All streams of the process.

    Attributes:
        used: whether launches and copies are queued. If not, a launch runs at once.
        sites: where the code has waited, or had a stream wait: names of functions, the innermost first.
        seed: 0: work runs when it is waited for, and not before; others: a stream by chance is ahead of the others,
            and work may run as soon as it is queued.
        ignored: a site whose waits do nothing: damage for a negative control.
        captured: while a graph is captured: its streams, and where their work goes. Nothing runs meanwhile.
    """

    def __init__(self) -> None:
        self.used = False
        self.all: list[Stream] = []
        self.sites: set[str] = set()
        self.seed = 0
        self.ignored: str | None = None
        self.captured: dict[Stream, list[Any]] = {}
        self._own = threading.local()
        self._lock = threading.RLock()
        self._chance = random.Random(0)
        self._handles = 1 << 8
        self._default: Stream | None = None

    def start(self) -> None:
        """Forget all streams; from now on work is queued."""
        self.used, self.all, self.sites, self._own = True, [], set(), threading.local()
        self.captured = {}
        self._chance = random.Random(self.seed)
        self._default = Stream()

    def stop(self) -> None:
        """Run what is left; launches run at once again."""
        try:
            self.finish_all()
        finally:
            self.used = False

    @property
    def default(self) -> Stream:
        assert self._default is not None, "no GPU is installed"
        return self._default

    @property
    def current(self) -> Stream:
        return getattr(self._own, "stream", None) or self.default

    @current.setter
    def current(self, stream: Stream) -> None:
        self._own.stream = stream

    def of(self, handle: int) -> Stream:
        """The stream whose `cudaStream_t` this is."""
        return next(stream for stream in self.all if stream.cuda_stream == handle)

    def new_handle(self) -> int:
        self._handles += 1
        return self._handles

    def queue(self, work: Callable[[], None] | Event, stream: Stream | None = None) -> None:
        """Put work, or a wait for an event, at the end of a stream's."""
        with self._lock:
            stream = stream or self.current
            if self.captured:
                self._capture(work, stream)
                return
            stream.work.append(work)
            stream.queued += 1
            while self.seed and self._chance.random() < 0.5 and self._run_any():
                pass

    def _capture(self, work: Callable[[], None] | Event, stream: Stream) -> None:
        """Work of a graph. Its streams are the first one, and those that wait for another of its streams."""
        if isinstance(work, Event):
            if work.stream not in self.captured:
                raise RuntimeError("a stream that is captured waits for one that is not")
            self.captured[stream] = self.captured[work.stream]
        elif stream not in self.captured:
            raise RuntimeError("work for a stream that is not captured, in a capture")
        else:
            self.captured[stream].append(work)

    def forbid_in_capture(self, what: str) -> None:
        if self.captured:
            raise RuntimeError(f"{what}: operation not permitted when stream is capturing")

    def finish(self, stream: Stream, place: int) -> None:
        """Run work until that of this stream is done up to a place."""
        self.forbid_in_capture("a wait of the host")
        with self._lock:
            while stream.done < place:
                if self.seed and self._chance.random() < 0.7:
                    self._run_any()
                else:
                    self._run_next(stream)

    def finish_all(self) -> None:
        """As `torch.cuda.synchronize`."""
        for stream in self.all:
            self.finish(stream, stream.queued)

    def waits_here(self) -> bool:
        """Note a wait; returns whether it counts."""
        site = _site()
        self.sites.add(site)
        return site != self.ignored

    def _run_any(self) -> bool:
        """Run the next work of a stream: mostly of the one that is ahead."""
        ready = [stream for stream in self.all if not stream.blocked]
        if not ready:
            return False
        ahead = ready[self.seed % len(ready)]
        self._run_next(self._chance.choice([ahead, ahead, *ready]))
        return True

    def _run_next(self, stream: Stream) -> None:
        work = stream.work[0]
        if isinstance(work, Event):
            if not work.happened:
                assert work.stream is not None
                self.finish(work.stream, work.place)
        else:
            with torch.inference_mode():  # an engine may have queued it in this mode
                work()
        stream.work.popleft()
        stream.done += 1


def _site() -> str:
    """The functions of the project that led to a wait."""
    frame, names = sys._getframe(2), []
    while frame is not None and len(names) < NAMES_OF_A_PLACE:
        module = frame.f_globals.get("__name__", "")
        if module.startswith(PACKAGES):
            names.append(f"{module.rpartition('.')[2]}.{frame.f_code.co_name}")
        frame = frame.f_back  # type: ignore[assignment]
    return " < ".join(names)


STREAMS = Streams()
