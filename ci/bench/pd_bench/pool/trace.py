# SPDX-License-Identifier: Apache-2.0
"""How much of a trace's prompts a pool finds that several processes fill, beside one exact LRU of the same size."""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import time
from collections import OrderedDict
from collections.abc import Sequence
from multiprocessing.queues import SimpleQueue
from multiprocessing.sharedctypes import Synchronized
from pathlib import Path
from typing import NamedTuple

import msgspec

from pd_bench.pool.folders import own_folder
from pd_bench.report import BenchError, Comparison, Say
from pd_bench.sample import Sample
from pd_bench.serve.trace import TO_GET_ONE
from pd_connector.pool.store.base import Refusal, Why
from pd_connector.pool.store.folder import charge_of
from pd_connector.pool.store.local import LocalStore
from pd_connector.pool.store.tier_storage import Space

SHARES = (0.1, 0.2, 0.3)
"""Room of the pool, as shares of all blocks of the trace."""
PROCESSES = 4
ALLOWED_POINTS = 0.5
"""How far the hit rate may lie below that of an exact LRU, in percent of all blocks."""
_PAYLOAD = bytes(64)
_TAKES_S = 5.0
"""How long a process tries again while another one holds the books."""

Prompt = Sequence[int]


class Tally(NamedTuple):
    """What one process found and saved."""

    hits: int
    saved: int
    refused: int


def read_prompts(path: Path) -> list[Prompt]:
    """The blocks of each request of a trace: JSON lines with `hash_ids`, as Mooncake's traces have.

    Raises:
        BenchError: the file is not such a trace.
    """
    try:
        rows = [json.loads(line) for line in path.read_text().splitlines() if line.strip()]
        return [msgspec.convert(row["hash_ids"], list[int]) for row in rows]
    except OSError as error:
        raise BenchError(f"{path}: cannot be read ({error.strerror}); {TO_GET_ONE}") from None
    except (ValueError, KeyError, TypeError) as error:
        raise BenchError(
            f"{path}: is not a trace with hash_ids ({error!r}); {TO_GET_ONE}"
        ) from None


def exact(prompts: Sequence[Prompt], room: int) -> float:
    """Percent of all blocks that one LRU of `room` blocks finds. The end of a prompt goes before its beginning."""
    held: OrderedDict[int, None] = OrderedDict()
    hits = 0
    for prompt in prompts:
        hits += next((n for n, block in enumerate(prompt) if block not in held), len(prompt))
        for block in reversed(prompt):
            held[block] = None
            held.move_to_end(block)
        while len(held) > room:
            held.popitem(last=False)
    return 100 * hits / sum(map(len, prompts))


def measure(path: Path, say: Say) -> list[Comparison]:
    """The hit rate at each of `SHARES`.

    Raises:
        BenchError: the file is not a trace, or a process failed.
    """
    prompts = read_prompts(path)
    blocks = len({block for prompt in prompts for block in prompt})
    total = sum(map(len, prompts))
    compared = []
    for share in SHARES:
        room, began_s = int(share * blocks), time.monotonic()
        tallies = _replayed(path, room)
        ours = 100 * sum(tally.hits for tally in tallies) / total
        best = exact(prompts, room)
        refused, saved = (
            sum(getattr(each, name) for each in tallies) for name in ("refused", "saved")
        )
        say(
            f"{share:.0%} of {blocks:,} blocks: {ours:.2f} % found, an exact LRU {best:.2f} %; {saved:,} saved, "
            f"{refused} refused, {time.monotonic() - began_s:.0f} s"
        )
        compared.append(
            Comparison(
                "hit rate",
                {"room": f"{share:.0%}", "processes": PROCESSES},
                Sample((ours,)),
                Sample((best,)),
                "%",
                (best - ALLOWED_POINTS) / best,
                more_is_better=True,
            )
        )
    return compared


def _replayed(path: Path, room: int) -> list[Tally]:
    """All requests of a trace, each by the next free one of `PROCESSES` processes with one pool."""
    context = multiprocessing.get_context("spawn")
    following, results = context.Value("q", 0), context.SimpleQueue()
    with own_folder() as folder:
        processes = [
            context.Process(
                target=_work, args=(path, folder, room, following, results), daemon=True
            )
            for _ in range(PROCESSES)
        ]
        for process in processes:
            process.start()
        for process in processes:
            process.join()
        if any(process.exitcode for process in processes):
            raise BenchError(f"processes ended with {[each.exitcode for each in processes]}")
        return [results.get() for _ in processes]


def _work(
    path: Path,
    folder: Path,
    room: int,
    following: Synchronized[int],
    results: SimpleQueue[Tally],
) -> None:
    """In a process: take the next request, look it up, and save what is missing."""
    prompts = read_prompts(path)
    tally = Tally(0, 0, 0)
    with contextlib.closing(LocalStore(Space(folder, room * charge_of(len(_PAYLOAD))))) as store:
        while True:
            with following.get_lock():
                number, following.value = following.value, following.value + 1
            if number >= len(prompts):
                break
            keys = [b"%032d" % block for block in prompts[number]]
            stored = sum(place is not None for place in store.find(keys))
            kept = [_save(store, key, parent) for parent, key in missing(keys, stored)]
            tally = Tally(
                tally.hits + stored,
                tally.saved + sum(kept),
                tally.refused + len(kept) - sum(kept),
            )
    results.put(tally)


def missing(keys: Sequence[bytes], stored: int) -> list[tuple[bytes, bytes]]:
    """Parent and key of each block behind those that are stored."""
    return list(zip([b"", *keys], keys, strict=False))[stored:]


def _save(store: LocalStore, key: bytes, parent: bytes) -> bool:
    """Save a block; returns whether it is there afterwards."""
    ends = time.monotonic() + _TAKES_S
    while time.monotonic() < ends:
        writing = store.begin(key, parent=parent, part="0", parts=1, nbytes=len(_PAYLOAD))
        if isinstance(writing, Refusal):
            if writing.why is not Why.UNWELL:
                return writing.why in (Why.EXISTS, Why.BEING_WRITTEN)
            continue
        with writing:
            writing.write(0, memoryview(_PAYLOAD))
            if writing.publish():
                return True
    return False
