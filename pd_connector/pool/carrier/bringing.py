# SPDX-License-Identifier: Apache-2.0
"""Brings chunks of the far store into the pool of this host."""

import contextlib
import logging
import secrets
import threading
import time
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from concurrent.futures import Future
from typing import NamedTuple

from pd_connector.errors import Miss, PoolError
from pd_connector.pool.carrier.child import MOST_NAMES
from pd_connector.pool.carrier.client import FarClient, SilentError
from pd_connector.pool.carrier.counts import Counts
from pd_connector.pool.carrier.known_objects import KnownObjects, Stored
from pd_connector.pool.carrier.lasting import LastingThread
from pd_connector.pool.carrier.messages import Brought
from pd_connector.pool.carrier.object import Opened, unpacked
from pd_connector.pool.carrier.pace import Pace
from pd_connector.pool.far.seal import Seal
from pd_connector.pool.store.base import Refusal, Store, Why

logger = logging.getLogger("pd_connector.pool.carrier")

_MOST_BRINGING = 4096
"""Chunks on their way. More are refused."""


class _OnItsWay(NamedTuple):
    """A chunk that was requested.

    Attributes:
        nbytes: of its object; if that is not known, of the one before it in the same request.
    """

    future: Future[Brought]
    nbytes: int


class Bringing:
    """Brings in a thread of its own. Any thread may ask.

    Args:
        store: this host's store.
        client: may be used by others, too.
        ends: set when the carrier ends.
    """

    def __init__(
        self,
        store: Store,
        seal: Seal,
        objects: KnownObjects,
        counts: Counts,
        client: FarClient,
        ends: threading.Event,
    ) -> None:
        self._store, self._seal, self._objects, self._counts = store, seal, objects, counts
        self._client = client
        self._writer = f"carrier-{secrets.token_hex(8)}"
        self._lock = threading.Lock()  # of what follows
        self._on_their_way: OrderedDict[bytes, _OnItsWay] = OrderedDict()
        self._ended = 0
        self._pace = Pace()
        self._queued: list[bytes] = []
        self._moves = threading.Event()
        self._thread = LastingThread("pd-carrier-move", self._move, ends, self._moves.set)

    @property
    def under_way(self) -> int:
        """Chunks on their way."""
        return len(self._on_their_way)

    @property
    def ended(self) -> int:
        """Chunks that have come, or turned out not to come."""
        return self._ended

    def wait_s(self, keys: Iterable[bytes]) -> float:
        """How long the chunks on their way that come before the last one of these will take, in seconds."""
        own, nbytes = set(keys), 0
        with self._lock:
            missing = not own <= self._on_their_way.keys()  # they will come after all others
            for key, each in self._on_their_way.items():
                if not own and not missing:
                    break
                if key in own:
                    own.discard(key)
                else:
                    nbytes += each.nbytes
            return self._pace.seconds(nbytes)

    @property
    def errors(self) -> int:
        """Errors of the thread. It continues after each."""
        return self._thread.errors

    def bring(self, keys: Iterable[bytes]) -> list[Future[Brought]]:
        """Bring chunks into the host's memory. Those that are on their way already come once."""
        futures, nbytes = [], 0
        with self._lock:
            for key in keys:
                if stored := self._objects.get(key):
                    nbytes = stored.nbytes
                if key in self._on_their_way:
                    future = self._on_their_way[key].future
                else:
                    future = Future()
                    if len(self._on_their_way) >= _MOST_BRINGING:
                        future.set_result(Brought(Miss.REFUSED, "too many chunks are on their way"))
                        self._counts.add("not_brought_refused")
                    else:
                        self._on_their_way[key] = _OnItsWay(future, nbytes)
                        self._queued.append(key)
                futures.append(future)
        self._moves.set()
        return futures

    def wake(self) -> None:
        """The thread shall see that the carrier ends."""
        self._moves.set()

    def join(self) -> None:
        """Wait for the thread's end. Chunks on their way are late."""
        self._thread.join()
        with self._lock:
            left = list(self._on_their_way.values())
            self._on_their_way.clear()
        for each in left:
            each.future.set_result(Brought(Miss.LATE, "the carrier ends"))

    def _move(self) -> None:
        """One turn: wait until chunks are asked for, and bring them."""
        self._moves.wait()
        self._moves.clear()
        while keys := self._take_asked():
            try:
                self._bring(keys)
            except SilentError as error:
                for key in keys:
                    self._brought(key, Miss.LATE, f"the far store: {error}")
            except Exception as error:
                logger.exception("carrier: chunks were not brought")
                for key in keys:
                    self._brought(key, Miss.REFUSED, repr(error))

    def _take_asked(self) -> list[bytes]:
        with self._lock:
            most = MOST_NAMES // 2  # a chunk can have two names
            keys, self._queued = self._queued[:most], self._queued[most:]
        return keys

    def _brought(self, key: bytes, cause: str = "", detail: str = "") -> None:
        self._end(key, f"not_brought_{cause}" if cause else "brought", Brought(cause, detail))

    def _end(self, key: bytes, counted: str, brought: Brought) -> None:
        """A chunk has come, or will not come: its waiters hear it."""
        with self._lock:
            ended = self._on_their_way.pop(key, None)
            if ended is not None:
                self._ended += 1
        self._counts.add(counted, ended is not None)
        if ended is not None:
            ended.future.set_result(brought)

    def _bring(self, keys: Sequence[bytes]) -> None:
        """Raises SilentError."""
        here = {chunk.key for chunk in self._store.chunks(keys)}
        for key in here:
            self._end(key, "here", Brought())
        keys = [key for key in keys if key not in here]
        stored = {key: self._objects.get(key) for key in keys}
        unknown = [key for key in keys if stored[key] is None]
        stored |= (
            zip(unknown, self._objects.look(self._client, unknown), strict=True) if unknown else ()
        )
        hits = [(key, each) for key in keys if (each := stored[key])]
        for key in keys:
            if stored[key] is None:
                self._gone(key)
        damaged: list[Stored] = []
        before_s = time.monotonic()

        def take(place: int, data: memoryview) -> None:
            nonlocal before_s
            key, each = hits[place]
            if not data:
                self._gone(key)
                return
            try:
                opened = unpacked(key, self._seal.open(each.name, data))
                self._keep(opened)
            except PoolError as error:
                if error.cause is Miss.DAMAGED:
                    damaged.append(each)
                    self._objects.learn(key, None)
                    logger.warning(
                        "carrier: chunk %s: %s; it is removed there", key.hex()[:16], error
                    )
                self._brought(key, error.cause, str(error))
            else:
                self._counts.add("brought_bytes", len(data))
                self._brought(key)
            now_s = time.monotonic()
            with self._lock:
                self._pace.came(each.nbytes, now_s - before_s)
            before_s = now_s

        self._client.get([each.name for _, each in hits], [each.nbytes for _, each in hits], take)
        if damaged:
            self._client.remove([each.name for each in damaged])

    def _gone(self, key: bytes) -> None:
        self._objects.learn(key, None)
        self._brought(key, Miss.EVICTED, "the far store has it no longer")

    def _keep(self, opened: Opened) -> None:
        """Write a chunk into the pool of this host. Raises PoolError."""
        table = opened.table
        with contextlib.ExitStack() as undo:
            for (name, nbytes), data in zip(table.parts, opened.parts, strict=True):
                try:
                    writing = self._store.begin(
                        table.key,
                        parent=table.parent,
                        part=name,
                        parts=len(table.parts),
                        nbytes=nbytes,
                        tenant=table.tenant,
                        writer=self._writer,
                    )
                except ValueError as error:
                    raise PoolError(Miss.DAMAGED, f"no chunk: {error}") from None
                if isinstance(writing, Refusal):
                    if writing.why in (Why.EXISTS, Why.BEING_WRITTEN):
                        return  # an engine was faster
                    raise PoolError(Miss.REFUSED, f"this host's pool has no room: {writing.text}")
                undo.enter_context(writing)
                writing.write(0, data)
                if not writing.publish():
                    raise PoolError(Miss.REFUSED, "this host's pool was not written")
