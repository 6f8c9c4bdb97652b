# SPDX-License-Identifier: Apache-2.0
"""Bytes on the wire for each byte of KV: chunks as engines save them, raw and in int8 at rest, put into a far store."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from functools import partial

import torch

from pd_bench.report import BenchError, Comparison
from pd_bench.sample import Sample
from pd_connector.kv.geometry import Geometry, Group, Shard
from pd_connector.kv.model import LayerFacts, ModelFacts
from pd_connector.pages.paged_cache import LayerPages, PagedCache
from pd_connector.pool.chunk_layout import places
from pd_connector.pool.codecs import AtRest
from pd_connector.pool.jobs import PromptChunk
from pd_connector.pool.keys import CHUNK_TOKENS, inputs_digest, link, root, salt_digest, token_bytes
from pd_connector.pool.record import Writer
from pd_connector.pool.saver import SAVED, Saver
from pd_connector.pool.store.base import Store
from pd_connector.pool.stored import describe

BARS: dict[AtRest, float] = {"raw": 1.02, "int8": 0.54}
CHUNKS = 8
_LAYERS, _HEADS, _DIM, _PAGE = 16, 8, 128, 16
KV_BYTES = CHUNKS * CHUNK_TOKENS * _LAYERS * _HEADS * 2 * _DIM * 2
"""Bytes of all chunks in bfloat16; each has 8 MiB."""
_FACTS = ModelFacts(
    config=b"c" * 16,
    weights=b"f" * 16,
    layers=(LayerFacts(tuple(range(_LAYERS)), "model/attention", "scale 1", b"r" * 16, "plain"),),
)


def _cache() -> PagedCache:
    group = Group(
        "attention", tuple(range(_LAYERS)), _HEADS, _DIM, _DIM, _PAGE, 0, "bfloat16", "NHD",
        heads_apart=False,
    )  # fmt: skip
    layers = {}
    for layer in range(_LAYERS):
        pages = torch.zeros((1, _PAGE, _HEADS, 2 * _DIM), dtype=torch.bfloat16)
        key, value = pages[..., :_DIM].transpose(1, 2), pages[..., _DIM:].transpose(1, 2)
        rows = pages.view(1, 1, -1).view(torch.uint8)
        layers[layer] = LayerPages(key, value, (rows,))
    return PagedCache(layers, Geometry(Shard(0, _LAYERS, 0, 1), (group,)))


def save(store: Store, codec: AtRest, parent: bytes) -> list[bytes]:
    """Save chunks of one prompt. Returns their keys. Raises BenchError."""
    cache = _cache()
    form = describe(cache, codec)
    saver = Saver(store, cache.geometry, Writer("bench", "bench", codec), 1)
    payload = os.urandom(sum(place.nbytes for place in places(form, cache.geometry)))
    keys = []
    for number in range(CHUNKS):
        tokens = token_bytes(range(number * CHUNK_TOKENS, (number + 1) * CHUNK_TOKENS))
        inputs = inputs_digest((), number)
        key = link(parent, tokens, inputs)
        chunk = PromptChunk(number, key, parent, tokens, inputs, "", salt_digest(""))
        part = saver.ask(chunk, "", _FACTS, form)
        if isinstance(part, str) or part.write(memoryview(payload)) != SAVED:
            raise BenchError(f"a chunk was not saved: {part}")
        keys.append(key)
        parent = key
    return keys


def measure(
    put: Callable[[Callable[[Store], Sequence[bytes]]], float], say: Callable[[str], None]
) -> list[Comparison]:
    """Bytes that a far store received, beside those of the KV.

    Args:
        put: has chunks saved on a host, waits until they are in the far store, and returns the bytes that it received.
    """
    compared = []
    for codec, bar in BARS.items():
        received = put(partial(save, codec=codec, parent=root(codec.encode().ljust(32))))
        say(f"{codec} at rest: {received:,.0f} bytes received for {KV_BYTES:,} of KV")
        params = {"at rest": codec, "dtype": "bfloat16"}
        mine, kv = Sample((received / 1e6,)), Sample((KV_BYTES / 1e6,))
        compared.append(Comparison("bytes on the wire", params, mine, kv, "MB", bar))
    return compared
