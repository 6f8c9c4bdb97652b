# SPDX-License-Identifier: Apache-2.0
"""Moves chunks between the pool of this host and a far store.

| thread | what it does |
|---|---|
| `pd-carrier-put` | follows the pool's journal, and puts new chunks into the far store; a parent before its child |
| `pd-carrier-move` | brings requested chunks into the pool, each chunk once for all engines that wait |
| of `server.py` | answer engines |

Each has a far client of its own, so a look-up does not wait for a chunk on its way.
"""

import contextlib
import logging
import secrets
import threading
import time
from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence
from concurrent.futures import Future
from typing import NamedTuple

from pd_connector.errors import Miss, PoolError
from pd_connector.hosts import without_secret
from pd_connector.pool.carrier.child import MOST_NAMES
from pd_connector.pool.carrier.client import FarClient, SilentError
from pd_connector.pool.carrier.far_journal import FarJournal, read_mark
from pd_connector.pool.carrier.finding import gallop
from pd_connector.pool.carrier.lasting import LastingThread
from pd_connector.pool.carrier.markers import Markers
from pd_connector.pool.carrier.messages import Brought, Checked, Sizes, Status
from pd_connector.pool.carrier.object import Opened, Packed, unpacked
from pd_connector.pool.carrier.unfit import GONE, TOO_LARGE, UnfitChunks
from pd_connector.pool.far.seal import Seal
from pd_connector.pool.store.base import Chunk, Refusal, Store, Why
from pd_connector.pool.verify import InMemory, sound

logger = logging.getLogger("pd_connector.pool.carrier")

_FOLLOWS_S = 0.2
"""How often the journal is read, in seconds."""
_OFFERED_AGAIN_S = (1.0, 35.0)
"""How long after the far store has not taken a chunk it is offered again, in seconds. Mooncake refuses while it evicts, and
keeps nothing for 30 s if a client of any host has died in mid-put of the same object."""
_MOST_OFFERED_AGAIN = 1024
"""Chunks that will be offered again. Others are given up."""
_MARKS_S = 2.0
"""How often the far store's mark is read, in seconds: a new one means that it has lost what it had."""
_PAUSE_S = 60.0
"""Least time between two losses after which all is put again, in seconds: each costs a look-up of the whole pool."""
_PUT_BYTES = 32 << 20
"""Bytes that one call puts, unless a single object has more."""
_MOST_WAITING = 1 << 14
"""Chunks that wait to be put. If there are more, ends of chains are left out."""
_MADE_WITHIN_S = 30.0
"""How long a chunk of the journal is looked for: its writer makes its entry after it has written it down."""
_MOST_KNOWN = 1 << 18
"""Chunks of which the carrier knows that the far store has them, and chunks that it did not take."""
_MOST_BRINGING = 4096
"""Chunks on their way. More are refused."""


class Stored(NamedTuple):
    """An object that was found."""

    name: str
    nbytes: int


