# SPDX-License-Identifier: Apache-2.0
"""One request through a pair: what is asked of whom, and which times are refused."""

from __future__ import annotations

import threading

import pytest
from support.bench import FakeTokenizer

from pd_bench.handoff.contender import Contender
from pd_bench.handoff.pair import Prompts
from pd_bench.handoff.vllm import VllmPair
from pd_bench.report import BenchError
from pd_connector.kv.geometry import Shard
from pd_connector.protocol.wire.params import ProducerAddress
from pd_connector.protocol.wire.peers import Peer, Source
from pd_connector.tools.launch import Samples


def test_prompts_are_of_exact_length_and_made_of_the_models_own_tokens():
    prompts = Prompts(FakeTokenizer())
    found = [prompts.make(length) for length in (2, 33, 500)]
    assert [len(prompt) for prompt in found] == [2, 33, 500]
    assert all(chr(token).isprintable() for prompt in found for token in prompt)


class FakeEngine:
    """An engine whose answers and metrics are given."""

    def __init__(self, params=None, metrics=()) -> None:
        self.name = "fake engine"
        self.log_path = "fake.log"
        self.base_url = f"http://{id(self)}"
        self.client = self
        self.bodies: list[dict] = []
        self._params = params
        self._metrics = list(metrics)

    def model(self) -> str:
        return "fake"

    def post(self, path, body):
        self.bodies.append(body)
        return {"choices": [{"text": "a"}], "kv_transfer_params": self._params}

    def stream(self, path, body):
        self.bodies.append(body)
        yield {"choices": []}
        yield {"choices": [{"text": "a"}]}
        yield {"choices": [{"text": "b"}]}

    def metrics(self) -> Samples:
        return Samples.parse(self._metrics.pop(0))


def fetched(tokens: int) -> str:
    return f'vllm:prompt_tokens_by_source_total{{source="external_kv_transfer"}} {tokens}\n'


def test_a_run_plays_a_two_step_proxy():
    p, d = FakeEngine({"remote_host": "h"}), FakeEngine()
    run = VllmPair(Contender("x", "X"), p, d).run([5, 6, 7], "salt")
    assert run.text == "ab"
    (to_p,), (to_d,) = p.bodies, d.bodies
    assert to_p["kv_transfer_params"] == {
        "do_remote_decode": True,
        "do_remote_prefill": False,
        "remote_engine_id": None,
        "remote_block_ids": None,
        "remote_host": None,
        "remote_port": None,
    }
    assert to_p["max_tokens"] == 1
    assert to_d["kv_transfer_params"] == {"remote_host": "h"}
    for body in (to_p, to_d):
        assert (body["prompt"], body["cache_salt"], body["temperature"]) == ([5, 6, 7], "salt", 0)


def test_with_overlap_both_engines_are_asked_at_once_for_a_transfer_named_by_the_asker():
    address = ProducerAddress("e", (Peer(Source("h", 5, "e"), Shard(0, 2, 0, 1)),), "5ea1").fields()
    p, d = FakeEngine(address), FakeEngine()
    asked = threading.Barrier(2, timeout=30)
    ask_p, ask_d = p.post, d.stream

    def post(path, body):
        if not body["kv_transfer_params"].get("describe"):
            asked.wait()  # breaks unless the decode engine is asked before this is answered
        return ask_p(path, body)

    def stream(path, body):
        asked.wait()
        return ask_d(path, body)

    p.post, d.stream = post, stream
    run = VllmPair(Contender("x", "X", together=True), p, d).run([5, 6, 7], "salt")
    assert run.text == "ab"
    (probe, to_p), (to_d,) = p.bodies, d.bodies
    assert probe["kv_transfer_params"]["describe"]
    transfer = to_p["kv_transfer_params"]["transfer_id"]
    assert to_p["kv_transfer_params"]["do_remote_decode"]
    assert to_d["kv_transfer_params"] == {
        **address,
        "remote_request_id": transfer,
        "remote_block_ids": None,
        "do_remote_prefill": True,
        "do_remote_decode": False,
    }
    assert to_p["prompt"] == to_d["prompt"] == [5, 6, 7]


def test_an_engine_that_does_not_describe_itself_is_an_error():
    pair = VllmPair(
        Contender("x", "X", together=True), FakeEngine({"remote_host": "h"}), FakeEngine()
    )
    with pytest.raises(BenchError, match="does not describe itself"):
        pair.run([5], "salt")


def test_a_prefill_that_offers_nothing_is_an_error():
    with pytest.raises(BenchError, match="without kv_transfer_params"):
        VllmPair(Contender("x", "X"), FakeEngine(None), FakeEngine()).run([5, 6], "salt")


def test_a_pair_whose_prompts_all_arrived_passes():
    d = FakeEngine(metrics=[fetched(1000), fetched(1200)])
    pair = VllmPair(Contender("x", "X"), FakeEngine({"remote_host": "h"}), d)
    pair.begin()
    pair.run([1] * 200, "salt")
    pair.check()


@pytest.mark.parametrize(
    "after",
    [
        fetched(1100),
        fetched(1200) + 'pd_connector:failed_transfers_total{cause="stalled"} 1\n',
        fetched(1200) + "vllm:nixl_num_failed_transfers_total 1\n",
    ],
)
def test_a_pair_whose_prompts_were_computed_by_the_decode_engine_does_not(after):
    d = FakeEngine(metrics=[fetched(1000), after])
    pair = VllmPair(Contender("x", "X"), FakeEngine({"remote_host": "h"}), d)
    pair.begin()
    pair.run([1] * 200, "salt")
    with pytest.raises(BenchError, match="computed the rest itself"):
        pair.check()
