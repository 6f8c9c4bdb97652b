# SPDX-License-Identifier: Apache-2.0
"""KV of old weights is neither used with new ones nor saved under their name, whatever the order of loads of weights, reads of
all their bytes, pauses, steps and requests: vLLM's scheduler, both sides of the connector, an agent and a store."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterator
from itertools import count, product
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm")

from agent.test_advertised_model import opened
from kv.test_weights import save, tensors
from support import vllm_computing
from support.vllm_computing import ComputingEngine, until_over
from support.vllm_pooled import Make, make
from vllm.v1.core.sched.interface import PauseState

from pd_connector.agent import advertised_model
from pd_connector.agent.advertised_model import AdvertisedModel
from pd_connector.agent.commands import ChangeModel
from pd_connector.agent.weights_reader import WeightsReader
from pd_connector.kv.model import ModelFacts
from pd_connector.kv.weights import fingerprint
from pd_connector.pool.jobs import Fill
from pd_connector.pool.keys import CHUNK_TOKENS
from pd_connector.pool.load_breakeven import LoadBreakeven
from pd_connector.vllm.pages.stale import StalePages

__all__ = ["make"]

SEEDS = range(6)
ACTIONS = 150
PROMPTS = 4


class Reads:
    """Threads that read weights: each waits until the test lets it go on, or it is stopped."""

    def __init__(self) -> None:
        self.waiting: dict[threading.Thread, threading.Event] = {}

    def lines(self, reader: Any) -> Iterator[list[str]]:
        event = self.waiting[threading.current_thread()] = threading.Event()
        while not (event.wait(0.001) or reader.stopped):
            pass
        yield ["weights", fingerprint(reader.part.files).hex()]

    def finish(self, thread: threading.Thread) -> None:
        self.waiting.pop(thread).set()
        thread.join(30)
        assert not thread.is_alive()


class Watch:
    """Stands for `ModelWatch`: the test loads the weights. What is told of them is the real thing."""

    def __init__(self, engine: ComputingEngine, folders: list[Path], reads: Reads) -> None:
        self._engine, self._folders, self._reads = engine, folders, reads
        self.weights = 0
        files = [opened(folders[0])]
        facts = ModelFacts(b"config", reading=True)
        engine.agent.submit(ChangeModel(facts))
        self.told = AdvertisedModel(facts, files, engine.agent.submit)

    @property
    def changes(self) -> int:
        return self.told.changes

    @property
    def reads(self) -> bool:
        return self.told.reads

    def load(self, weights: int) -> None:
        """What `reload_weights` does."""
        self.told.withdraw()
        self.weights = weights
        self._engine.side.workers_called()

    def step(self, *, suspected: bool, idle: bool) -> None:
        if self.told.withdrawn and (suspected or not idle):
            assert self.told.tell_files([opened(self._folders[self.weights])])

    def close(self) -> None:
        self.told.close()


class Orders:
    """An engine, and what happens to it in an order that a seed decides."""

    def __init__(self, engine: ComputingEngine, watch: Watch, reads: Reads, seed: int) -> None:
        self.engine, self.watch, self.reads = engine, watch, reads
        self.chance, self.names = random.Random(seed), count()
        self.mixed: set[str] = (
            set()
        )  # requests with KV of more than one model: their answers are their own

    def ask(self) -> None:
        tokens = self.chance.choice([1, 2, 3]) * CHUNK_TOKENS + self.chance.randrange(1, 40)
        answer, prompt = self.chance.randrange(1, 12), self.chance.randrange(PROMPTS)
        self.engine.add(f"r{next(self.names)}", tokens, answer, seed=prompt)

    def step(self) -> None:
        scheduler = self.engine.scheduler
        if not scheduler.has_requests():
            return
        heard = self.engine.side._stale.changes.get(0, 0) == self.watch.changes
        output = scheduler.schedule()
        if not heard:
            self._mix()
        self.engine.settle(self.engine.run(output))

    def steps(self) -> None:
        for _ in range(self.chance.randrange(1, 5)):
            self.step()

    def load(self) -> None:
        self._mix()
        self.watch.load(self.chance.randrange(2))

    def read(self) -> None:
        if self.reads.waiting:
            self.reads.finish(self.chance.choice(list(self.reads.waiting)))

    def pause(self) -> None:
        self.engine.scheduler.set_pause_state(self.chance.choice(list(PauseState)))

    def forget(self) -> None:
        self.engine.scheduler.reset_prefix_cache()

    def _mix(self) -> None:
        scheduler = self.engine.scheduler
        self.mixed |= {name for name in scheduler.requests if any(self.engine.pages(name))}

    def settle(self) -> None:
        """All requests are answered, and the weights are known."""
        self.engine.scheduler.set_pause_state(PauseState.UNPAUSED)
        for thread in list(self.reads.waiting):
            self.reads.finish(thread)
        stop_s = time.monotonic() + 60
        side = self.engine.side
        while self.engine.scheduler.requests or not side.pool.model or side.saving:
            assert time.monotonic() < stop_s, "it comes to no end"
            self.step()
            self.read()

    def run(self) -> list[str]:
        """Returns what was wrong with requests that began after the last load of weights."""
        often = {self.ask: 5, self.steps: 10, self.load: 1, self.read: 1, self.pause: 1}
        often[self.forget] = 2
        for _ in range(ACTIONS):
            self.chance.choices(list(often), list(often.values()))[0]()
        for weights in (0, 1):  # whatever was saved under its name
            self.settle()
            self._mix()
            self.watch.load(weights)
            self.step()
            self.settle()
            for again, prompt in product(range(2), range(PROMPTS)):
                until_over([self.engine], lambda: not self.engine.side.saving)
                self.forget()
                self.engine.add(
                    f"w{weights}-{again}-{prompt}", 3 * CHUNK_TOKENS + 5, 1, seed=prompt
                )
                self.settle()
        wrong, self.engine.wrong = self.engine.wrong, []
        return [one for one in wrong if one.split()[1] not in self.mixed]


@pytest.fixture
def run(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[[int], Orders]]:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(LoadBreakeven, "chunks", lambda _, missing, *_more: len(missing))
    reads, folders, watches = Reads(), [], []
    monkeypatch.setattr(WeightsReader, "_lines", lambda reader, cache: reads.lines(reader))
    for number in range(2):
        made = {name: tensor + number for name, tensor in tensors(1).items()}
        folders.append(save(tmp_path / f"model {number}", made))
    kv = vllm_computing.kv_of

    def orders(seed: int) -> Orders:
        engine = make(f"engine{seed}")
        watches.append(Watch(engine, folders, reads))
        monkeypatch.setattr(engine._worker, "_model", watches[-1])
        monkeypatch.setattr(
            vllm_computing, "kv_of", lambda layer, marks: kv(layer, marks) + watches[-1].weights
        )
        return Orders(engine, watches[-1], reads, seed)

    yield orders
    for watch in watches:
        watch.close()


@pytest.mark.parametrize("seed", SEEDS)
def test_no_order_of_events_mixes_kv_of_two_models(run: Callable[[int], Orders], seed: int) -> None:
    orders = run(seed)
    assert orders.run() == []
    loads = [one for one in orders.engine.commands if isinstance(one, Fill)]
    assert len({load.model for load in loads}) == 2, "chunks of both were used"


@pytest.mark.parametrize(
    ("owner", "guard"), [(StalePages, "_evict_all"), (advertised_model._Reading, "stop")]
)
def test_each_guard_is_needed(
    run: Callable[[int], Orders],
    monkeypatch: pytest.MonkeyPatch,
    owner: type,
    guard: str,
) -> None:
    """What is undone: pages leave the prefix cache, threads tell nothing of earlier weights."""
    monkeypatch.setattr(owner, guard, lambda _: None)
    assert any(run(seed).run() for seed in SEEDS)
