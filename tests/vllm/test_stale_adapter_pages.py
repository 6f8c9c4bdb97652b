# SPDX-License-Identifier: Apache-2.0
"""An adapter is replaced while requests for it wait, for KV or for room: they are computed from their beginning, with the
adapter that is loaded now. With vLLM's own scheduler."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm")

from support.lora_adapters import adapter, changed, load, lora, remove
from support.vllm_steps import FETCH, PAGE, SteppedEngine

from pd_connector.agent.commands import Drop
from pd_connector.errors import Cause
from pd_connector.protocol.consuming.incoming import Load
from pd_connector.vllm.identity import adapter_watch, adapters
from pd_connector.vllm.identity.adapters import Adapters

BUDGET, PROMPT = 32, 100


def in_place(folder: Path) -> None:
    load(lora(adapter(folder.parent / "b", 2.0), load_inplace=True))


def removed(folder: Path) -> None:
    remove(1)
    load(lora(adapter(folder.parent / "b", 2.0)))


def nothing(folder: Path) -> None:
    """It stays as it is."""


REPLACEMENTS = [in_place, removed, lambda folder: changed(folder, 2.0), nothing]
replaced = pytest.mark.parametrize(
    "replace", REPLACEMENTS, ids=["in place", "removed", "files", "not at all"]
)
Replace = Callable[[Path], None]


@pytest.fixture(autouse=True)
def _alone(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Engines of other tests do not watch. Files are looked at whenever vLLM asks."""
    monkeypatch.setattr(adapters, "_SEEN_S", 0.0)
    before = list(adapter_watch._watching)
    adapter_watch._watching.clear()
    yield
    adapter_watch._watching.clear()
    adapter_watch._watching.update(before)


class Engine(SteppedEngine):
    def __init__(self, folder: Path, **options: Any) -> None:
        options = {"budget": BUDGET, "audit": "off", **options}
        super().__init__(adapters=True, **options)
        self.outcomes = Counter[str]()
        count = self.side.telemetry.count

        def noted(name: str, amount: int = 1, **labels: str) -> None:
            if name == "handoffs":
                self.outcomes[labels["cause"]] += amount
            count(name, amount, **labels)

        self.side.telemetry.count = noted
        self.folder = adapter(folder)
        load(lora(self.folder))

    def fetch(self, name: str, tokens: int = PROMPT, *args: Any, **more: Any) -> Any:
        params = {**FETCH, "remote_request_id": f"transfer of {name}", **more}
        return self.add(name, tokens, *args, lora=lora(self.folder), **params)

    def told(self, kind: type) -> list[Any]:
        return [command for command in self.commands if isinstance(command, kind)]

    def ends(self, outcome: str) -> bool:
        """Go on to the end; returns whether the handoffs had this outcome."""
        for _ in range(30):
            self.step()
        self.assert_nothing_held()
        return self.outcomes == {outcome: 1}


@pytest.fixture
def engine(tmp_path: Path) -> Engine:
    return Engine(tmp_path / "a")


def present(request: Any, replace: Replace) -> bool:
    """Whether a request that has had its first step used what was there; without it a step computes `BUDGET` tokens."""
    assert request.num_computed_tokens in (BUDGET, PROMPT)
    used = request.num_computed_tokens > BUDGET
    assert used == (replace is nothing)
    return used


@replaced
@pytest.mark.parametrize("waits", [False, True])
def test_while_its_request_is_queued(engine: Engine, replace: Replace, waits: bool) -> None:
    request = engine.fetch("a", **{"remote_block_ids": None} if waits else {})
    if waits:
        engine.step()
    replace(engine.folder)
    engine.step()
    assert bool(engine.told(Load)) == (replace is nothing and not waits)
    if replace is not nothing:
        assert request.num_computed_tokens == BUDGET
        engine.step()
        assert [drop.cause for drop in engine.told(Drop)] == [Cause.MODEL]
        assert engine.ends(Cause.MODEL)


@replaced
@pytest.mark.parametrize("when", ["in transfer", "loaded"])
def test_while_its_kv_is_on_its_way_or_has_come(
    engine: Engine, replace: Replace, when: str
) -> None:
    request = engine.fetch("a")
    engine.step()
    assert engine.told(Load)
    if when == "in transfer":
        replace(engine.folder)
        engine.step()
    engine.step(finished_recving={"a"})
    if when == "loaded":
        replace(engine.folder)
    engine.step()
    if replace is not nothing:
        assert request.num_computed_tokens == 0, "its pages are free, and it is looked at again"
        assert engine.pages("a") == ([],)
        engine.step()
    assert engine.ends("handed_over" if present(request, replace) else Cause.MODEL)


