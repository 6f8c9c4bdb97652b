# SPDX-License-Identifier: Apache-2.0
"""Faults at every step between a request's arrival and its computation: SGLang aborts none, and no byte is wrong.

Two ranks load what a third engine saves, and save themselves. Meanwhile files are cut, altered, swapped and removed, chunks are
evicted, a rank is slow or fails, weights change, requests end. PD_POOL_FAULTS=1000 in the environment sets the number of rounds.
"""

from __future__ import annotations

import os
import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("sglang.srt")

import torch
from sglang.srt.managers.schedule_batch import Req
from sglang.srt.mem_cache.base_prefix_cache import InitLoadBackParams
from sglang_door.pool_engine import Engine, Ranks, hooked, prompt
from support.pool_stores import wait_for_books
from support.waits import until

from chaos.pool_files import KINDS, harm
from pd_connector.errors import Miss, PoolError
from pd_connector.pool.keys import CHUNK_TOKENS
from pd_connector.pool.store.local import LocalStore
from pd_connector.pool.store.tier_storage import Space
from pd_connector.sglang import pool_chunks
from pd_connector.sglang.pool import PoolLinker, _Copy, _Load
from pd_connector.sglang.pool_prompts import PoolPrompt

__all__ = ["hooked"]

ROUNDS = int(os.environ.get("PD_POOL_FAULTS", "40"))
STEPS = ("arrival", "waiting", "lookup", "load", "start")
OF_FILES = (*KINDS, "clear", "index")
OF_A_RANK = ("slow", "unread", "unplanned", "no room", "other weights", "no look-up")
OF_A_REQUEST = ("ends while it waits", "ends before its load starts")
BUDGET = 3 << 20
"""Bytes of the store. All prompts need more, so chunks are evicted all the time."""
PROMPTS = [[*prompt(256, seed % 3), *prompt(30 + 47 * seed, 100 + seed)] for seed in range(8)]


