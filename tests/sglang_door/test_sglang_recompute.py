# SPDX-License-Identifier: Apache-2.0
"""A prompt whose KV did not come is asked for again, once, of a prefill engine that answers HTTP."""

import json
import secrets
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

pytest.importorskip("sglang.srt")

from sglang.srt.disaggregation.base.conn import KVPoll
from sglang.srt.sampling.sampling_params import SamplingParams
from sglang_door.door import CONFIG, ROOM, Engine, Pair, reach
from sglang_door.test_sglang_cache import TOKENS
from support.agents import until

from pd_connector.errors import HANDOFF_FAILED, Cause
from pd_connector.protocol.wire.peers import Peer, Source
from pd_connector.protocol.wire.prefill_server import PrefillServer
from pd_connector.sglang.failure import TransferError
from pd_connector.sglang.manager import Manager
from pd_connector.sglang.prefill_engines import LookupResult
from pd_connector.sglang.receiver import Receiver
from pd_connector.sglang.recompute import (
    SecondPrefill,
    SecondPrefills,
    completion_body,
    request_body,
)
from pd_connector.sglang.requests import room_after_retraction
from pd_connector.sglang.sender import Sender


class Recomputing(Engine):
    """A decode engine's manager that may ask again."""

    on_failure = "recompute"
    ranks = 1
    leads = True

    def compute_again(
        self, req: Any, address: str, cause: Cause, rest: dict[str, Any] | None = None
    ) -> SecondPrefill | None:
        self._config = msgspec.structs.replace(CONFIG, on_failure=self.on_failure)
        self._ranks = self.ranks
        if not hasattr(self, "_second_prefills"):
            self._second_prefills = SecondPrefills("secret", CONFIG)
        return Manager.compute_again(self, req, address, cause, rest)

    def submit_prefill_recompute(self, receiver: Any, payload: dict[str, Any]) -> None:
        Manager.submit_prefill_recompute(self, receiver, payload)

    def resume(
        self, body: dict[str, Any], address: str, server: PrefillServer | None
    ) -> SecondPrefill | None:
        self.rank.leads = self.leads
        self._second_prefills = SecondPrefills("secret", CONFIG)
        return Manager.resume(self, body, address, server)

    def look_up(self, address: str) -> LookupResult | None:
        return self.found


class Registry(BaseHTTPRequestHandler):
    """The registry and the API server of a prefill engine, on one port."""

    def do_GET(self) -> None:
        assert self.path.startswith("/route?prefill_dp_rank=-1")
        self._say(200, {"prefill_http_port": self.server.server_port})  # type: ignore[attr-defined]

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        assert self.headers["Authorization"] == "Bearer secret"
        if self.path != "/generate":  # vLLM's
            body |= {"path": self.path, "rank": self.headers["X-data-parallel-rank"]}
            body["bootstrap_room"] = int(body["kv_transfer_params"]["transfer_id"])
        self._say(self.server.prefill(body), {})  # type: ignore[attr-defined]

    def log_message(self, *args: object) -> None: ...

    def _say(self, status: int, content: dict[str, Any]) -> None:
        data = json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)


class Recomputed(Pair):
    """The pair, and what the prefill engine is asked over HTTP."""

    def __init__(self) -> None:
        super().__init__()
        self.d.agent.close()
        found = self.d.found
        self.d = Recomputing(produces=False)
        self.d.found = found
        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Registry)
        self.server.prefill = self.prefill  # type: ignore[attr-defined]
        self.asked: list[dict[str, Any]] = []
        self.status = 200
        self.then = 0  # the status after the next, if any
        self.drops = set[int]()  # rooms of requests that it forgets
        self.senders: list[Sender] = []
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def request(self, tokens: range = range(TOKENS)) -> Any:
        req = super().request(tokens)
        more = {
            "sampling_params": SamplingParams(max_new_tokens=50, temperature=0, min_new_tokens=7),
            "multimodal_inputs": None,
            "input_embeds": None,
            "priority": None,
            "custom_logit_processor": None,
            "lora_id": None,
            "bootstrap_host": "127.0.0.1",
            "bootstrap_port": 8998,
        }
        return SimpleNamespace(**{**vars(req), **more, "output_ids": []})

    def receiver(self, req: Any) -> Receiver:
        receiver = Receiver(self.d, f"127.0.0.1:{self.server.server_port}", ROOM)
        receiver.bind(req)
        receiver.init(0)
        return receiver

    def prefill(self, body: dict[str, Any]) -> int:
        """What the prefill engine does when it is asked again."""
        self.asked.append(body)
        if body["bootstrap_room"] in self.drops:
            return 200
        if self.status != 200:
            found, self.status = self.status, self.then or self.status
            return found
        sender = Sender(self.p, "", body["bootstrap_room"])
        req = super().request()
        req.bootstrap_room = body["bootstrap_room"]
        sender.bind(req)
        sender.init(3, 1)
        self.senders.append(sender)  # before its KV can come: who clears the senders must find it
        self.send_all(sender, req)
        return 200

    def close(self) -> None:
        self.server.shutdown()
        self.server.server_close()
        if hasattr(self.d, "_second_prefills"):
            self.d._second_prefills.close()
        super().close()


