# SPDX-License-Identifier: Apache-2.0
"""Pairs of engines of two kinds: what is asked of whom, and which clock is read."""

from __future__ import annotations

import json
import threading
import time

import pytest

from pd_bench.handoff.cross import LINK, CrossPair
from pd_bench.handoff.pair import PairSetup
from pd_bench.report import BenchError
from pd_connector.config import Config
from pd_connector.protocol.wire.params import decode_params, parse_address, prefill_params
from pd_connector.tools.launch import Samples

TOLD = {
    "remote_engine_id": "e",
    "remote_host": "198.19.0.1",
    "remote_port": 7000,
    "remote_ranks": [["198.19.0.1", 7000, 0, 8, 0]],
    "tp_size": 1,
}
PREFILL_S = 0.1


class FakeClient:
    """Answers as both kinds of engines do."""

    def __init__(self, told=TOLD) -> None:
        self.bodies: list[dict] = []
        self.taken = threading.Event()
        self.ended = 0.0
        self._told = told

    def get(self, path):
        assert path == "/server_info"
        return json.dumps({"internal_states": [{"pd_connector": self._told}]})

    def post(self, path, body):
        if body.get("kv_transfer_params", {}).get("describe"):
            return {"kv_transfer_params": self._told}
        self.bodies.append(body)
        time.sleep(PREFILL_S)
        self.ended = time.time()
        if path == "/generate":  # SGLang's answer comes when its KV was taken
            assert self.taken.wait(30)
        return {"meta_info": {"prefill_finished_time": self.ended}}

    def stream(self, path, body):
        self.bodies.append(body)
        time.sleep(2 * PREFILL_S)
        self.taken.set()
        if path == "/generate":
            yield from ({"text": "a"}, {"text": "ab"})
        else:
            yield from ({"choices": [{"text": letter}]} for letter in "ab")


@pytest.fixture
def pair_of(tmp_path, monkeypatch):
    """A pair whose engines are not started, with clients that answer."""
    monkeypatch.setattr("pd_connector.tools.launch.sglang.sglang_python", lambda: "python")
    stage = PairSetup("model", 4096, tmp_path, ("--load-format", "dummy"), {}, None)

    def make(name: str, **options):
        contenders = {**LINK.baselines, **LINK.ours}
        pair = CrossPair.of(contenders[name], stage)
        prefill, decode = FakeClient(**options), FakeClient()
        prefill.taken = decode.taken
        for engine, client in zip(pair.engines, (prefill, decode), strict=True):
            monkeypatch.setattr(engine, "client", client)
        return pair, prefill, decode

    return make


@pytest.mark.parametrize("name", [*LINK.baselines, *LINK.ours])
def test_a_handoff_is_from_the_end_of_the_prefill_to_the_first_token(pair_of, name):
    pair, prefill, _ = pair_of(name)
    begun = time.time()
    run = pair.run([5, 6], "salt")
    assert run.text == "ab"
    assert run.prefill_s >= PREFILL_S
    if "bootstrap_room" in prefill.bodies[0]:
        assert run.prefill_s <= prefill.ended - begun, "as SGLang tells it"
    assert run.prefill_s + run.handoff_s >= 2 * PREFILL_S


def test_an_sglang_engine_fetches_from_a_rank_of_vllms(pair_of):
    pair, prefill, decode = pair_of("vLLM to SGLang")
    pair.run([5, 6], "salt")
    (to_p,), (to_d,) = prefill.bodies, decode.bodies
    assert to_p["kv_transfer_params"] == prefill_params(str(to_d["bootstrap_room"]))
    assert (to_d["bootstrap_host"], to_d["bootstrap_port"]) == ("198.19.0.1", 7000)


def test_a_vllm_engine_is_told_the_ranks_of_sglangs(pair_of):
    pair, prefill, decode = pair_of("SGLang to vLLM")
    pair.run([5, 6], "salt")
    (to_p,), (to_d,) = prefill.bodies, decode.bodies
    address = parse_address(TOLD)
    assert address is not None
    assert to_d["kv_transfer_params"] == decode_params(address, str(to_p["bootstrap_room"]))
    assert to_p["bootstrap_port"] == pair.engines[0].bootstrap_port


def test_an_engine_that_does_not_tell_where_it_hands_over_is_named(pair_of):
    pair, _, _ = pair_of("vLLM to SGLang", told=None)
    with pytest.raises(BenchError, match="vLLM to SGLang prefill does not report"):
        pair.run([5], "salt")


def test_a_failed_transfer_is_no_measurement(pair_of, monkeypatch):
    pair, _, _ = pair_of("SGLang to vLLM")
    told = [Samples(), Samples.parse('pd_connector:failed_transfers_total{cause="stalled"} 1\n')]
    monkeypatch.setattr(pair.engines[1], "metrics", lambda: told.pop(0))
    pair.begin()
    with pytest.raises(BenchError, match="failed_transfers"):
        pair.check()


def test_the_config_is_one_that_the_connector_takes():
    for contender in (*LINK.baselines.values(), *LINK.ours.values()):
        assert Config.load(contender.config, {}).codec == "raw"
