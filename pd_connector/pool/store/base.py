# SPDX-License-Identifier: Apache-2.0
"""The interface between the pool and the stores that keep its chunks.

A chunk is a set of parts, one from each rank of its writer, under one key. A store takes parts as opaque bytes: it knows their
names and lengths, and neither header nor record. A chunk exists when all its parts are published; before that it cannot be found.

Looking up  `find`, `pin`, `unpin`, `was_stored`
Saving      `begin` -> `Writing`: `write`, then `publish` or `cancel`
Loading     `brings_at_once`, `bring`, then `read` -> `Reading`: `take`, `into`, `close`
Keeping     `remove`, `journal`, `status`, `take_failures`, `close`
Knowing     `keys`, `chunks`, `id`, `advertise`, `advertised`

Every method may be called from any thread. Methods of `Store` block for milliseconds at most, `status` for a second;
methods of `Writing` and `Reading` as long as file I/O takes. No lock is held across file I/O. If a process dies or is
stopped, at any instruction, other processes may fail to save for a while, but their look-ups and loads go on.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from enum import StrEnum
from typing import NamedTuple, Self

MEMORY, DISK, FAR = "memory", "disk", "far"
"""Names of tiers. `FAR` is a store of several hosts (`pool/far`)."""


class Found(NamedTuple):
    """A chunk that is there."""

    tier: str
    parts: tuple[str, ...]
    """Names of its parts, in the order of their names. Empty in tier `FAR`: they are known once it was brought."""
    nbytes: int
    """The bytes of all parts together."""
    wait_s: float = 0.0
    """How long other chunks are on their way from the far store before this one can come, in seconds."""


class Chunk(NamedTuple):
    """A chunk of a tier of this host, in a list of what is there."""

    key: bytes
    tier: str
    parent: bytes
    tenant: str
    parts: tuple[str, ...]
    nbytes: int


class Why(StrEnum):
    """Why a part is not taken. The value is a label of metrics."""

    EXISTS = "exists"  # the chunk is there already
    BEING_WRITTEN = (
        "being_written"  # another engine is writing the chunk, or this part is being written
    )
    FULL = "full"  # nothing can be evicted, or the file system has no room
    QUOTA = "quota"  # room could only come from tenants within their quota
    # The catalog is held by a stopped process, is being rebuilt, or is gone; or no file can be made.
    UNWELL = "unwell"


class Refusal(NamedTuple):
    """The answer of `begin` to a part that is not taken."""

    why: Why
    text: str
    """What was found, for a log."""


class Event(NamedTuple):
    """A change of the tier that has a chunk. Only the latest event of each key is kept."""

    number: int
    key: bytes
    tier: str
    """The fastest tier that has the chunk from now on; empty if none has it."""


class Journal(NamedTuple):
    """A page of the journal."""

    events: list[Event]
    next: int
    """What to pass to `journal` for what follows."""
    whole: bool
    """The page begins the whole journal: what the caller knew before no longer counts."""
    more: bool
    """More is there already."""


class TierStatus(NamedTuple):
    """What a tier holds. Bytes include what the file system needs beside the parts."""

    name: str
    path: str
    budget: int
    nbytes: int
    chunks: int
    tenants: dict[str, int]
    """Bytes by tenant."""


class Unwritable(NamedTuple):
    """A tier to which an engine could not write a chunk."""

    tier: str
    why: str
    """The folder, what is wrong, and what to do."""
    age_s: float
    """Seconds since an engine reported it."""


class StoreStatus(NamedTuple):
    """What a store holds."""

    tiers: list[TierStatus]
    writing: int
    """Parts that are being written, or wait for the other parts of their chunk."""
    pinned: int
    """Chunks with a pin."""
    engines: int
    """Processes that use the store, this one included."""
    problem: str
    """Why nothing is saved at the moment; empty if all is well."""
    unwritable: list[Unwritable]
    """Tiers to which nothing was written since."""


class Writing(ABC):
    """Room for one part, reserved in full. It ends by `publish` or `cancel`; leaving the `with` block cancels what is not
    published. If the process dies before, the room is freed by others."""

    nbytes: int

    @abstractmethod
    def write(self, offset: int, data: memoryview) -> None:
        """Put bytes at `offset` of the part. Bytes that are never put are zeros.

        Raises:
            PoolError: REFUSED, the file system takes no more. The writing is cancelled then.
            ValueError: beyond the reserved length.
        """

    @abstractmethod
    def publish(self) -> bool:
        """The part is whole. With the last part of its chunk, the chunk is found from now on, and survives the death of
        every process.

        Returns:
            False if the part was not kept: the catalog is held by a stopped process, or was rebuilt meanwhile.
        """

    @abstractmethod
    def cancel(self) -> None:
        """Free the room. Nothing if the writing has ended already."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.cancel()