class Carrier:
    """Any thread may call it.

    Attributes:
        journal: the chunks that it has put or seen in the far store, for routers.

    Args:
        store: this host's store.
        address: the far store's address, checked by `far_address`.
        most_bytes: largest size of an object of the far store.
        deadline_s: the longest wait for one answer of the far store.
        python: the Python whose environment has the far store's client; empty: this one.
    """

    def __init__(
        self,
        store: Store,
        seal: Seal,
        address: str,
        most_bytes: int,
        deadline_s: float,
        python: str = "",
    ) -> None:
        self._store, self._seal, self._most_bytes = store, seal, most_bytes
        self._shown = without_secret(address)
        self.journal = FarJournal()
        self._reads_mark_s = self._begins_s = 0.0
        self._has_lost = False
        self._writer = f"carrier-{secrets.token_hex(8)}"
        self._clients = self._finds, self._gets, self._puts = tuple(
            FarClient(name, address, deadline_s, python) for name in ("find", "get", "put")
        )
        self._lock = threading.Lock()  # of what follows
        self._counts: Counter[str] = Counter()
        self._there: OrderedDict[bytes, Stored] = OrderedDict()
        self._refused: OrderedDict[bytes, None] = OrderedDict()  # and too large, or damaged
        self._waiting: OrderedDict[bytes, int] = OrderedDict()  # how often each was refused
        # used by the putting thread only, like the next two: when to offer a chunk again, and how often it was refused
        self._offered_again: dict[bytes, tuple[float, int]] = {}
        self._unmade: dict[bytes, float] = {}  # given up at this time
        self._unfit = UnfitChunks(_MOST_KNOWN)
        self._bringing: OrderedDict[bytes, Future[Brought]] = OrderedDict()
        self._queued: list[bytes] = []
        self._after = self._opened = (
            0  # the journal's page that comes next, and far clients opened so far
        )
        self._markers = Markers(seal, store.id, self._puts)
        self._ends, self._moves = threading.Event(), threading.Event()
        self._threads = [
            LastingThread("pd-carrier-put", self._follow, self._ends, self._turn),
            LastingThread("pd-carrier-move", self._move, self._ends, self._moves.set),
        ]

    # For engines

    def find(self, keys: Sequence[bytes]) -> Sizes:
        """Which of the first chunks of a chain are there."""

        def sizes_of(places: Sequence[int]) -> list[int]:
            stored = self._look(self._finds, [keys[place] for place in places])
            return [each.nbytes if each else 0 for each in stored]

        try:
            sizes = gallop(len(keys), sizes_of)
            with self._lock:  # not all of these were asked for: an engine saves them, and they are looked for then
                for key in keys[len(sizes) :]:
                    self._there.pop(key, None)
            self.journal.note(keys[: len(sizes)], there=True)
            self._count("finds_found" if sizes else "finds_none")
            self._count("found", len(sizes))
            return Sizes(sizes)
        except SilentError:
            self._count("silent_finds")
            return Sizes([], silent=True)

    def bring(self, keys: Iterable[bytes]) -> "list[Future[Brought]]":
        """Bring chunks into the host's memory. Those that are on their way already come once."""
        futures = []
        with self._lock:
            for key in keys:
                future = self._bringing.get(key)
                if future is None:
                    future = Future()
                    if len(self._bringing) >= _MOST_BRINGING:
                        future.set_result(Brought(Miss.REFUSED, "too many chunks are on their way"))
                        self._counts["not_brought_refused"] += 1
                    else:
                        self._bringing[key] = future
                        self._queued.append(key)
                futures.append(future)
        self._moves.set()
        return futures

    def check(self, key: bytes, *, removes: bool) -> Checked:
        """Read a chunk of the far store and check it as engines do, without keeping it here.

        Args:
            removes: remove it there if it is damaged.
        """
        problems: list[str] = []
        read = False

        def take(_place: int, data: memoryview) -> None:
            nonlocal read
            if not data:
                return
            read = True
            try:
                opened = unpacked(key, self._seal.open(stored.name, data))
                for (name, _), part in zip(opened.table.parts, opened.parts, strict=True):
                    if problem := sound(key, name, InMemory(part)):
                        problems.append(f"{name}: {problem}")
            except PoolError as error:
                problems.append(str(error))

        try:
            (stored_there,) = self._look(self._gets, [key])
            if stored_there is None:
                return Checked(0)
            stored = stored_there
            self._gets.get([stored.name], [stored.nbytes], take)
            if not read:
                if self._look(self._gets, [key]) == [None]:  # removed meanwhile
                    return Checked(0)
                problems.append("listed, but cannot be read")
            if problems and removes:
                self._gets.remove([stored.name])
                self._know(key, None)
        except SilentError as error:
            return Checked(0, silent=f"the far store: {error}")
        return Checked(stored.nbytes, "; ".join(problems))

    def status(self) -> Status:
        """What was done so far."""
        clients = self._clients
        with self._lock:
            counts = dict(self._counts)
            waiting, bringing = len(self._waiting), len(self._bringing)
        counts["client_restarts"] = sum(client.killed for client in clients)
        counts["errors"] = sum(each.errors for each in self._threads) + sum(
            client.errors for client in clients
        )
        silent = [client for client in clients if not client.is_ready]
        return Status(
            far=self._shown,
            sealed=self._seal.is_on,
            mark=self.journal.far,
            most_bytes=self._most_bytes,
            problem=silent[0].problem or "is being opened" if silent else "",
            since_s=min(client.since_s for client in silent)
            if silent
            else max(client.since_s for client in clients),
            waiting=waiting,
            bringing=bringing,
            counts=counts,
        )

    def children(self) -> list[int]:
        """Process ids of the far clients that are ready."""
        return [client.pid for client in self._clients if client.pid]

    def close(self) -> None:
        """End the threads and the far clients. Chunks stay."""
        self._ends.set()
        self._moves.set()
        for client in self._clients:
            client.close()
        for thread in self._threads:
            thread.join()
        with self._lock:
            left = list(self._bringing.values())
            self._bringing.clear()
        for future in left:
            future.set_result(Brought(Miss.LATE, "the carrier ends"))

    def _count(self, what: str, number: int = 1) -> None:
        with self._lock:
            self._counts[what] += number

    def _know(self, key: bytes, stored: Stored | None) -> None:
        with self._lock:
            self._there.pop(key, None)
            if stored is not None:
                self._there[key] = stored
                while len(self._there) > _MOST_KNOWN:
                    self._there.popitem(last=False)
        self.journal.note([key], stored is not None)

    def _look(self, client: FarClient, keys: Sequence[bytes]) -> list[Stored | None]:
        """Where each chunk is. Raises SilentError."""
        names = [(place, name) for place, key in enumerate(keys) for name in self._seal.names(key)]
        stored: list[Stored | None] = [None] * len(keys)
        with self._lock:
            before = [self._there.get(key) for key in keys]
        for start in range(0, len(names), MOST_NAMES):
            batch = names[start : start + MOST_NAMES]
            sizes = client.has([name for _, name in batch])
            for (place, name), size in zip(batch, sizes, strict=True):
                if 0 < size <= self._most_bytes and stored[place] is None:
                    stored[place] = Stored(name, size)
        for key, each, earlier in zip(keys, stored, before, strict=True):
            if each is not None or self._there.get(key) is earlier:  # else it was put meanwhile
                self._know(key, each)
        return stored

    # Putting

    def _follow(self) -> None:
        """One turn: read new events of the journal, and put waiting chunks."""
        if self._ends.wait(_FOLLOWS_S):
            return
        now_s = time.monotonic()
        if (count := sum(client.opened for client in self._clients)) > self._opened:
            self._opened = count
            self._begin_again()
        self._look_for_losses(now_s)
        if self._puts.is_ready:  # else too many would wait; all is read again when it opens
            with contextlib.suppress(PoolError):
                self._read_journal()
        self._look_again(time.monotonic())
        self._offer_again(time.monotonic())
        while self._waiting and not self._ends.is_set() and self._puts.is_ready:
            chunks = self._next()
            try:
                self._put(chunks)
            except SilentError:
                break
            except Exception:
                logger.exception("carrier: %d chunks were not put", len(chunks))
                self._count("failed", len(chunks))
                self._tried(chunks)

    def _look_for_losses(self, now_s: float) -> None:
        """If the far store has lost objects, or was replaced by another store, put the missing objects again."""
        with contextlib.suppress(SilentError):
            if self._puts.is_ready and self._markers.are_lost(now_s):
                self._has_lost = True
        with contextlib.suppress(SilentError):
            if self._puts.is_ready and now_s >= self._reads_mark_s:
                self._reads_mark_s = now_s + _MARKS_S
                mark = read_mark(self._puts, self._seal)
                if mark and self.journal.is_of(mark):
                    self._has_lost = True
        if self._has_lost and now_s >= self._begins_s:
            self._has_lost, self._begins_s = False, now_s + _PAUSE_S
            logger.warning("carrier: the far store has lost objects; what it lacks is put again")
            self._count("begun_again")
            self._begin_again()

    def _begin_again(self) -> None:
        """Read the whole journal again, because the far store may have restarted and lost its objects."""
        with self._lock:
            self._there.clear()
            self._refused.clear()
        self._after = 0

    def _read_journal(self) -> None:
        """One page. Raises PoolError."""
        page = self._store.journal(self._after)
        self._after = page.next
        with self._lock:
            for event in page.events:
                self._refused.pop(event.key, None)
                if not event.tier:
                    self._waiting.pop(event.key, None)
                    if self._offered_again.pop(event.key, None):
                        self._counts["not_put"] += 1
                    self._unmade.pop(event.key, None)
                    self._unfit.forget(event.key)
                elif event.key not in self._there:
                    self._waiting.setdefault(event.key, 0)
            while len(self._waiting) > _MOST_WAITING:
                self._waiting.popitem()
                self._counts["left_out"] += 1

    def _look_again(self, now_s: float) -> None:
        """Put chunks whose entry is made by now."""
        for key, until_s in list(self._unmade.items()):
            is_made, is_late = False, now_s >= until_s
            try:
                is_made = next(self._store.chunks([key]), None) is not None
            except Exception:  # of this chunk; others are put
                if is_late:
                    logger.exception("carrier: chunk %s was not put", key.hex()[:16])
                    self._count("failed")
            if is_made or is_late:
                del self._unmade[key]
            if is_made:
                with self._lock:
                    self._waiting.setdefault(key, 0)

    def _offer_again(self, now_s: float) -> None:
        due = [key for key, (at_s, _) in self._offered_again.items() if now_s >= at_s]
        with self._lock:
            for key in due:
                self._refused.pop(key, None)
                _, refused = self._offered_again.pop(key)
                if key not in self._there:
                    self._waiting[key] = refused

    def _not_taken(self, key: bytes) -> None:
        """The far store has not taken a chunk: it is offered again, or given up and counted."""
        with self._lock:
            before = self._waiting.get(key, 0)
        if before < len(_OFFERED_AGAIN_S) and len(self._offered_again) < _MOST_OFFERED_AGAIN:
            at_s = time.monotonic() + _OFFERED_AGAIN_S[before]
            self._offered_again[key] = (at_s, before + 1)
        else:
            self._count("not_put")

    def _turn(self) -> None:
        """After an error: another chunk is tried first."""
        with self._lock:
            if self._waiting:
                self._waiting.move_to_end(next(iter(self._waiting)))

    def _next(self) -> list[Chunk]:
        """The chunks to be put next, each after its parent."""
        chunks: dict[bytes, Chunk] = {}
        nbytes = 0
        while nbytes < _PUT_BYTES and len(chunks) < MOST_NAMES // 2:
            with self._lock:
                first = next((key for key in self._waiting if key not in chunks), None)
            if first is None:
                break
            chain = self._with_parents(first)
            if not chain:
                with self._lock:
                    self._waiting.pop(first, None)
                    if len(self._unmade) < _MOST_WAITING:
                        self._unmade.setdefault(first, time.monotonic() + _MADE_WITHIN_S)
            for chunk in chain:
                if chunk.key not in chunks:
                    chunks[chunk.key] = chunk
                    nbytes += chunk.nbytes
                if nbytes >= _PUT_BYTES:
                    break
        return list(chunks.values())

    def _with_parents(self, key: bytes) -> list[Chunk]:
        """A chunk, preceded by the chunks of its chain that this host has and the far store may lack."""
        chain: list[Chunk] = []
        seen = {key}
        while chunk := next(self._store.chunks([key]), None):
            chain.append(chunk)
            key = chunk.parent
            if not key or key in self._there or key in self._refused or key in seen:
                break
            seen.add(key)
        return chain[::-1]

    def _put(self, chunks: Sequence[Chunk]) -> None:
        """Put those of these chunks that the far store lacks. Raises SilentError if it does not answer; the chunks keep
        waiting then."""
        too_large = [chunk for chunk in chunks if self._unfit.is_too_large(chunk)]
        self._tried(too_large)
        chunks = [chunk for chunk in chunks if not self._unfit.is_too_large(chunk)]
        there = self._look(self._puts, [chunk.key for chunk in chunks])
        start = 0
        while start < len(chunks):
            stop, nbytes = start, 0
            with contextlib.ExitStack() as opened:
                batch: list[tuple[Chunk, Packed]] = []
                while stop < len(chunks) and (
                    (nbytes < _PUT_BYTES and len(batch) < MOST_NAMES) or not batch
                ):
                    if there[stop] is None and (packed := self._packed(chunks[stop])):
                        opened.callback(packed.close)
                        batch.append((chunks[stop], packed))
                        nbytes += packed.nbytes
                    stop += 1
                self._put_batch(batch)
            self._count("there", sum(each is not None for each in there[start:stop]))
            self._tried(chunks[start:stop])
            start = stop

    def _tried(self, chunks: Sequence[Chunk]) -> None:
        """Take these chunks off the waiting list. Those that the far store did not take are noted, so that their
        children do not have them tried again."""
        with self._lock:
            for chunk in chunks:
                self._waiting.pop(chunk.key, None)
                if chunk.key not in self._there:
                    self._refused[chunk.key] = None
            while len(self._refused) > _MOST_KNOWN:
                self._refused.popitem(last=False)

    def _packed(self, chunk: Chunk) -> Packed | None:
        try:
            packed = Packed(self._store, chunk)
        except PoolError:
            self._count_unfit(chunk, GONE)
            return None
        if (nbytes := self._seal.sealed_bytes(packed.nbytes)) > self._most_bytes:
            packed.close()
            if not self._counts[TOO_LARGE]:
                logger.warning(
                    "carrier: a chunk has %d bytes, and %s takes %d: such chunks stay on this host; keep them in half the bytes "
                    "(config key pool.codec: int8), or use a store that takes larger objects (--far)",
                    nbytes,
                    self._shown,
                    self._most_bytes,
                )
            self._count_unfit(chunk, TOO_LARGE)
            return None
        return packed

    def _count_unfit(self, chunk: Chunk, cause: str) -> None:
        if self._unfit.note(chunk, cause):
            self._count(cause)

    def _put_batch(self, batch: Sequence[tuple[Chunk, Packed]]) -> None:
        if not batch:
            return
        names = [self._seal.names(chunk.key)[0] for chunk, _ in batch]
        sizes = [self._seal.sealed_bytes(packed.nbytes) for _, packed in batch]
        broken = set()

        def fill(place: int, room: memoryview) -> None:
            try:
                packed = batch[place][1]
                self._seal.seal(names[place], packed.nbytes, packed.into, room)
            except PoolError:  # a part is damaged: what is put does not open anywhere
                broken.add(place)
                room[:] = bytes(len(room))

        taken = self._puts.put(names, sizes, fill)
        for place, (chunk, _) in enumerate(batch):
            kept = taken[place] and place not in broken
            self._unfit.forget(chunk.key)
            if kept:
                self._count("put")
                self._count("put_bytes", sizes[place])
            elif place in broken:
                self._count("put_damaged")
            else:
                self._not_taken(chunk.key)
            self._know(chunk.key, Stored(names[place], sizes[place]) if kept else None)
        if broken:  # else it would be found
            self._puts.remove([names[place] for place in sorted(broken)])

    # Bringing

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
            future = self._bringing.pop(key, None)
            self._counts[counted] += future is not None
        if future is not None:
            future.set_result(brought)

    def _bring(self, keys: Sequence[bytes]) -> None:
        """Raises SilentError."""
        here = {chunk.key for chunk in self._store.chunks(keys)}
        for key in here:
            self._end(key, "here", Brought())
        keys = [key for key in keys if key not in here]
        with self._lock:
            stored = {key: self._there.get(key) for key in keys}
        unknown = [key for key in keys if stored[key] is None]
        stored |= zip(unknown, self._look(self._gets, unknown), strict=True) if unknown else ()
        hits = [(key, each) for key in keys if (each := stored[key])]
        for key in keys:
            if stored[key] is None:
                self._gone(key)
        damaged: list[Stored] = []

        def take(place: int, data: memoryview) -> None:
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
                    self._know(key, None)
                    logger.warning(
                        "carrier: chunk %s: %s; it is removed there", key.hex()[:16], error
                    )
                self._brought(key, error.cause, str(error))
            else:
                self._count("brought_bytes", len(data))
                self._brought(key)

        self._gets.get([each.name for _, each in hits], [each.nbytes for _, each in hits], take)
        if damaged:
            self._gets.remove([each.name for each in damaged])

    def _gone(self, key: bytes) -> None:
        self._know(key, None)
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