@replaced
def test_while_its_request_waits_for_a_place_with_its_kv(engine: Engine, replace: Replace) -> None:
    """vLLM has cached its pages by then. It runs two adapters at most, and two others do."""
    request = engine.fetch("a")
    for number in (2, 3):
        other = lora(adapter(engine.folder.parent / f"{number}", number), number, f"{number}")
        load(other)
        engine.add(f"{number}", 8, 40, lora=other)
    engine.step()
    engine.step(finished_recving={"a"})
    engine.step()
    assert request in engine.scheduler.kv_holding_waiting
    assert request.num_computed_tokens == PROMPT - 1
    replace(engine.folder)
    engine.abort("2")
    engine.step()
    if replace is not nothing:
        engine.step()
    engine.abort("3")
    assert request.num_computed_tokens == (PROMPT if replace is nothing else BUDGET - 1)
    assert engine.ends("handed_over" if replace is nothing else Cause.MODEL)


@replaced
def test_after_its_pages_were_cached_by_another_request(engine: Engine, replace: Replace) -> None:
    engine.add("before", PROMPT, 1, lora=lora(engine.folder))
    for _ in range(6):
        engine.step()
    request = engine.add("a", PROMPT, 4, lora=lora(engine.folder))
    replace(engine.folder)
    engine.step()
    present(request, replace)


@replaced
def test_while_it_was_preempted(tmp_path: Path, replace: Replace) -> None:
    engine = Engine(tmp_path / "a", blocks=16, budget=256)
    engine.add("first", 6 * PAGE, 60, seed=1)
    request = engine.add("a", PROMPT, 60, lora=lora(engine.folder))
    while not request.num_preemptions:
        engine.step()
    replace(engine.folder)
    engine.abort("first")
    engine.scheduler.max_num_scheduled_tokens = BUDGET
    engine.step()
    used = request.num_computed_tokens > BUDGET
    assert used == (replace is nothing)


def test_pages_are_found_for_an_adapter_of_unknown_content(engine: Engine) -> None:
    """As long as vLLM has the same one."""
    for name in ("a", "b"):
        request = engine.add(name, PROMPT, 4, lora=lora("/no/such/folder", 2))
        engine.step()
        assert request.num_computed_tokens == (BUDGET if name == "a" else PROMPT)
        for _ in range(8):
            engine.step()


def test_files_are_not_looked_at_in_every_step_for_every_request_that_waits(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(adapters, "_SEEN_S", 60.0)
    for name in "abc":
        engine.fetch(name, remote_block_ids=None)
    looks: list[object] = []
    untouched = adapters.untouched
    monkeypatch.setattr(
        adapters, "untouched", lambda known: (looks.append(known), untouched(known))[1]
    )
    for _ in range(5):
        engine.step()
    assert not looks
    in_place(engine.folder)
    engine.step()
    assert {drop.cause for drop in engine.told(Drop)} == {Cause.MODEL}, "a load counts at once"


def test_kv_of_another_part_is_not_loaded_either(engine: Engine) -> None:
    """vLLM ignores what connectors answer for such a request."""
    request = engine.fetch("a")
    in_place(engine.folder)
    engine.step()
    assert request.skip_reading_prefix_cache


def test_a_request_that_cannot_be_computed_waits(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        engine.side._fetching._uncomputable, "_needed", dict.fromkeys(["a"], PROMPT - 1)
    )
    request = engine.fetch("a")
    engine.step()
    engine.step(finished_recving={"a"})
    in_place(engine.folder)
    for _ in range(4):
        engine.step()
    assert request.num_computed_tokens == 0
    assert not engine.scheduler.running
    engine.abort("a")
    engine.assert_nothing_held()


def test_without_the_guard_kv_of_the_replaced_adapter_is_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Adapters, "replaced", lambda *_, **_look: False)
    engine = Engine(tmp_path / "a")
    request = engine.fetch("a")
    in_place(engine.folder)
    engine.step()
    engine.step(finished_recving={"a"})
    engine.step()
    assert request.num_computed_tokens == PROMPT
