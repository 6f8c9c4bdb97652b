# SPDX-License-Identifier: Apache-2.0
"""The chunks that a carrier has put into the far store or seen there, in pages like those of a host's journal, for
routers.

All carriers of a far store name it by one id, the mark: an object that the first carrier puts. If the store restarts
and loses its objects, it loses the mark, too. A carrier then puts a new mark, and each journal begins again, empty.
"""

import secrets
import threading
from collections import OrderedDict
from collections.abc import Iterable

from pd_connector.errors import PoolError
from pd_connector.pool.carrier.client import FarClient
from pd_connector.pool.carrier.messages import MOST_PAGE, FarPage
from pd_connector.pool.far.seal import Seal

MOST_KEYS = 1 << 18
"""Chunks of which a journal tells. If there are more, those that were noted longest ago are forgotten."""
MOST_GONE = 1 << 14
"""Missing chunks of which a journal tells. Each look-up adds some, also of chunks that nobody has ever put, and they must not
push out those that are there."""
MARK_BYTES = 16
_MARK = b"pd-connector: the mark of a far store"
_FIRST = 1 << 40
"""Above the numbers of pages. A journal begins at a random multiple, so that a number of another journal is noticed."""


class FarJournal:
    """Any thread may use it. Only the latest event of a chunk is kept."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.far = ""
        """The far store's id, in 32 hexadecimal digits; empty while it is not known."""
        self._there: OrderedDict[bytes, None] = OrderedDict()
        self._gone: OrderedDict[bytes, None] = OrderedDict()
        self._log: list[
            bytes
        ] = []  # the key of each event; those of an older event of a key are passed over
        self._places: dict[bytes, int] = {}  # of each key's latest event, in the log
        self._begin()

    def note(self, keys: Iterable[bytes], there: bool) -> None:
        """These chunks are in the far store, or are not."""
        with self._lock:
            to, other, most = (
                (self._there, self._gone, MOST_KEYS)
                if there
                else (self._gone, self._there, MOST_GONE)
            )
            for key in keys:
                if key in to:
                    continue
                other.pop(key, None)
                to[key] = None
                self._places[key] = len(self._log)
                self._log.append(key)
            while len(to) > most:
                self._places.pop(to.popitem(last=False)[0])
            if len(self._log) > 2 * MOST_KEYS:
                self._renumber()

    def is_of(self, far: str) -> bool:
        """Note the far store's id. Returns whether the id has changed: the store's earlier objects are gone then."""
        with self._lock:
            before, self.far = self.far, far
            if before and before != far:
                self._there.clear()
                self._renumber()
            return bool(before) and before != far

    def page(self, after: int) -> FarPage:
        """What has changed since an earlier page.

        Args:
            after: `next` of the previous page. If that page was of another journal, the whole journal begins again.
        """
        with self._lock:
            whole = not self._first <= after <= self._first + len(self._log)
            place = 0 if whole else after - self._first
            events: list[tuple[bytes, bool]] = []
            while place < len(self._log) and len(events) < MOST_PAGE:
                key = self._log[place]
                if self._places.get(key) == place:
                    events.append((key, key in self._there))
                place += 1
            more = place < len(self._log)
            return FarPage(self.far, events, self._first + place, whole=whole, more=more)

    def _begin(self) -> None:
        self._first = (1 + secrets.randbelow(1 << 22)) * _FIRST

    def _renumber(self) -> None:
        """Give the present chunks new numbers, by which readers notice that the journal has begun again."""
        self._begin()
        self._gone.clear()
        self._log = list(self._there)
        self._places = {key: place for place, key in enumerate(self._log)}


def read_mark(client: FarClient, seal: Seal) -> str:
    """The id of a far store; puts a new id if there is none.

    Returns:
        An id that was read from the store: a `put` may not overwrite. Empty while the store does not take a mark, or
        lists a mark but does not return it.

    Raises:
        SilentError: the far store does not answer.
    """
    names, size = seal.names(_MARK), seal.sealed_bytes(MARK_BYTES)
    sizes = client.has(names)
    # While the key is changed, hosts that have the old one only know its mark: it counts as long as it is there.
    for name in [name for name, there in zip(names, sizes, strict=True) if there == size][::-1]:
        if mark := _opened_mark(client, seal, name, size):
            return mark.hex()
        if mark is None:
            return ""
    if sizes[0]:  # it is damaged
        client.remove(names[:1])
    new = secrets.token_bytes(MARK_BYTES)

    def read(buffer: memoryview, offset: int) -> None:
        buffer[:] = new[offset : offset + len(buffer)]

    def fill(_place: int, room: memoryview) -> None:
        seal.seal(names[0], MARK_BYTES, read, room)

    client.put(names[:1], [size], fill)
    return (_opened_mark(client, seal, names[0], size) or b"").hex()


def _opened_mark(client: FarClient, seal: Seal, name: str, size: int) -> bytes | None:
    """A mark of the far store; None: it was not read; empty: it is damaged. Raises SilentError."""
    read: list[bytes] = []

    def take(_place: int, data: memoryview) -> None:
        if not data:
            return
        try:
            read.append(bytes(seal.open(name, data)))
        except PoolError:
            read.append(b"")

    client.get([name], [size], take)
    return read[0] if read else None