class Reading(ABC):
    """One part, open. Its bytes stay readable until `close`, even if the chunk is evicted meanwhile."""

    nbytes: int
    tier: str

    @abstractmethod
    def into(self, buffer: memoryview, offset: int) -> None:
        """Fill `buffer` with the bytes of the part from `offset` on.

        Raises:
            PoolError: DAMAGED, the file ends before, or cannot be read; REFUSED, it cannot be read at the moment.
        """

    def take(self, offset: int, nbytes: int) -> bytes:
        """Bytes of the part: a header, then a record. Raises PoolError as `into` does."""
        data = bytearray(nbytes)
        self.into(memoryview(data), offset)
        return bytes(data)

    @abstractmethod
    def close(self) -> None:
        """End the reading."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


class Store(ABC):
    """Keeps chunks. Keys are at most 64 bytes, mostly 32."""

    @abstractmethod
    def find(self, keys: Sequence[bytes]) -> list[Found | None]:
        """Look up a chain's chunks; returns a hit or None for each key.

        The chunks found count as used now. Takes about 2 us a key, and never waits. Files are not opened: `pin` does.

        Args:
            keys: keys of one chain, the first chunk first. After the first missing chunk all results are None, even if
                later chunks are there.
        """

    @abstractmethod
    def pin(self, keys: Sequence[bytes], for_s: float, holder: str = "", tenants: int = 1) -> int:
        """Keep chunks from being evicted, for a load, or because a client asked for it.

        Args:
            for_s: seconds until the pins end by themselves, on the machine's monotonic clock.
            holder: name of the pins' holder. By default this store: its pins end with its process. Pins with a name
                outlive the process. Together they hold at most half of the memory, and each holder at most half of its
                part.
            tenants: number of tenants with equal parts of the memory. A part is the memory divided by this number.

        Returns:
            How many of the first keys are there with whole files: a load of these may begin. Chunks with a missing,
            short or foreign file are removed. If the catalog cannot be written, chunks count but are not pinned: a load must
            always cope with a chunk that goes.
        """

    @abstractmethod
    def unpin(self, keys: Sequence[bytes]) -> None:
        """End this store's pins."""

    @abstractmethod
    def was_stored(self, key: bytes) -> bool:
        """Whether a missing chunk was stored before, as far as the journal goes back. Never waits."""

    @abstractmethod
    def begin(
        self,
        key: bytes,
        *,
        parent: bytes,
        part: str,
        parts: int,
        nbytes: int,
        tenant: str = "",
        writer: str = "",
    ) -> Writing | Refusal:
        """Reserve room for a part. Evicts by LRU, the deepest chunk of a chain first.

        Args:
            parent: key of the chunk before it; empty for the first of a chain.
            part: name of the part, unique within its chunk: letters, digits, `.`, `_` and `-`, 32 at most.
            parts: number of the chunk's parts, from 1 to 256.
            nbytes: size of the part.
            tenant: the tenant whose quota the part counts for. A quota is the budget divided by the number of tenants.
                A tenant within its quota loses no chunk to another tenant.
            writer: the engine, the same name for all its ranks. Only parts of one writer make a chunk.

        Raises:
            ValueError: an argument is invalid.
        """

    @abstractmethod
    def bring(self, key: bytes) -> Found | None:
        """Bring a chunk to this host, so that `read` can open its parts. If it is in tier `FAR`, waits as long as chunks
        come from there, 10 s at most. Does not wait otherwise.

        Returns:
            The chunk's present place; None if no tier has it.

        Raises:
            PoolError: LATE, the far store does not answer; NOT_WORTH, the chunk has waited for 10 s behind others; REFUSED,
                this host has no room; DAMAGED, the far store's object was altered, and has been removed.
        """

    def prefetch(self, keys: Sequence[bytes]) -> None:
        """Have chunks of tier `FAR` brought to this host, one after another. Returns when all are on their way, within
        0.1 s; `bring` waits for each."""
        return

    def brings_at_once(self, key: bytes) -> bool:
        """Whether `bring` of this chunk does not wait, because it is on this host or cannot come from afar."""
        return True

    @property
    def far_moved_s(self) -> float:
        """When a chunk last came from the far store while `bring` waited for its own, on the steady clock. The far store
        is not silent then, however long a chunk waits for its turn."""
        return 0.0

    @abstractmethod
    def read(self, key: bytes, part: str) -> Reading:
        """Open a part of a chunk of this host.

        Raises:
            PoolError: EVICTED, the chunk or the part is not there; DAMAGED, its file is missing, short, or not of this user;
                REFUSED, this process cannot open files at the moment. A damaged chunk is removed.
        """

    @abstractmethod
    def remove(self, keys: Sequence[bytes]) -> int:
        """Remove chunks from all tiers, pinned or not; returns how many were there. Open readings go on."""

    @abstractmethod
    def journal(self, after: int) -> Journal:
        """What has changed since an earlier page, the same for every process of the host.

        Args:
            after: `next` of the previous page; 0 for the whole journal. If the journal no longer reaches back to that
                page, or was rebuilt, the whole journal begins again.

        Raises:
            PoolError: REFUSED, the catalog cannot be read at the moment.
        """

    @abstractmethod
    def keys(self) -> list[bytes]:
        """Keys of all chunks that are there. Takes as long as the file system needs to list them."""

    @abstractmethod
    def chunks(self, keys: Iterable[bytes] | None = None) -> Iterator[Chunk]:
        """Chunks of this host: all of them, tier by tier, in the order in which they were stored; or those of `keys`,
        in the order of `keys`. A chunk that is removed meanwhile is left out."""

    @property
    def reaches_far(self) -> bool:
        """Whether chunks of other hosts can come. If so, `find` can find chunks that `keys` does not list."""
        return False

    @property
    @abstractmethod
    def id(self) -> str:
        """The store's id, 32 hexadecimal digits: the same for all processes that share the store, and different for
        others."""

    @abstractmethod
    def advertise(self, about: bytes) -> None:
        """Publish a text about this process for other processes, for as long as it lives; 4 KiB at most."""

    @abstractmethod
    def advertised(self) -> list[bytes]:
        """What living processes advertise."""

    @abstractmethod
    def take_failures(self) -> Mapping[tuple[str, str], int]:
        """How often this process could not write to a tier since the last call, by tier and cause."""

    @abstractmethod
    def status(self) -> StoreStatus:
        """Used and free room, by tier and tenant. A broken catalog never makes it raise."""

    @abstractmethod
    def close(self) -> None:
        """End the threads of the store, and the pins without a name. Chunks stay."""