class Unverified(PoolLinker):
    """A control: it names chunks that are not read yet, and takes what was read when SGLang computes."""

    def _planned(self, prompt: PoolPrompt, slots: Sequence[torch.Tensor]) -> _Load | None:
        first, stop = prompt.matched, prompt.matched + len(slots[0])
        numbers = range(first // CHUNK_TOKENS, stop // CHUNK_TOKENS)
        held = [each for each in prompt.held if each.chunk.number in numbers]
        pages = self._pages(slots[0])
        load = _Load([], held)
        self.__dict__.setdefault("places", {})[id(load.copies)] = first, pages
        return load

    def _copy(self, index: int, loads: list[_Load], cache: Any, fence: Any) -> None:
        for load in loads:
            first, pages = self.__dict__["places"].pop(id(load.copies))
            tables = [[-1] * (first // self._page_size) + pages]
            for held in load.held:
                until(lambda held=held: held.done)
                if held.ready is None:
                    self.layer_done_counter.fail(index, PoolError(Miss.EVICTED, "gone"))
                    for each in (each for load in loads for each in load.held):
                        self._rank.prompts.held.release(each)
                    return
                number, read = held.chunk.number, held.ready.read
                span = max(first, number * CHUNK_TOKENS), (number + 1) * CHUNK_TOKENS
                pieces = pool_chunks.planned(read, cache.geometry, tables, number, *span)
                room = bytearray(pool_chunks.gathered_bytes(pieces))
                payloads = pool_chunks.arranged(read, pieces, room)
                load.copies.extend(_Copy(*both) for both in zip(pieces, payloads, strict=True))
        super()._copy(index, loads, cache, fence)


class FaultyRank:
    """A rank of the engine that loads, and the fault that it has now."""

    def __init__(self, engine: Engine, dice: random.Random) -> None:
        self.engine, self.fault, self._dice = engine, "", dice
        prompts, linker = engine.rank.prompts, engine.linker
        self._around(prompts.held._loader, "read", self._before_read)
        self._around(linker, "_planned", self._before_plan)
        self._around(prompts, "_usable", self._before_look)
        hold = prompts.held.hold
        prompts.held.hold = lambda *args: (  # type: ignore[method-assign]
            None if self.fault == "no room" and dice.random() < 0.5 else hold(*args)
        )

    @staticmethod
    def _around(owner: Any, name: str, before: Callable[[], None]) -> None:
        original = getattr(owner, name)

        def faulty(*args: Any) -> Any:
            before()
            return original(*args)

        setattr(owner, name, faulty)

    def _before_read(self) -> None:
        if self.fault == "slow":
            time.sleep(self._dice.random() * 0.02)
        if self.fault == "unread" and self._dice.random() < 0.5:
            raise self._dice.choice(
                (PoolError(Miss.EVICTED, "gone"), OSError("I/O"), MemoryError())
            )

    def _before_plan(self) -> None:
        if self.fault == "unplanned":
            raise RuntimeError("a load that cannot be planned")

    def _before_look(self) -> None:
        if self.fault == "no look-up":
            raise OSError("a look-up that fails")

    def set(self, fault: str) -> None:
        self.fault = fault
        self.engine.watch.withdrawn = fault == "other weights"


@dataclass
class Plan:
    """A round: what is asked, and what goes wrong at which step."""

    dice: random.Random
    step: str = ""
    fault: str = ""
    rank: int = 0
    asked: list[list[int]] = field(default_factory=list)
    ends: int = 0
    turn: int = 0

    @classmethod
    def of(cls, seed: int) -> Plan:
        dice = random.Random(seed)
        return cls(
            dice,
            dice.choice(STEPS),
            dice.choice((*OF_FILES, *OF_A_RANK, *OF_A_REQUEST)),
            dice.randrange(2),
            dice.sample(PROMPTS, dice.randrange(1, 4)),
            turn=dice.randrange(4),
        )


class World:
    """Engines that share a store, and what became of their requests."""

    def __init__(self, folder: Path, linker: type[PoolLinker], seed: int, window: int = 0) -> None:
        self.folder, self.ended = folder, Counter[str]()
        self.store = LocalStore(Space(folder, BUDGET), None)
        self.writer = Engine(self.store, page_size=16, engine_id="w", read=False, window=window)
        self.ranks = Ranks()
        dice = random.Random(seed)
        self.faulty = [
            FaultyRank(
                Engine(
                    self.store,
                    page_size=64,
                    rank=(n, 2),
                    engine_id="r",
                    reduce=self.ranks.reduce(n),
                    linker=linker,
                    window=window,
                ),
                dice,
            )
            for n in (0, 1)
        ]
        if linker is Unverified:
            for rank in self.faulty:
                prompts = rank.engine.rank.prompts
                prompts._own = lambda prompt, now: (  # type: ignore[method-assign]
                    int(prompt.looked),
                    prompt.first + len(prompt.held),
                )

    def close(self) -> None:
        for engine in (self.writer, *(rank.engine for rank in self.faulty)):
            engine.close()
        self.store.close()

    def round(self, plan: Plan) -> None:
        for tokens in plan.asked:
            # SGLang may have freed windows before it saves.
            gone = plan.dice.randrange(len(tokens)) // 16 * 16 if plan.dice.random() < 0.3 else 0
            gone *= bool(self.writer.window)
            self.writer.compute(self.writer.request(tokens), windows_from=gone)
        if plan.dice.random() < 0.8:
            until(lambda: not self.writer.linker._jobs)
        failures: list[BaseException] = []

        def serve(number: int) -> None:
            try:
                self._serve(number, plan)
            except BaseException as error:
                failures.append(error)
                self.ranks.abort()

        threads = [threading.Thread(target=serve, args=(n,)) for n in (0, 1)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if failures:
            raise failures[0]
        self.writer.flush()

    def _at(self, step: str, number: int, plan: Plan) -> None:
        if step != plan.step:
            return
        if plan.fault in OF_A_RANK and number == plan.rank:
            self.faulty[number].set(plan.fault)
        if plan.fault in OF_FILES and number == 0:  # the other rank goes on meanwhile
            self._harm(plan)

    def _harm(self, plan: Plan) -> None:
        if plan.fault == "clear":
            self.store.remove(self.store.keys())
            return
        for _ in range(6):
            if plan.fault == "index":
                links = [*self.folder.glob("**/index/*")]
                if links:  # all may have been removed, and none made since
                    plan.dice.choice(links).unlink(missing_ok=True)
            else:
                harm(sorted(self.folder.glob("**/data/*")), plan.fault, plan.dice)

    def _serve(self, number: int, plan: Plan) -> None:
        engine = self.faulty[number].engine
        reqs = [engine.request(tokens) for tokens in plan.asked]
        queue = engine.scheduler.waiting_queue
        self._at("arrival", number, plan)
        for req in reqs:
            engine.arrive(req)
        self._at("waiting", number, plan)
        turn = 0
        while True:
            ready = engine.schedulable()
            queue = engine.scheduler.waiting_queue
            if plan.fault == OF_A_REQUEST[0] and turn == plan.turn and reqs[0] in queue:
                queue.remove(reqs[0])
            turn += 1
            if all(req in ready for req in queue) and turn > plan.turn:
                break
            time.sleep(0.001)
        self._at("lookup", number, plan)
        waiting = list(queue)
        found = [engine.match(req) for req in waiting]
        self._at("load", number, plan)
        slots = [self._begin(engine, *both) for both in zip(waiting, found, strict=True)]
        self._at("start", number, plan)
        if plan.fault == OF_A_REQUEST[1]:
            engine.tree.linker.release_request(waiting[0].rid)
            queue.remove(waiting.pop(0))
            slots.pop(0)
        index = engine.tree.ready_to_load_host_cache()
        engine.linker.layer_done_counter.set_consumer(index)
        for layer in range(engine.linker.layer_done_counter.num_layers if index >= 0 else 0):
            engine.linker.layer_done_counter.wait_until(layer)
        failed = engine.tree.linker.finish_loads()
        if number == 0:
            self.ended["aborted"] += len(failed)
            self.ended["answered"] += len(waiting) - len(failed)
            self.ended["loaded"] += sum(len(each) > 0 for each in slots)
        for req, loaded in zip(waiting, slots, strict=True):
            if req.rid in failed:  # the queue is another list once one has been computed
                engine.scheduler.waiting_queue.remove(req)
            else:
                engine.check(req.full_untruncated_fill_ids, loaded)
                engine.compute(req, loaded)
        queue = engine.scheduler.waiting_queue
        assert queue == []
        engine.schedulable()
        self._nothing_left(engine)
        self.faulty[number].set("")
        engine.flush()

    @staticmethod
    def _begin(engine: Engine, req: Req, found: Any) -> torch.Tensor:
        """The slots of a request's prefix."""
        req.last_node = found.last_device_node
        slots = engine.tree.path_device_indices(found.last_device_node)
        if found.host_hit_length:
            wanted = InitLoadBackParams(
                best_match_node=found.best_match_node,
                host_hit_length=found.host_hit_length,
                req=req,
            )
            count, _ = engine.tree.init_load_back(wanted)
            if count:
                slots = torch.cat([slots, engine.tree.linker.private_load_indices[req.rid]])
        return slots

    @staticmethod
    def _nothing_left(engine: Engine) -> None:
        linker, held = engine.linker, engine.rank.prompts.held
        until(lambda: held.nbytes == 0 and not held._held, "chunks that are held")
        assert not linker._queued
        assert not linker._offloads
        assert not engine.tree.linker.pending_offloads
        assert engine.tree.protected_size() == 0
        assert engine.tree.swa_protected_size() == 0


@pytest.fixture
def world(
    hooked: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[..., World]]:
    wait_for_books(monkeypatch)
    made: list[World] = []

    def one(linker: type[PoolLinker], window: int = 0) -> World:
        made.append(World(tmp_path / str(len(made)), linker, 1, window))
        return made[-1]

    yield one
    for each in made:
        each.close()


Make = Callable[..., World]


@pytest.mark.parametrize("window", [0, 100])
def test_no_fault_aborts_a_request_or_loads_a_wrong_byte(world: Make, window: int) -> None:
    ours = world(PoolLinker, window)
    for seed in range(ROUNDS):
        ours.round(Plan.of(seed))
    print(dict(ours.ended))
    assert ours.ended["aborted"] == 0
    assert ours.ended["loaded"] >= ROUNDS / 4, "control: chunks were loaded"


def test_a_linker_that_names_chunks_before_they_are_verified_has_requests_aborted(
    world: Make,
) -> None:
    """The control: the faults are such that requests would be aborted."""
    ours = world(Unverified)
    for seed in range(400):
        ours.round(Plan.of(seed))
        if ours.ended["aborted"]:
            break
    assert ours.ended["aborted"]
