# SPDX-License-Identifier: Apache-2.0
"""LMCache's StorageManager, with the L2 tiers that a site has configured: files, Redis, and what else LMCache has.

    lmcache:FILE       arguments of `lmcache server` that say how it stores, such as
                       --l1-size-gb 1 --eviction-policy LRU --l2-adapter '{"type": "fs", "base_path": "/mnt/kv"}'

LMCache needs an object's length before it reads it, and all objects of one LMCache model have the same length. So an
object is stored as two LMCache objects: the one of model `pd-connector` has the length, that of model
`pd-connector-LENGTH` the bytes. Both pass L1.
"""

import importlib.util
import itertools
import json
import os
import shlex
import struct
import time
from argparse import ArgumentParser
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import SplitResult

from pd_connector.pool.far.base import FarStore

_LENGTH, _MODEL, _ADAPTER = struct.Struct("<Q"), "pd-connector", "--l2-adapter"


class LMCacheStore(FarStore):
    """Names become hashes of LMCache's chunks. LMCache evicts as it is configured."""

    package = "lmcache>=0.5.6"

    @classmethod
    def problem(cls, address: SplitResult) -> str:
        if importlib.util.find_spec("lmcache") is None:
            return f"needs {cls.package}: install it in an environment of its own, and name its Python with --client-python"
        if address.netloc or not address.path or address.query:
            return "must be lmcache:FILE, a file with arguments of `lmcache server`"
        try:
            pairs = itertools.pairwise(_words(address))
            tiers = [json.loads(spec) for word, spec in pairs if word == _ADAPTER]
        except (OSError, ValueError) as error:
            return f"{address.path}: must be arguments of `lmcache server`: {error}"
        return "" if tiers else f"{address.path}: has no {_ADAPTER}: no other host would see it"

    @classmethod
    def hosts(cls, address: SplitResult) -> list[str]:
        return [f"the L2 tiers that {address.path} names"]

    def __init__(self, address: SplitResult, deadline_s: float) -> None:
        os.environ |= {"LMCACHE_TRACK_USAGE": "false", "LMCACHE_LOG_LEVEL": "WARNING"}
        import torch
        from lmcache.v1.distributed import api, config, internal_api, storage_manager

        parser = config.add_storage_manager_args(ArgumentParser(exit_on_error=False))
        arguments, _ = parser.parse_known_args(_words(address))
        arguments.shm_name = ""  # shared memory would stay when the client is killed
        manager = storage_manager.StorageManager(config.parse_args_to_config(arguments))
        self._api, self._manager, self._deadline_s = api, manager, deadline_s
        self._tensor: Any = lambda data: torch.frombuffer(data, dtype=torch.uint8)
        self._layout: Any = lambda size: api.MemoryLayoutDesc([torch.Size([size])], [torch.uint8])
        self._tiers = [tier for _, tier in manager.l2_adapters()]
        self._stored = stored = Counter[Any]()  # by key, tiers
        base: Any = internal_api.L2AdapterListener
        methods: Any = dict.fromkeys(base.__abstractmethods__, lambda *_: None)
        methods["on_l2_keys_stored"] = lambda _, keys, sizes: stored.update(keys)
        manager.register_l2_listener(type("Listener", (base,), methods)())

    def has(self, names: Sequence[str]) -> list[int]:
        heads = [bytearray(_LENGTH.size) for _ in names]
        self._read(list(map(self._head, names)), [memoryview(head) for head in heads])
        return [_LENGTH.unpack(head)[0] for head in heads]

    def get(self, names: Sequence[str], buffers: Sequence[memoryview]) -> list[int]:
        there = self._read(list(map(self._body, names, map(len, buffers))), buffers)
        self._delete([self._head(name) for name, ok in zip(names, there, strict=True) if not ok])
        return [len(buffer) * is_there for buffer, is_there in zip(buffers, there, strict=True)]

    def put(self, names: Sequence[str], data: Sequence[memoryview]) -> list[bool]:
        heads, bodies = list(map(self._head, names)), list(map(self._body, names, map(len, data)))
        self._delete([*heads, *bodies])  # LMCache does not tell of what was there before
        kept = self._write(bodies, data)
        sizes = (memoryview(bytearray(_LENGTH.pack(len(each)))) for each in data)
        return self._write(heads, [a and b for a, b in zip(kept, sizes, strict=True)])

    def remove(self, names: Sequence[str]) -> None:
        self._delete([*map(self._head, names), *map(self._body, names, self.has(names))])

    def close(self) -> None:
        self._manager.close()

    def _head(self, name: str) -> Any:
        return self._api.ObjectKey(bytes.fromhex(name), _MODEL, 0)

    def _body(self, name: str, nbytes: int) -> Any:
        return self._api.ObjectKey(bytes.fromhex(name), f"{_MODEL}-{nbytes}", 0)

    def _delete(self, keys: list[Any]) -> None:
        self._manager.delete_l1_keys(keys)
        for tier in self._tiers if keys else ():
            tier.delete(keys)

    def _until_s(self, data: Iterable[Any]) -> float:
        return time.monotonic() + self._deadline_s / 2 + sum(map(len, data)) / 20e6  # bytes/s

    def _read(self, keys: Sequence[Any], buffers: Sequence[memoryview]) -> list[bool]:
        """Read objects that are as long as their buffers. Returns which were there. Raises TimeoutError."""
        api, manager, until_s = self._api, self._manager, self._until_s(buffers)
        by_size, tasks, there = defaultdict[int, list[int]](list), [], [False] * len(keys)
        for place, buffer in enumerate(buffers):
            by_size[len(buffer)].append(place)
        for nbytes, places in by_size.items():
            row = api.GroupedObjectKeys([keys[place] for place in places], 0, self._layout(nbytes))
            task = api.PrefetchTaskSpec([row], fetching_policy="full")
            tasks.append((manager.submit_prefetch_task(task), places))
        for task, places in tasks:
            if not manager.wait_prefetch_status(task, max(0.0, until_s - time.monotonic())):
                raise TimeoutError("LMCache has not read objects in time")
            result = manager.query_prefetch_status(task)
            hits = [places[bit] for bit in result.hit_cells[0].get_indices_list()]
            own = [keys[place] for place in hits]
            with manager.read_prefetched_results(own, result.l1_owners) as objects:
                for place, each in zip(hits, objects or (), strict=False):
                    self._tensor(buffers[place]).copy_(each.tensor)
                    there[place] = True
            manager.finish_read_prefetched(own, l1_owners=result.l1_owners)
        manager.delete_l1_keys(list(keys))  # they could outlive what the tiers have
        return there

    def _write(self, keys: Sequence[Any], data: Sequence[Any]) -> list[bool]:
        """Write objects into each tier; False entries are skipped. Returns which objects some tier took."""
        manager, until_s, written = self._manager, self._until_s(filter(None, data)), list[Any]()
        self._stored.clear()
        for key, each in zip(keys, data, strict=True):
            if each and (reserved := manager.reserve_write([key], self._layout(len(each)))):
                reserved[key].tensor.copy_(self._tensor(each))
                manager.finish_write([key])
                written.append(key)
        tiers = len(self._tiers)
        while time.monotonic() < until_s and any(self._stored[key] < tiers for key in written):
            time.sleep(0.002)
        manager.delete_l1_keys(written)
        return [self._stored[key] > 0 for key in keys]


def _words(address: SplitResult) -> list[str]:
    return shlex.split(Path(address.path).read_text(), comments=True)