@pytest.fixture
def pair() -> Iterator[Recomputed]:
    made = Recomputed()
    yield made
    made.close()


def reason(receiver: Receiver) -> str:
    reach(receiver.poll, KVPoll.Failed)
    with pytest.raises(TransferError) as caught:
        receiver.failure_exception()
    receiver.clear()
    return caught.value.failure_reason


def test_a_prefill_that_ended_early_is_asked_for_again(pair: Recomputed) -> None:
    first = pair.sender(Pair.request(pair))
    receiver = pair.receiver(pair.request())
    first.abort()
    reach(receiver.poll, KVPoll.WaitingForInput)
    receiver.send_metadata(pair.pages(pair.d, 3), 1)
    reach(receiver.poll, KVPoll.Success)
    assert int(pair.d.rank.buffers.output_ids[1, 0]) == 9
    assert int(pair.d.rank.buffers.bootstrap_room[1, 0]) == ROOM, "SGLang looks for its own room"
    (asked,) = pair.asked
    assert asked["input_ids"] == list(range(len(asked["input_ids"])))
    assert asked["bootstrap_room"] != ROOM
    assert asked["sampling_params"] == {"max_new_tokens": 1, "min_new_tokens": 1, "top_k": 1}
    until(lambda: all(s.poll() == KVPoll.Success for s in pair.senders), "its pages are free")
    receiver.clear()
    for sender in (first, *pair.senders):
        sender.clear()
    until(pair.idle, "nothing is left")


def test_pages_that_are_there_are_filled_by_the_second_attempt(pair: Recomputed) -> None:
    first = pair.sender(Pair.request(pair))
    receiver = pair.receiver(pair.request())
    first.send(pair.pages(pair.p)[:1], None, num_kv_tokens=16)
    reach(receiver.poll, KVPoll.WaitingForInput)
    receiver.send_metadata(pair.pages(pair.d, 3), 1)
    first.abort()
    reach(receiver.poll, KVPoll.Success)
    assert len(pair.asked) == 1


def test_the_replica_is_asked_that_the_new_room_names(
    pair: Recomputed, monkeypatch: pytest.MonkeyPatch
) -> None:
    pair.sender(Pair.request(pair)).abort()
    receiver = pair.receiver(pair.request())
    (peers,) = pair.d.found.replicas
    pair.d.found = LookupResult(((Peer(Source("127.0.0.1", 1, "other"), peers[0].shard),), peers))
    monkeypatch.setattr(secrets, "randbits", lambda bits: 4)  # room 5
    reach(receiver.poll, KVPoll.WaitingForInput)
    receiver.send_metadata(pair.pages(pair.d, 3), 1)
    reach(receiver.poll, KVPoll.Success)


def test_it_is_asked_once(pair: Recomputed) -> None:
    pair.status = 503
    pair.sender(Pair.request(pair)).abort()
    receiver = pair.receiver(pair.request())
    found = reason(receiver)
    assert "asked again: status 503" in found
    assert len(pair.asked) == 1
    until(pair.idle, "nothing is left")


