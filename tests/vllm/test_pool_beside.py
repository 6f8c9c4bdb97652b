# SPDX-License-Identifier: Apache-2.0
"""The pool beside another connector in a MultiConnector: KV that the other one loads is not saved, nor what is computed on
it, nor is it compared."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("vllm")

from support.vllm_beside import KEY, LATER, EngineBeside
from support.vllm_computing import ComputingEngine, answered, full, until_over, window
from support.vllm_pooled import Make, make, saved, until_saved
from vllm.v1.request import Request

from pd_connector.pool.jobs import Fill
from pd_connector.pool.keys import CHUNK_TOKENS
from pd_connector.pool.load_breakeven import LoadBreakeven
from pd_connector.vllm.pages.unverified import UnverifiedPages

__all__ = ["make"]

THREE = 3 * CHUNK_TOKENS


@pytest.fixture(autouse=True)
def always(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is found is loaded, however slow the machine."""
    monkeypatch.setattr(LoadBreakeven, "chunks", lambda _, missing, *_more: len(missing))


@pytest.fixture
def believed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The guard is off."""
    monkeypatch.setattr(UnverifiedPages, "holds", lambda *_: False)


def engine(make: Make, name: str, kind: type[ComputingEngine], **more: Any) -> ComputingEngine:
    made = make(name, kind=kind, **more)
    until_over([made], lambda: bool(made.side.pool.model))
    return made


def ask(of: ComputingEngine, name: str, tokens: int, max_tokens: int = 1, **more: Any) -> Request:
    request = of.add(name, tokens, max_tokens, **more)
    until_over([of], lambda: name in of.ended)
    until_saved(of)
    assert list(request.output_token_ids) == answered(request)
    return request


def read_after(make: Make, later: bool) -> list[str]:
    """The other connector fills a window's first page in part. What is wrong where another engine has loaded chunks."""
    specs = (full(), window(64))
    writer = engine(make, "writer", EngineBeside, specs=specs)
    ask(writer, "w", 2 * CHUNK_TOKENS + 12, 2, **{KEY: 2 * CHUNK_TOKENS + 10, LATER: later})
    reader = engine(make, "reader", ComputingEngine, specs=specs)
    ask(reader, "r", 2 * CHUNK_TOKENS + 20)
    wrong, reader.wrong = reader.wrong, []
    return wrong


@pytest.mark.parametrize("later", [True, False], ids=["before the step", "within the step"])
def test_a_page_that_another_connector_has_filled_in_part_is_not_saved(
    make: Make, *, later: bool
) -> None:
    assert read_after(make, later) == []


@pytest.mark.usefixtures("believed")
def test_it_would_be_saved_as_a_whole_one(make: Make) -> None:
    assert read_after(make, later=True)


def saved_by_those_that_follow(make: Make, later: bool) -> int:
    """Another connector loads a prompt's beginning, and later prompts find it in vLLM's prefix cache."""
    of = engine(make, "writer", EngineBeside)
    ask(of, "loaded", THREE + 12, **{KEY: 200, LATER: later})
    ask(of, "follows", THREE + 140, 140)
    ask(of, "follows again", THREE + 300)
    return len(saved(of))


@pytest.mark.parametrize("later", [True, False], ids=["before the step", "within the step"])
def test_what_is_computed_on_such_kv_is_not_saved_either(make: Make, *, later: bool) -> None:
    assert saved_by_those_that_follow(make, later) == 0


def test_it_is_counted(make: Make) -> None:
    of = engine(make, "writer", EngineBeside)
    counted: list[str] = []
    of.side.telemetry.count = lambda name, number=1, **more: counted.append(more.get("cause", name))
    ask(of, "loaded", THREE + 12, **{KEY: 200, LATER: True})
    ask(of, "follows", THREE + 12)
    assert counted.count("unverified") == 2


@pytest.mark.usefixtures("believed")
def test_it_would_be_saved_for_all_engines(make: Make) -> None:
    assert saved_by_those_that_follow(make, later=True) >= 3


def test_what_this_engine_has_computed_is_saved_whatever_others_loaded(make: Make) -> None:
    of = engine(make, "writer", EngineBeside)
    ask(of, "loaded", THREE + 12, **{KEY: 200, LATER: True})
    ask(of, "own", THREE + 12, seed=1)
    assert len(saved(of)) == 3
    ask(of, "continued elsewhere", THREE + 150, seed=1, **{KEY: THREE + 140, LATER: True})
    ask(of, "own beginning", THREE + 12, max_tokens=150, seed=1)
    assert len(saved(of)) == 4, "pages before those that were loaded are verified"


def test_pages_that_are_handed_out_again_are_verified(make: Make) -> None:
    of = engine(make, "writer", EngineBeside, blocks=60)
    ask(of, "loaded", THREE + 12, **{KEY: 200, LATER: True})
    for seed in range(1, 4):  # in nearly all pages there are
        ask(of, f"{seed}", THREE + 12, seed=seed)
    ask(of, "loaded and computed", THREE + 12)
    assert len(saved(of)) == 12


def compared(make: Make) -> list[str]:
    """A writer is to be audited, and another connector has the first prompt's KV. Which prompts are compared."""
    ask(engine(make, "writer", ComputingEngine), "w", THREE + 12)
    of = engine(make, "reader", EngineBeside, audit="first")
    ask(of, "loaded", THREE + 12, 3, **{KEY: THREE + 10, LATER: True})
    of.scheduler.reset_prefix_cache()
    audits = [one for one in of.commands if isinstance(one, Fill) and one.compares]
    ask(of, "computed", THREE + 12, 3)
    audits_then = [one for one in of.commands if isinstance(one, Fill) and one.compares]
    return ["loaded"] * len(audits) + ["computed"] * (len(audits_then) - len(audits))


def test_a_writer_is_compared_with_what_was_computed_here_only(make: Make) -> None:
    assert compared(make) == ["computed"]


@pytest.mark.usefixtures("believed")
def test_it_would_be_compared_with_what_another_connector_has_loaded(make: Make) -> None:
    assert compared(make) == ["loaded"]
