# SPDX-License-Identifier: Apache-2.0
"""Puts new chunks of this host into the far store, a parent before its child."""

import contextlib
import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence

from pd_connector.errors import PoolError
from pd_connector.pool.carrier.child import MOST_NAMES
from pd_connector.pool.carrier.client import FarClient, SilentError
from pd_connector.pool.carrier.counts import Counts
from pd_connector.pool.carrier.far_journal import read_mark
from pd_connector.pool.carrier.known_objects import MOST_KNOWN, KnownObjects, Stored
from pd_connector.pool.carrier.lasting import LastingThread
from pd_connector.pool.carrier.markers import Markers
from pd_connector.pool.carrier.object import Packed
from pd_connector.pool.carrier.unfit import GONE, TOO_LARGE, UnfitChunks
from pd_connector.pool.far.seal import Seal
from pd_connector.pool.store.base import Chunk, Store

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


class Putting:
    """Follows the pool's journal in a thread of its own. Only that thread uses what is here, except `waiting`, `errors`
    and `join`.

    Args:
        store: this host's store.
        client: used by this thread only.
        opened: how often the carrier's far clients were opened.
        shown: the far store's address, for people.
        ends: set when the carrier ends.
    """

    def __init__(
        self,
        store: Store,
        seal: Seal,
        objects: KnownObjects,
        counts: Counts,
        client: FarClient,
        opened: Callable[[], int],
        shown: str,
        ends: threading.Event,
    ) -> None:
        self._store, self._seal, self._objects, self._counts = store, seal, objects, counts
        self._client, self._clients_opened, self._shown, self._ends = client, opened, shown, ends
        self._reads_mark_s = self._begins_s = 0.0
        self._has_lost = False
        self._refused: OrderedDict[bytes, None] = OrderedDict()  # and too large, or damaged
        self._waiting: OrderedDict[bytes, int] = OrderedDict()  # how often each was refused
        # when to offer a chunk again, and how often it was refused
        self._offered_again: dict[bytes, tuple[float, int]] = {}
        self._unmade: dict[bytes, float] = {}  # given up at this time
        self._unfit = UnfitChunks(MOST_KNOWN)
        # the journal's page that comes next, and far clients opened so far
        self._after = self._opened = 0
        self._markers = Markers(seal, store.id, client)
        self._thread = LastingThread("pd-carrier-put", self._follow, ends, self._turn)

    @property
    def waiting(self) -> int:
        """Chunks that wait to be put."""
        return len(self._waiting)

    @property
    def errors(self) -> int:
        """Errors of the thread. It continues after each."""
        return self._thread.errors

    def join(self) -> None:
        """Wait for the thread's end."""
        self._thread.join()

    def _follow(self) -> None:
        """One turn: read new events of the journal, and put waiting chunks."""
        if self._ends.wait(_FOLLOWS_S):
            return
        now_s = time.monotonic()
        if (count := self._clients_opened()) > self._opened:
            self._opened = count
            self._begin_again()
        self._look_for_losses(now_s)
        if self._client.is_ready:  # else too many would wait; all is read again when it opens
            with contextlib.suppress(PoolError):
                self._read_journal()
        self._look_again(time.monotonic())
        self._offer_again(time.monotonic())
        while self._waiting and not self._ends.is_set() and self._client.is_ready:
            chunks = self._next()
            try:
                self._put(chunks)
            except SilentError:
                break
            except Exception:
                logger.exception("carrier: %d chunks were not put", len(chunks))
                self._counts.add("failed", len(chunks))
                self._tried(chunks)

    def _look_for_losses(self, now_s: float) -> None:
        """If the far store has lost objects, or was replaced by another store, put the missing objects again."""
        with contextlib.suppress(SilentError):
            if self._client.is_ready and self._markers.are_lost(now_s):
                self._has_lost = True
        with contextlib.suppress(SilentError):
            if self._client.is_ready and now_s >= self._reads_mark_s:
                self._reads_mark_s = now_s + _MARKS_S
                mark = read_mark(self._client, self._seal)
                if mark and self._objects.journal.is_of(mark):
                    self._has_lost = True
        if self._has_lost and now_s >= self._begins_s:
            self._has_lost, self._begins_s = False, now_s + _PAUSE_S
            logger.warning("carrier: the far store has lost objects; what it lacks is put again")
            self._counts.add("begun_again")
            self._begin_again()

    def _begin_again(self) -> None:
        """Read the whole journal again, because the far store may have restarted and lost its objects."""
        self._objects.clear()
        self._refused.clear()
        self._after = 0

    def _read_journal(self) -> None:
        """One page. Raises PoolError."""
        page = self._store.journal(self._after)
        self._after = page.next
        for event in page.events:
            self._refused.pop(event.key, None)
            if not event.tier:
                self._waiting.pop(event.key, None)
                if self._offered_again.pop(event.key, None):
                    self._counts.add("not_put")
                self._unmade.pop(event.key, None)
                self._unfit.forget(event.key)
            elif event.key not in self._objects:
                self._waiting.setdefault(event.key, 0)
        while len(self._waiting) > _MOST_WAITING:
            self._waiting.popitem()
            self._counts.add("left_out")

    def _look_again(self, now_s: float) -> None:
        """Put chunks whose entry is made by now."""
        for key, until_s in list(self._unmade.items()):
            is_made, is_late = False, now_s >= until_s
            try:
                is_made = next(self._store.chunks([key]), None) is not None
            except Exception:  # of this chunk; others are put
                if is_late:
                    logger.exception("carrier: chunk %s was not put", key.hex()[:16])
                    self._counts.add("failed")
            if is_made or is_late:
                del self._unmade[key]
            if is_made:
                self._waiting.setdefault(key, 0)

    def _offer_again(self, now_s: float) -> None:
        due = [key for key, (at_s, _) in self._offered_again.items() if now_s >= at_s]
        for key in due:
            self._refused.pop(key, None)
            _, refused = self._offered_again.pop(key)
            if key not in self._objects:
                self._waiting[key] = refused

    def _not_taken(self, key: bytes) -> None:
        """The far store has not taken a chunk: it is offered again, or given up and counted."""
        before = self._waiting.get(key, 0)
        if before < len(_OFFERED_AGAIN_S) and len(self._offered_again) < _MOST_OFFERED_AGAIN:
            at_s = time.monotonic() + _OFFERED_AGAIN_S[before]
            self._offered_again[key] = (at_s, before + 1)
        else:
            self._counts.add("not_put")

    def _turn(self) -> None:
        """After an error: another chunk is tried first."""
        if self._waiting:
            self._waiting.move_to_end(next(iter(self._waiting)))

    def _next(self) -> list[Chunk]:
        """The chunks to be put next, each after its parent."""
        chunks: dict[bytes, Chunk] = {}
        nbytes = 0
        while nbytes < _PUT_BYTES and len(chunks) < MOST_NAMES // 2:
            first = next((key for key in self._waiting if key not in chunks), None)
            if first is None:
                break
            chain = self._with_parents(first)
            if not chain:
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
            if not key or key in self._objects or key in self._refused or key in seen:
                break
            seen.add(key)
        return chain[::-1]

    def _put(self, chunks: Sequence[Chunk]) -> None:
        """Put those of these chunks that the far store lacks. Raises SilentError if it does not answer; the chunks keep
        waiting then."""
        too_large = [chunk for chunk in chunks if self._unfit.is_too_large(chunk)]
        self._tried(too_large)
        chunks = [chunk for chunk in chunks if not self._unfit.is_too_large(chunk)]
        there = self._objects.look(self._client, [chunk.key for chunk in chunks])
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
            self._counts.add("there", sum(each is not None for each in there[start:stop]))
            self._tried(chunks[start:stop])
            start = stop

    def _tried(self, chunks: Sequence[Chunk]) -> None:
        """Take these chunks off the waiting list. Those that the far store did not take are noted, so that their
        children do not have them tried again."""
        for chunk in chunks:
            self._waiting.pop(chunk.key, None)
            if chunk.key not in self._objects:
                self._refused[chunk.key] = None
        while len(self._refused) > MOST_KNOWN:
            self._refused.popitem(last=False)

    def _packed(self, chunk: Chunk) -> Packed | None:
        try:
            packed = Packed(self._store, chunk)
        except PoolError:
            self._count_unfit(chunk, GONE)
            return None
        if (nbytes := self._seal.sealed_bytes(packed.nbytes)) > self._objects.most_bytes:
            packed.close()
            if not self._counts[TOO_LARGE]:
                logger.warning(
                    "carrier: a chunk has %d bytes, and %s takes %d: such chunks stay on this host; keep them in half the bytes "
                    "(config key pool.codec: int8), or use a store that takes larger objects (--far)",
                    nbytes,
                    self._shown,
                    self._objects.most_bytes,
                )
            self._count_unfit(chunk, TOO_LARGE)
            return None
        return packed

    def _count_unfit(self, chunk: Chunk, cause: str) -> None:
        if self._unfit.note(chunk, cause):
            self._counts.add(cause)

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

        taken = self._client.put(names, sizes, fill)
        for place, (chunk, _) in enumerate(batch):
            kept = taken[place] and place not in broken
            self._unfit.forget(chunk.key)
            if kept:
                self._counts.add("put")
                self._counts.add("put_bytes", sizes[place])
            elif place in broken:
                self._counts.add("put_damaged")
            else:
                self._not_taken(chunk.key)
            self._objects.learn(chunk.key, Stored(names[place], sizes[place]) if kept else None)
        if broken:  # else it would be found
            self._client.remove([names[place] for place in sorted(broken)])