@pytest.mark.parametrize("change", [("on_failure", "fail"), ("ranks", 2)])
def test_it_is_not_asked_where_that_is_not_wanted_or_not_possible(
    pair: Recomputed, change: tuple[str, Any]
) -> None:
    setattr(pair.d, *change)
    pair.sender(Pair.request(pair)).abort()
    assert reason(pair.receiver(pair.request()))
    assert not pair.asked


def test_other_tokens_are_not_asked_for_again(pair: Recomputed) -> None:
    sender, req = pair.sender(Pair.request(pair)), Pair.request(pair)
    pair.send_all(sender, req)
    receiver = pair.receiver(pair.request(range(5, 5 + TOKENS)))
    reach(receiver.poll, KVPoll.WaitingForInput)
    receiver.send_metadata(pair.pages(pair.d, 3), 1)
    assert "tokens" in reason(receiver)
    assert not pair.asked


@pytest.mark.parametrize(
    "spoil",
    [
        lambda req: setattr(req, "multimodal_inputs", object()),
        lambda req: setattr(req, "output_ids", [3]),
        lambda req: setattr(req, "lora_id", "a"),
    ],
    ids=["images", "answered in part", "adapter"],
)
def test_requests_that_ids_do_not_describe_are_not_asked_for_again(
    pair: Recomputed, spoil: Callable[[Any], None]
) -> None:
    req = pair.request()
    assert request_body(req, 5) is not None
    spoil(req)
    assert request_body(req, 5) is None


def retracted(pair: Recomputed) -> tuple[Receiver, dict[str, Any]]:
    """A request whose answer was begun when SGLang retracted it, and what SGLang would send to the prefill engine."""
    req = pair.request(range(TOKENS - 2))
    vars(req).update({"pd_rebootstrap_in_progress": True, "output_ids": [TOKENS - 2, TOKENS - 1]})
    tokens = [*req.origin_input_ids, *req.output_ids]
    payload = {"input_ids": tokens, "bootstrap_room": ROOM, "rid": "r", "priority": None}
    return pair.receiver(req), payload


def test_a_request_that_is_retracted_for_new_weights_goes_on(pair: Recomputed) -> None:
    """`pause_generation` with mode `retract`. Its first transfer has long ended, so this one has a room of its own."""
    receiver, payload = retracted(pair)
    assert receiver.poll() == KVPoll.WaitingForInput, "SGLang asks once the request has pages"
    receiver.send_metadata(pair.pages(pair.d, 3), 1)
    pair.d.submit_prefill_recompute(receiver, payload)
    reach(receiver.poll, KVPoll.Success)
    (asked,) = pair.asked
    assert asked["input_ids"] == list(range(TOKENS)), "the answer so far is a part of the prompt"
    assert asked.keys() == {"input_ids", "bootstrap_room"}
    assert asked["bootstrap_room"] != ROOM
    assert int(pair.d.rank.buffers.bootstrap_room[1, 0]) == ROOM, "SGLang looks for its own room"
    receiver.clear()
    for sender in pair.senders:
        reach(sender.poll, KVPoll.Success)
        sender.clear()
    until(pair.idle, "nothing is left")


def by_vllm(req: Any, pair: Recomputed, **named: Any) -> Any:
    """The request with a vLLM prefill engine, whose server the router has named."""
    named = {"url": f"http://127.0.0.1:{pair.server.server_port}", "rank": 3, **named}
    req.sampling_params.custom_params = {"pd_prefill_server": named}
    return req


def test_a_retracted_request_goes_on_with_a_vllm_prefill_engine(pair: Recomputed) -> None:
    """It has no registry of SGLang's: the router names its HTTP server."""
    receiver, payload = retracted(pair)
    by_vllm(receiver._req, pair)
    payload["sampling_params"] = {"max_new_tokens": 1, "top_k": 1, "temperature": 1.0}
    receiver.send_metadata(pair.pages(pair.d, 3), 1)
    pair.d.submit_prefill_recompute(receiver, payload)
    reach(receiver.poll, KVPoll.Success)
    (asked,) = pair.asked
    assert (asked["path"], asked["rank"]) == ("/v1/completions", "3")
    assert asked["prompt"] == list(range(TOKENS))
    assert (asked["max_tokens"], asked["temperature"]) == (1, 0)
    receiver.clear()
    for sender in pair.senders:
        reach(sender.poll, KVPoll.Success)
        sender.clear()
    until(pair.idle, "nothing is left")


