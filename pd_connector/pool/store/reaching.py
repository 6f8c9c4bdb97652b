# SPDX-License-Identifier: Apache-2.0
"""The store of a host, and behind it the far store of several hosts that the host's carrier reaches.

Chunks are loaded from this host only. A chunk that only the far store has is found in tier `FAR`, and brought to this
host before it is read.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from pd_connector.pool.carrier.asking import CarrierLink
from pd_connector.pool.store.base import (
    FAR,
    Chunk,
    Found,
    Journal,
    Reading,
    Refusal,
    Store,
    StoreStatus,
    Writing,
)


class ReachingStore(Store):
    """Args:
    host: keeps this host's chunks.
    folder: folder of its memory tier, in which a carrier listens.
    """

    def __init__(self, host: Store, folder: Path) -> None:
        self.host = host
        self.carrier = CarrierLink(folder)

    def find(self, keys: Sequence[bytes]) -> list[Found | None]:
        hits = self.host.find(keys)
        here = next((place for place, each in enumerate(hits) if each is None), len(keys))
        far = self.carrier.find(keys[here:])
        for place, nbytes in enumerate(far.sizes, here):
            if place < len(hits):
                hits[place] = Found(FAR, (), nbytes, far.wait_s)
        return hits

    def bring(self, key: bytes) -> Found | None:
        (match,) = self.host.find([key])
        if match is None and self.carrier.is_there:
            self.carrier.bring(key)
            (match,) = self.host.find([key])
        return match

    def prefetch(self, keys: Sequence[bytes]) -> None:
        self.carrier.prefetch(keys)

    def brings_at_once(self, key: bytes) -> bool:
        return not self.carrier.is_there or self.host.find([key])[0] is not None

    def pin(self, keys: Sequence[bytes], for_s: float, holder: str = "", tenants: int = 1) -> int:
        return self.host.pin(keys, for_s, holder, tenants)

    def unpin(self, keys: Sequence[bytes]) -> None:
        self.host.unpin(keys)

    def was_stored(self, key: bytes) -> bool:
        return self.host.was_stored(key)

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
        return self.host.begin(
            key,
            parent=parent,
            part=part,
            parts=parts,
            nbytes=nbytes,
            tenant=tenant,
            writer=writer,
        )

    def read(self, key: bytes, part: str) -> Reading:
        return self.host.read(key, part)

    def remove(self, keys: Sequence[bytes]) -> int:
        return self.host.remove(keys)

    def journal(self, after: int) -> Journal:
        return self.host.journal(after)

    def keys(self) -> list[bytes]:
        return self.host.keys()

    def chunks(self, keys: Iterable[bytes] | None = None) -> Iterator[Chunk]:
        return self.host.chunks(keys)

    @property
    def far_moved_s(self) -> float:
        return self.carrier.moved_s

    @property
    def reaches_far(self) -> bool:
        return self.carrier.has_served

    @property
    def id(self) -> str:
        return self.host.id

    def advertise(self, about: bytes) -> None:
        self.host.advertise(about)

    def advertised(self) -> list[bytes]:
        return self.host.advertised()

    def take_failures(self) -> Mapping[tuple[str, str], int]:
        return self.host.take_failures()

    def status(self) -> StoreStatus:
        return self.host.status()

    def close(self) -> None:
        self.carrier.close()
        self.host.close()
