# SPDX-License-Identifier: Apache-2.0
"""Random orders of what clients, schedulers and a full cache do to a pair of engines: no engine ever uses KV that it
would not have computed itself, every answer is right, and every page comes home."""

import contextlib
import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

pytest.importorskip("vllm")

from support.vllm_computing import ComputingEngine, answered, full, window
from vllm.v1.request import Request, RequestStatus

from pd_connector.protocol.wire.params import decode_params, prefill_params
from scheduler_plugins.admission import board
from scheduler_plugins.vllm.scheduler import PrefixAwareScheduler

SPECS: dict[str, Callable[[], list[Any]]] = {
    "everything": lambda: [full()],
    "a window": lambda: [window(40)],
    "both": lambda: [full(), window(70)],
}
SETTINGS: dict[str, Any] = {
    "stall_timeout_s": 2.0,
    "wait_timeout_s": 3.0,
    "lease_s": 1.5,
    "session_timeout_s": 3.0,
    "blocks": 300,
}
REQUESTS = 14
CLASSES = ["free", "standard", "premium"]
MOST = 1000  # tokens of a prompt


class Pair:
    """Two engines, and the requests that they are asked."""

    def __init__(self, seed: int, specs: str, *, sleeps: bool = False, **scheduling: Any) -> None:
        self._scheduling = scheduling
        self._sleeps = sleeps
        self.chance = random.Random(seed)
        pick = self.chance.choice
        self._settings = {
            **SETTINGS,
            "late": pick([False, True]),
            "zeroes": pick([False, True]),
            "drafts": pick([False, True]),
            "ahead": pick([False, True]) and "scheduler" not in scheduling,
            "overlap": pick(["auto", "layer", "step"]),
            "defer_pages": pick([False, True]),
            "budget": pick([64, 512, 2048]),
            "pause_s": pick([0.0, 0.003]),
        }
        self.prefill = self._engine("kv_producer", specs, "one")
        self.decode = self._engine("kv_consumer", specs, pick(["one", "other"]))
        self.asked: dict[str, Request] = {}
        self._followed: dict[str, Callable[[dict[str, Any]], None]] = {}

    def _engine(self, role: str, specs: str, layout: str) -> ComputingEngine:
        options = {**self._settings, **self._scheduling}
        return ComputingEngine(role, role, specs=SPECS[specs](), layout=layout, **options)

    @property
    def engines(self) -> tuple[ComputingEngine, ComputingEngine]:
        return self.prefill, self.decode

    @property
    def busy(self) -> bool:
        return bool(self._followed) or any(engine.busy for engine in self.engines)

    def ask(self, name: str) -> None:
        """A request arrives: at both engines at once, at one after the other, or at one alone."""
        pick, most = self.chance.choice, MOST
        tokens = pick([1, 16, 17, self.chance.randrange(1, 200), self.chance.randrange(200, most)])
        seed, said, wanted = pick([0, 0, 1]), pick([1, 1, 20]), pick([1, 6])
        qos = CLASSES[tokens % len(CLASSES)]  # vLLM's scheduler knows of none

        def follow(params: dict[str, Any]) -> None:
            self.asked[name] = self.decode.add(name, tokens, wanted, seed, qos=qos, **params)

        how = self.chance.random()
        if how < 0.5:
            self.prefill.add(name, tokens, said, seed, qos=qos, **prefill_params(name))
            follow(decode_params(self.prefill.side.offers.address, name))
        elif how < 0.9:
            self.prefill.add(name, tokens, said, seed, qos=qos, **prefill_params())
            self._followed[name] = follow
        else:
            follow({})

    def follow(self) -> None:
        """Prefills that have ended are taken to the decode engine, those with an answer."""
        for name in [name for name in self._followed if name in self.prefill.ended]:
            follow = self._followed.pop(name)
            if params := self.prefill.answers[name]:
                follow(params)

    def disturb(self, engine: ComputingEngine) -> None:
        """A client leaves, vLLM preempts a request, or it is told to empty its prefix cache, with or without
        the requests that run, or to sleep."""
        what, scheduler = self.chance.random(), engine.scheduler
        if what < 0.03 and scheduler.requests:
            engine.abort(name := self.chance.choice(list(scheduler.requests)))
            engine.ended.setdefault(name, None)
            engine.answers.setdefault(name, None)
        elif what < 0.08 and scheduler.running:
            scheduler._preempt_request(scheduler.running.pop(), 0.0)
        elif what < 0.11:
            # vLLM says so where pages are on their way; running requests have been preempted then.
            with contextlib.suppress(RuntimeError):
                scheduler.reset_prefix_cache(what < 0.1, reset_connector=True)
        elif self._sleeps and what < 0.14:
            engine.sleep()


@pytest.mark.parametrize("specs", list(SPECS))
@pytest.mark.parametrize("seed", range(4))
def test_no_kv_is_used_that_the_engine_would_not_have_computed(
    specs: str, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PD_CONNECTOR_CHECK", "1")
    run(Pair(seed, specs))


@pytest.mark.parametrize("specs", list(SPECS))
@pytest.mark.parametrize("seed", [20])
def test_also_with_engines_that_sleep(
    specs: str, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their pages hold other content afterwards, and no request that was paused is lost."""
    monkeypatch.setenv("PD_CONNECTOR_CHECK", "1")
    run(Pair(seed, specs, sleeps=True), rounds=2)


@pytest.mark.parametrize("specs", list(SPECS))
@pytest.mark.parametrize("policy", ["srjf_calibrated", "prefill_only"])
def test_also_with_our_scheduler_which_preempts_prefills_for_other_classes(
    specs: str, policy: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PD_CONNECTOR_CHECK", "1")
    monkeypatch.setattr(board, "default_folder", lambda: tmp_path / "boards")
    classes = [
        {"name": name, "priority": priority, "reserved_fraction": 0.3}
        for priority, name in enumerate(CLASSES)
    ]
    path = tmp_path / "scheduler.yaml"
    path.write_text(yaml.safe_dump({"scheduler": {"policy": policy, "qos_classes": classes}}))
    additional = {"pd_scheduler": str(path)}
    run(Pair(7, specs, scheduler=PrefixAwareScheduler, additional=additional))


def run(pair: Pair, rounds: int = 1) -> None:
    """Until all requests have ended. Between rounds, engines sleep."""
    try:
        for number in range(rounds):
            assert all(engine.sleep() for engine in pair.engines if number)
            serve(pair, f"round {number}")
        for engine in pair.engines:
            assert engine.wrong == []
            engine.assert_nothing_held()
        for request in pair.asked.values():
            if request.status is RequestStatus.FINISHED_LENGTH_CAPPED:
                assert list(request.output_token_ids) == answered(request)
    finally:
        for engine in pair.engines:
            engine.close()


def serve(pair: Pair, name: str) -> None:
    """A round of requests, until all have ended."""
    arrived, stop = 0, time.monotonic() + 120
    while arrived < REQUESTS or pair.busy:
        assert time.monotonic() < stop, "it comes to no end"
        if arrived < REQUESTS and pair.chance.random() < 0.4:
            arrived += 1
            pair.ask(f"{name} r{arrived}")
        pair.follow()
        for engine in pair.engines:
            pair.disturb(engine)
            if pair.chance.random() < 0.8:
                engine.step()
