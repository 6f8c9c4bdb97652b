# SPDX-License-Identifier: Apache-2.0
"""A pair of SGLang engines: how they are started, what is asked of whom, and which clock is read."""

from __future__ import annotations

import json
import threading
import time
from importlib.metadata import distributions
from pathlib import Path

import pytest

from pd_bench.handoff import sglang
from pd_bench.handoff.nixl_host_memory import _host_memory, with_plugin
from pd_bench.handoff.pair import PairSetup
from pd_bench.handoff.receiving import TRANSFERS, measure_receiving
from pd_bench.handoff.sglang import LINK, LOCAL, SglangPair
from pd_bench.model import KV_BYTES_PER_TOKEN, kv_bytes_per_token, write_model
from pd_bench.netns import Namespace
from pd_bench.report import BenchError
from pd_connector.config import CONFIG_VARIABLE, Config
from pd_connector.tools.launch import Samples

PREFILL_S = KV_S = 0.2


class FakeEngine:
    """An engine that answers as SGLang's do; a prefill engine only when its KV has been taken."""

    def __init__(self, metrics: str = "", events=None) -> None:
        self.name, self.log_path, self.host = "fake", "fake.log", "127.0.0.1"
        self.namespace, self.bootstrap_port = None, 8998
        self.client = self
        self.bodies: list[dict] = []
        self.computed, self.taken = threading.Event(), threading.Event()
        self.ended = 0.0
        self._metrics = metrics
        self._events = events

    def post(self, path, body):
        assert path == "/generate"
        self.bodies.append(body)
        time.sleep(PREFILL_S)
        self.ended = time.time()
        self.computed.set()
        assert self.taken.wait(30)
        return {"meta_info": {"prefill_finished_time": self.ended}}

    def stream(self, path, body):
        self.bodies.append(body)
        assert self.computed.wait(30)
        time.sleep(KV_S)
        self.taken.set()
        yield from self._events or [{"text": "a"}, {"text": "ab"}]

    def metrics(self) -> Samples:
        return Samples.parse(self._metrics)


def fake_pair(**options) -> tuple[SglangPair, FakeEngine]:
    prefill, decode = FakeEngine(), FakeEngine(**options)
    prefill.computed, prefill.taken = decode.computed, decode.taken
    return SglangPair(LINK.ours["raw"], prefill, decode, "no folder"), prefill


def test_a_handoff_is_from_the_end_of_the_prefill_to_the_first_token():
    """Not from the prefill engine's answer, which comes when everything is over."""
    pair, prefill = fake_pair()
    begun = time.time()
    run = pair.run([5, 6, 7], "salt")
    assert run.text == "ab"
    assert PREFILL_S <= run.prefill_s <= prefill.ended - begun
    assert run.handoff_s >= KV_S
    (to_p,), (to_d,) = prefill.bodies, pair.engines[1].bodies
    assert to_p == to_d
    assert to_p["input_ids"] == [5, 6, 7]
    assert (to_p["bootstrap_host"], to_p["bootstrap_port"]) == ("127.0.0.1", 8998)


def test_an_error_and_a_failed_transfer_are_no_measurement():
    pair, _ = fake_pair(events=[{"error": {"message": "no KV"}}])
    with pytest.raises(BenchError, match="no KV"):
        pair.run([5], "salt")
    pair, _ = fake_pair()
    pair.begin()
    pair.check()
    pair.engines[1]._metrics = 'pd_connector:failed_transfers_total{cause="stalled"} 1\n'
    with pytest.raises(BenchError, match="failed_transfers"):
        pair.check()


class DecodingPair:
    """Brings ten tokens with each handoff, and uses a second of CPU time."""

    def __init__(self) -> None:
        self.used_s = 0.0
        self.times: list[float] = []
        self.prompts: list[list[int]] = []
        self.decodes = False

    def decoding(self, prompt):
        self.prompts.append(prompt)
        return self

    def __enter__(self):
        self.decodes = True
        return self.times

    def __exit__(self, *error) -> None:
        self.decodes = False

    def run(self, prompt, salt) -> None:
        self.used_s += 1.0
        if self.decodes:
            time.sleep(0.01)
            self.times += [0.0] * 10

    def cpu_seconds(self) -> float:
        return self.used_s

    def kv_gb(self, tokens: int) -> float:
        return tokens / 10


def test_cpu_time_is_counted_without_and_tokens_with_a_long_answer():
    pair = DecodingPair()
    found = measure_receiving(pair, [1] * 5, [2], 2)
    assert found.cpu_s_per_gb == (2.0, 2.0)
    assert all(0 < rate <= 10 / 0.01 for rate in found.tokens_per_s)
    assert len(pair.times) == 2 * TRANSFERS * 10
    assert pair.prompts == [[2]]


def test_engines_in_namespaces_meet_on_the_link_and_are_asked_from_outside(tmp_path, monkeypatch):
    monkeypatch.setattr(sglang, "sglang_python", lambda: "python")
    monkeypatch.setattr(sglang, "sglang_on_cpu", lambda python: True)
    monkeypatch.setattr("pd_connector.tools.launch.sglang.sglang_python", lambda: "python")
    monkeypatch.setattr("pd_connector.tools.launch.sglang.sglang_on_cpu", lambda python: True)
    sides = tuple(Namespace(n, f"198.19.0.{n}", f"198.18.0.{n}") for n in ("1", "2"))
    stage = PairSetup("model", 4096, tmp_path, (), {"PD_CONNECTOR_KEY": "k" * 32}, sides)
    prefill, decode = SglangPair.of(LINK.ours["raw page 1/64"], stage).engines
    for engine, side in ((prefill, sides[0]), (decode, sides[1])):
        environment, command = engine.environment(), engine.command()
        config = Config.load(json.loads(environment[CONFIG_VARIABLE]), {})
        assert config.peers == ("198.19.0.1",)
        assert config.model_id
        assert environment["PD_CONNECTOR_HOST"] == environment["SGLANG_HOST_IP"] == side.address
        assert command[command.index("--host") + 1] == "0.0.0.0"
        assert engine.base_url.startswith(f"http://{side.management}:")
    pages = [e.command()[e.command().index("--page-size") + 1] for e in (prefill, decode)]
    assert pages == ["1", "64"]
    baseline, _ = SglangPair.of(LINK.baselines["NIXL page 16"], stage).engines
    assert CONFIG_VARIABLE not in baseline.environment()
    assert str(tmp_path) in baseline.environment()["PYTHONPATH"]


def test_the_baselines_plugin_is_found_by_its_entry_point(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", "known")
    folder, known = with_plugin(tmp_path)["PYTHONPATH"].split(":")
    assert known == "known"
    (found,) = (d for d in distributions(path=[folder]) if d.entry_points)
    (entry,) = found.entry_points.select(group="sglang.srt.plugins")
    assert callable(entry.load())
    assert _host_memory(None, 3) == ["DRAM"] * 3


@pytest.mark.parametrize("ours", [*LINK.ours.values(), *LOCAL.ours.values()], ids=lambda c: c.name)
def test_every_contenders_config_is_one_that_the_connector_takes(ours):
    assert Config.load(ours.config, {}).codec == ours.params["codec"]


def test_kv_of_a_token_is_counted_from_the_models_config(tmp_path: Path):
    assert kv_bytes_per_token(write_model(tmp_path)) == KV_BYTES_PER_TOKEN
