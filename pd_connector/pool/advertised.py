# SPDX-License-Identifier: Apache-2.0
"""What an engine advertises to the other processes of its host: its model, and how fast it loads chunks. Its API server, which
has neither weights nor pages, reads it."""

import re
from collections.abc import Iterable, Iterator

import msgspec

ENGINE_VARIABLE = "_PD_CONNECTOR_POOL_ENGINE"
"""The variable by which the processes of an SGLang engine agree on its id in the pool. The engine's launcher sets it."""


class AdvertisedEngine(msgspec.Struct, frozen=True, kw_only=True):
    """One engine, as its scheduler advertises it."""

    engine: str
    """Its `engine_id`, which ends with `_dp` and a number for each data-parallel rank."""
    model: str
    """`keys.model_root` in hexadecimal digits; empty: its weights are not known (any more)."""
    chunk_bytes: int = 0
    """Bytes of a chunk of this model; 0: none was loaded yet."""
    bytes_per_s: dict[str, float] = {}
    """The speed of loads, by tier."""

    def encode(self) -> bytes:
        """In the form that `find_engine` reads."""
        return msgspec.json.encode(self)


def advertised_engines(published: Iterable[bytes]) -> Iterator[AdvertisedEngine]:
    """The engines among the advertisements of this host's processes (`Store.advertised`)."""
    for about in published:
        try:
            yield msgspec.json.decode(about, type=AdvertisedEngine)
        except (msgspec.MsgspecError, UnicodeDecodeError):
            continue  # being written, or of another version


def find_engine(published: Iterable[bytes], engine: str) -> AdvertisedEngine | None:
    """The advertised engine with this id, or one of its data-parallel ranks (from `Store.advertised`). None: it has not
    advertised its model yet."""
    own = re.compile(re.escape(engine) + r"(_dp\d+)?")
    matching = (
        each for each in advertised_engines(published) if each.model and own.fullmatch(each.engine)
    )
    return next(matching, None)