def test_kv_that_did_not_come_is_computed_again_by_vllm(pair: Recomputed) -> None:
    pair.sender(Pair.request(pair)).abort()
    receiver = pair.receiver(by_vllm(pair.request(), pair, rank=None))
    reach(receiver.poll, KVPoll.WaitingForInput)
    receiver.send_metadata(pair.pages(pair.d, 3), 1)
    reach(receiver.poll, KVPoll.Success)
    (asked,) = pair.asked
    assert (asked["path"], asked["rank"]) == ("/v1/completions", None)


@pytest.mark.parametrize(
    ("url", "problem"),
    [
        ("http://10.1.2.3:8000", "not within"),
        ("https://127.0.0.1:1", "must be http://host:port"),
        ("http://127.0.0.1:1/v1", "must be http://host:port"),
        ("http://127.0.0.1:port", "port"),
    ],
)
def test_no_other_server_is_asked_than_a_peers(pair: Recomputed, url: str, problem: str) -> None:
    receiver, payload = retracted(pair)
    by_vllm(receiver._req, pair, url=url)
    payload["sampling_params"] = {"max_new_tokens": 1}
    receiver.send_metadata(pair.pages(pair.d, 3), 1)
    pair.d.submit_prefill_recompute(receiver, payload)
    assert problem in reason(receiver)
    assert not pair.asked


def test_a_vllm_engine_whose_server_no_router_names_is_named_as_that(pair: Recomputed) -> None:
    receiver, payload = retracted(pair)
    receiver.bootstrap_addr = f"127.0.0.1:{pair.p.agent.port}"
    receiver.send_metadata(pair.pages(pair.d, 3), 1)
    pair.d.submit_prefill_recompute(receiver, payload)
    assert "the router has not named its HTTP server" in reason(receiver)


def test_vllm_is_asked_for_the_same_first_token() -> None:
    sampling = {"temperature": 0.5, "top_k": 1 << 30, "sampling_seed": 7, "min_new_tokens": 1}
    body = {"input_ids": [1], "sampling_params": sampling, "bootstrap_room": 5, "priority": 2}
    asked = completion_body({**body, "cache_salt": "s", "return_logprob": True})
    assert asked.pop("kv_transfer_params")["transfer_id"] == "5"
    assert asked == {
        "prompt": [1],
        "max_tokens": 1,
        "stream": False,
        "temperature": 0.5,
        "seed": 7,
        "min_tokens": 1,
        "cache_salt": "s",
        "priority": 2,
    }


@pytest.mark.parametrize(("temperature", "asks"), [(0, True), (1, False)])
def test_a_sampled_token_whose_logprob_is_told_elsewhere_is_not_chosen_again(
    pair: Recomputed, temperature: float, asks: bool
) -> None:
    """The log probability in a vLLM prefill engine's first answer is of the token that was chosen then."""
    req = by_vllm(pair.request(), pair)
    req.sampling_params = SamplingParams(
        temperature=temperature, custom_params=req.sampling_params.custom_params
    )
    req.return_logprob, req.logprob = True, SimpleNamespace(top_logprobs_num=1)
    second = SecondPrefills("secret", CONFIG)
    assert (second.ask(req, "127.0.0.1:1") is not None) is asks
    second.close()


def test_what_sglang_adds_for_a_logit_processor_is_not_sent(pair: Recomputed) -> None:
    req = pair.request()
    req.sampling_params = SamplingParams(custom_params={"qos": "a", "__req__": req})
    body = request_body(req, 5)
    assert body is not None
    assert json.loads(json.dumps(body))["sampling_params"]["custom_params"] == {"qos": "a"}


def test_a_handoff_that_failed_says_so_to_the_router(pair: Recomputed) -> None:
    """The router then lets the decode engine go on, which hears of it as well."""
    sender, req = pair.sender(Pair.request(pair)), Pair.request(pair)
    pair.send_all(sender, req)
    receiver = pair.receiver(pair.request(range(5, 5 + TOKENS)))
    reach(receiver.poll, KVPoll.WaitingForInput)
    receiver.send_metadata(pair.pages(pair.d, 3), 1)
    reason(receiver)
    reach(sender.poll, KVPoll.Failed)
    with pytest.raises(TransferError, match=HANDOFF_FAILED):
        sender.failure_exception()


