# SPDX-License-Identifier: Apache-2.0
"""An engine's codecs in the pool: the codec of its own chunks, and the codecs in which KV that it uses may have
passed."""

from collections.abc import Mapping
from typing import Literal, NamedTuple, get_args

from pd_connector.config import Config
from pd_connector.kv.coding import ELEMENT_BYTES, RAW, coarsest, permitted

AtRest = Literal["raw", "int8"]
AT_REST: tuple[AtRest, ...] = get_args(AtRest)
"""Codecs in which KV may have passed that is kept for others. The error of FP8 is too large."""
CODED_DTYPES = tuple(dtype for dtype, nbytes in ELEMENT_BYTES.items() if nbytes > 1)
"""Caches whose chunks a codec makes smaller. Pages of others are kept as they are, those of FP8 with their scales."""


class PoolCodecs(NamedTuple):
    """What one engine does with codecs in the pool.

    Attributes:
        at_rest: the codec of the chunks that it saves.
        readable: the engine uses KV that has passed in one of these codecs.
        passed: the coarsest codec in which the KV that it saves may have passed.
    """

    at_rest: AtRest
    readable: tuple[str, ...]
    passed: str


def pool_codecs(config: Config, *, consumes: bool) -> PoolCodecs:
    """The codecs of an engine with this configuration.

    An engine's KV can come from a handoff or from the pool, and KV that it computes afterwards depends on that KV. So
    `passed` covers these codecs, too.

    Args:
        consumes: whether it takes KV from other engines.

    >>> pool_codecs(Config(pool={"codec": "int8"}), consumes=False)
    PoolCodecs(at_rest='int8', readable=('int8', 'raw'), passed='int8')
    >>> pool_codecs(Config(pool=True, codec="int8"), consumes=False)
    PoolCodecs(at_rest='raw', readable=('int8', 'raw'), passed='int8')
    >>> pool_codecs(Config(pool={"read": False}, codec="int8"), consumes=False).passed
    'raw'
    """
    given = config.pool if isinstance(config.pool, Mapping) else {}
    at_rest = given.get("codec", RAW.name)
    wire = permitted(config.codec, config.codec_max_error)
    readable = tuple(dict.fromkeys((at_rest, *wire) if at_rest != RAW.name else wire))
    loaded = readable if given.get("read", True) else ()
    comes = {at_rest, *(wire if consumes else ()), *(name for name in loaded if name in AT_REST)}
    return PoolCodecs(at_rest, readable, coarsest(comes))