def test_a_prefill_that_was_aborted_says_so_as_well(pair: Recomputed) -> None:
    sender = pair.sender(Pair.request(pair))
    sender.abort()
    with pytest.raises(TransferError, match=HANDOFF_FAILED):
        sender.failure_exception()


def test_a_prefill_engines_own_error_does_not(pair: Recomputed) -> None:
    sender = pair.sender(Pair.request(pair))
    sender.fail(Cause.INTERNAL, "a defect")
    with pytest.raises(TransferError) as caught:
        sender.failure_exception()
    assert HANDOFF_FAILED not in str(caught.value)


@pytest.mark.parametrize("told_by", ["the server", "the transfer"])
def test_a_retracted_request_is_asked_for_again_as_any_other(
    pair: Recomputed, told_by: str
) -> None:
    """Its stream has begun, so no router can give it to another engine."""
    receiver, payload = retracted(pair)
    receiver.send_metadata(pair.pages(pair.d, 3), 1)
    if told_by == "the server":
        pair.status = 500
        pair.then = 200
    else:
        first = Sender(pair.p, "", int(receiver._transfer))
        first.bind(Pair.request(pair))
        first.abort()
        first.clear()
        pair.drops = {int(receiver._transfer)}
    pair.d.submit_prefill_recompute(receiver, payload)
    reach(receiver.poll, KVPoll.Success)
    until(lambda: len(pair.asked) == 2, "both requests have come")
    assert [asked["input_ids"] for asked in pair.asked] == [list(range(TOKENS))] * 2
    rooms = [asked["bootstrap_room"] for asked in pair.asked]
    assert len({ROOM, *rooms}) == 3
    assert int(pair.d.rank.buffers.bootstrap_room[1, 0]) == ROOM, "SGLang looks for its own room"
    receiver.clear()
    for sender in pair.senders:
        reach(sender.poll, KVPoll.Success)
        sender.clear()
    until(pair.idle, "nothing is left")


def test_a_retracted_request_that_the_prefill_engine_refuses_says_so(pair: Recomputed) -> None:
    pair.status = 400
    receiver, payload = retracted(pair)
    receiver.send_metadata(pair.pages(pair.d, 3), 1)
    pair.d.submit_prefill_recompute(receiver, payload)
    assert "retracted, and not computed again: status 400" in reason(receiver)
    until(pair.idle, "nothing is left")


@pytest.mark.parametrize("more", [{"lora_id": "a"}, {"multimodal_inputs": object()}])
def test_what_token_ids_do_not_tell_is_not_computed_again(
    pair: Recomputed, more: dict[str, Any]
) -> None:
    receiver, payload = retracted(pair)
    vars(receiver._req).update(more)
    receiver.send_metadata(pair.pages(pair.d, 3), 1)
    pair.d.submit_prefill_recompute(receiver, payload)
    assert "images or an adapter" in reason(receiver)
    assert not pair.asked


def test_one_rank_asks_for_all(pair: Recomputed) -> None:
    pair.d.leads = False
    receiver, payload = retracted(pair)
    receiver.send_metadata(pair.pages(pair.d, 3), 1)
    pair.d.submit_prefill_recompute(receiver, payload)
    assert receiver.poll() == KVPoll.Transferring
    assert not pair.asked
    receiver.abort()
    receiver.clear()


def test_each_retraction_has_a_room_that_all_ranks_find_and_the_same_replica_has() -> None:
    ranks = [SimpleNamespace(bootstrap_room=ROOM) for _ in range(2)]
    rooms = [[room_after_retraction(rank) for _ in range(3)] for rank in ranks]
    assert rooms[0] == rooms[1]
    assert len({ROOM, *rooms[0]}) == 4
    assert {room % replicas for room in rooms[0] for replicas in (2, 3, 8)} == {
        ROOM % replicas for replicas in (2, 3, 8)
    }
    assert all(0 < room < 1 << 63 for room in rooms[0])
