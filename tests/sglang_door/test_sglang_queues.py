# SPDX-License-Identifier: Apache-2.0
"""One request on each side, as SGLang's queues drive it, between real agents: every state it may be
left in, and what is left behind."""

from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

pytest.importorskip("sglang.srt")

import torch
from sglang.srt.disaggregation.base.conn import KVPoll
from sglang.srt.disaggregation.utils import MetadataBuffers
from sglang_door.test_sglang_cache import (
    HEADS,
    SLIDING_WINDOW,
    TOKENS,
    full_attention,
    slots_of,
    with_windows,
)
from support.agents import until

from pd_connector.agent.agent import Agent
from pd_connector.config import Config
from pd_connector.errors import Cause
from pd_connector.protocol.last_words import FIRST_TOKEN
from pd_connector.protocol.peers import Peer, Source
from pd_connector.sglang.adapters import Adapters
from pd_connector.sglang.cache import describe_cache, own_shard
from pd_connector.sglang.failure import TransferError
from pd_connector.sglang.manager import Manager
from pd_connector.sglang.prefill_engines import Found
from pd_connector.sglang.receiver import Receiver
from pd_connector.sglang.sender import Sender

ROOM = 77
CONFIG = Config(transports=("tcp",), connect_timeout_s=5.0, lease_s=30.0)


class Engine(Manager):
    """A manager without SGLang's scheduler around it."""

    def __init__(self, *, produces: bool, page_size: int = 16, pool: Any = None) -> None:
        self.pool = pool or full_attention(page_size)
        self.page_size = page_size
        cache = describe_cache(
            self.pool, HEADS, own_shard(self.pool, 0, 1), sliding_window=SLIDING_WINDOW
        )
        self._windows = pool is not None
        self._adapters = Adapters(SimpleNamespace(lora_manager=None))
        self.agent = Agent(
            CONFIG,
            "p" if produces else "d",
            b"model",
            cache,
            produces=produces,
            consumes=not produces,
            tells=(FIRST_TOKEN,) if produces else (),
            needs=() if produces else (FIRST_TOKEN,),
        )
        self.buffers = MetadataBuffers(4, 16, torch.float32, 0)
        self.found = Found(())
        self.forgotten: list[str] = []
        self._told = {}
        self._watched = set()
        self._scheduler = SimpleNamespace(
            device="cpu",
            token_to_kv_pool_allocator=SimpleNamespace(
                translate_swa_indices_for_transfer=lambda slots: (
                    self.pool.translate_loc_from_full_to_swa(slots)
                )
            ),
        )

    def prefill_engine(self, address: str) -> Found:
        return self.found

    def forget_prefill_engine(self, address: str) -> None:
        self.forgotten.append(address)


class Pair:
    def __init__(
        self, page_sizes: tuple[int, int] = (16, 16), pools: tuple[Any, Any] = (None, None)
    ) -> None:
        self.p = Engine(produces=True, page_size=page_sizes[0], pool=pools[0])
        self.d = Engine(produces=False, page_size=page_sizes[1], pool=pools[1])
        peer = Peer(Source("127.0.0.1", self.p.agent.port, "p"), own_shard(self.p.pool, 0, 1))
        self.d.found = Found((peer,))

    def request(self, tokens: range = range(TOKENS)) -> Any:
        return SimpleNamespace(
            rid="r",
            origin_input_ids=list(tokens),
            cache_salt=None,
            lora_id=None,
            return_logprob=False,
            metadata_buffer_index=1,
            output_ids=[9],
            cached_tokens=0,
            cached_tokens_device=0,
            cached_tokens_host=0,
            cached_tokens_storage=0,
            get_mm_token_counts=lambda: (0, 0, 0),
            return_sampling_mask=False,
            hidden_states_tensor=None,
            bootstrap_room=ROOM,
        )

    def sender(self, req: Any) -> Sender:
        sender = Sender(self.p, "", ROOM)
        sender.bind(req)
        sender.init(3, 1)
        return sender

    def receiver(self, req: Any) -> Receiver:
        receiver = Receiver(self.d, "127.0.0.1:8998", ROOM)
        receiver.bind(req)
        receiver.init(0)
        return receiver

    def pages(self, engine: Engine, first: int = 1) -> np.ndarray[Any, Any]:
        count = -(-TOKENS // engine.page_size)
        return np.arange(first, first + count, dtype=np.int32)

    def send_all(self, sender: Sender, req: Any) -> None:
        """The prompt in two chunks, as SGLang sends them."""
        pages, size = self.pages(self.p), self.p.page_size
        first = 16 // size
        sender.send(pages[:first], None, num_kv_tokens=16)
        self.p.buffers.set_buf(req)
        sender.send(pages[first:], [], num_kv_tokens=TOKENS - 16)

    def close(self) -> None:
        self.p.agent.close()
        self.d.agent.close()

    def idle(self) -> bool:
        names = ("leased_pages", "outgoing_transfers", "incoming_transfers", "landing_slots")
        gauges = [engine.agent.telemetry.gauges() for engine in (self.p, self.d)]
        held = any(g.get(name) for g in gauges for name in (*names, "send_slots"))
        return not held and not (self.p._watched or self.d._watched)


@pytest.fixture
def pair(request: pytest.FixtureRequest) -> Iterator[Pair]:
    made = Pair(getattr(request, "param", (16, 16)))
    yield made
    made.close()


def reach(poll: Callable[[], int], state: int) -> None:
    until(lambda: poll() == state, f"state {state}")


@pytest.mark.parametrize("pair", [(16, 16), (1, 16), (16, 1)], indirect=True)
def test_a_request_goes_through_both_engines(pair: Pair) -> None:
    req = pair.request()
    sender, receiver = pair.sender(req), pair.receiver(req)
    assert sender.poll() == KVPoll.WaitingForInput, "computing does not wait for the decode engine"
    assert receiver.poll() == KVPoll.Bootstrapping, "no pages are needed before KV comes"
    pair.send_all(sender, req)
    assert sender.poll() == KVPoll.Transferring
    reach(receiver.poll, KVPoll.WaitingForInput)
    receiver.send_metadata(pair.pages(pair.d), 2, [], decode_prefix_len=0)
    reach(receiver.poll, KVPoll.Success)
    reach(sender.poll, KVPoll.Success)
    assert int(pair.d.buffers.output_ids[2, 0]) == 9
    assert int(pair.d.buffers.bootstrap_room[2, 0]) == ROOM
    here = slots_of(pair.pages(pair.p).tolist(), pair.p.page_size)
    there = slots_of(pair.pages(pair.d).tolist(), pair.d.page_size)
    for ours, theirs in zip(pair.p.pool.k_buffer, pair.d.pool.k_buffer, strict=True):
        assert torch.equal(ours[here], theirs[there])
    sender.clear()
    receiver.clear()
    until(pair.idle, "idle")


@pytest.mark.parametrize("page_sizes", [(16, 16), (1, 16), (16, 1)])
def test_of_layers_with_a_window_only_the_window_passes(page_sizes: tuple[int, int]) -> None:
    """Their slots differ from those of other layers, and on both sides."""
    pools = with_windows(page_sizes[0], shift=16), with_windows(page_sizes[1], shift=48)
    pair = Pair(page_sizes, pools)
    try:
        req = pair.request()
        sender, receiver = pair.sender(req), pair.receiver(req)
        pair.send_all(sender, req)
        reach(receiver.poll, KVPoll.WaitingForInput)
        pages, size = pair.pages(pair.d), pair.d.page_size
        first = (TOKENS - SLIDING_WINDOW) // size
        window = pools[1].full_to_swa_index_mapping[torch.from_numpy(pages[first:]) * size] // size
        before = pools[1].swa_kv_pool.k_buffer[0].clone()
        receiver.send_metadata(pages, 2, [window.numpy()], decode_prefix_len=0)
        reach(receiver.poll, KVPoll.Success)
        here = slots_of(pair.pages(pair.p).tolist(), pair.p.page_size)
        there = slots_of(pages.tolist(), size)
        for part, kept in (("full_kv_pool", TOKENS), ("swa_kv_pool", SLIDING_WINDOW)):
            shifts = (0, 0) if kept == TOKENS else (16, 48)
            ours, theirs = (getattr(pool, part) for pool in pools)
            for name in ("k_buffer", "v_buffer"):
                for mine, other in zip(getattr(ours, name), getattr(theirs, name), strict=True):
                    assert torch.equal(
                        mine[here[-kept:] + shifts[0]], other[there[-kept:] + shifts[1]]
                    )
        untouched = there[: first * size] + 48
        assert torch.equal(pools[1].swa_kv_pool.k_buffer[0][untouched], before[untouched])
        reach(sender.poll, KVPoll.Success)
        sender.clear()
        receiver.clear()
        until(pair.idle, "idle")
    finally:
        pair.close()


def test_a_page_that_its_window_has_passed_is_no_page() -> None:
    pair = Pair(pools=(with_windows(16), with_windows(16)))
    try:
        pair.p.pool.full_to_swa_index_mapping[16:32] = 0  # as SGLang marks what it has given back
        assert pair.p.tables([1, 2]) == ((1, 2), (-1, 3))
    finally:
        pair.close()


def test_an_adapter_that_is_not_known_ends_its_request(pair: Pair) -> None:
    req = pair.request()
    req.lora_id = "nobody's"
    sender = pair.sender(req)
    assert sender.poll() == KVPoll.Failed
    with pytest.raises(TransferError, match="not loaded"):
        sender.failure_exception()


def test_what_the_decode_engine_has_is_not_fetched(pair: Pair) -> None:
    req = pair.request()
    sender, receiver = pair.sender(req), pair.receiver(req)
    pair.send_all(sender, req)
    reach(receiver.poll, KVPoll.WaitingForInput)
    before = pair.d.pool.k_buffer[0][16:32].clone()
    receiver.send_metadata(pair.pages(pair.d, 2)[:2], 2, [], decode_prefix_len=16)
    reach(receiver.poll, KVPoll.Success)
    assert torch.equal(
        pair.d.pool.k_buffer[0][32 : 32 + TOKENS - 16], pair.p.pool.k_buffer[0][32 : 16 + TOKENS]
    )
    assert torch.equal(pair.d.pool.k_buffer[0][16:32], before)


@pytest.mark.parametrize("when", ["bound", "chunk", "final"])
def test_a_prefill_that_is_aborted_gives_everything_back(pair: Pair, when: str) -> None:
    req = pair.request()
    sender, receiver = pair.sender(req), pair.receiver(req)
    if when == "chunk":
        sender.send(pair.pages(pair.p)[:1], None, num_kv_tokens=16)
    if when == "final":
        pair.send_all(sender, req)
    sender.abort()
    assert sender.poll() == KVPoll.Failed
    with pytest.raises(TransferError, match="aborted"):
        sender.failure_exception()
    if when == "chunk":  # it was told that KV comes, maybe, and asks for it
        until(lambda: receiver.poll() != KVPoll.Bootstrapping, "told")
    receiver.abort()
    receiver.clear()
    until(pair.idle, "idle")


@pytest.mark.parametrize("when", ["bound", "waiting", "loading"])
def test_a_decode_request_that_is_aborted_gives_everything_back(pair: Pair, when: str) -> None:
    req = pair.request()
    receiver = pair.receiver(req)
    sender = pair.sender(req)
    if when != "bound":
        sender.send(pair.pages(pair.p)[:1], None, num_kv_tokens=16)
        reach(receiver.poll, KVPoll.WaitingForInput)
    if when == "loading":
        receiver.send_metadata(pair.pages(pair.d), 2, [], decode_prefix_len=0)
    receiver.abort()
    assert receiver.poll() == KVPoll.Failed
    receiver.clear()
    pair.send_all(sender, req)
    reach(sender.poll, KVPoll.Failed)
    with pytest.raises(TransferError):
        sender.failure_exception()
    until(pair.idle, "idle")


@pytest.mark.parametrize("side", ["prefill", "decode"])
def test_a_rank_that_did_not_fail_itself_stops_when_another_did(pair: Pair, side: str) -> None:
    """SGLang takes the worst poll of all ranks, asks each rank why, and frees its pages."""
    req = pair.request()
    sender, receiver = pair.sender(req), pair.receiver(req)
    sender.send(pair.pages(pair.p)[:1], None, num_kv_tokens=16)
    reach(receiver.poll, KVPoll.WaitingForInput)
    receiver.send_metadata(pair.pages(pair.d), 2, [], decode_prefix_len=0)
    stopped = sender if side == "prefill" else receiver
    with pytest.raises(TransferError) as caught:
        stopped.failure_exception()
    assert caught.value.is_from_another_rank
    pages = pair.d.pool.k_buffer[0].clone()
    if side == "decode":
        pair.send_all(sender, req)
        reach(sender.poll, KVPoll.Failed)
        assert torch.equal(pair.d.pool.k_buffer[0], pages), "written to after it was given back"
        with pytest.raises(TransferError):
            sender.failure_exception()
    else:
        reach(receiver.poll, KVPoll.Failed)
    receiver.clear()
    until(pair.idle, "idle")


def test_other_tokens_are_refused_by_name(pair: Pair) -> None:
    req = pair.request()
    sender, receiver = pair.sender(req), pair.receiver(pair.request(range(1, TOKENS + 1)))
    pair.send_all(sender, req)
    reach(receiver.poll, KVPoll.WaitingForInput)
    receiver.send_metadata(pair.pages(pair.d), 2, [], decode_prefix_len=0)
    reach(receiver.poll, KVPoll.Failed)
    with pytest.raises(TransferError, match="tokens"):
        receiver.failure_exception()
    assert not int(pair.d.buffers.bootstrap_room[2, 0]), "no row is filled"


def test_an_engine_that_is_not_there_is_named_and_asked_for_anew(pair: Pair) -> None:
    req = pair.request()
    pair.d.found = Found((), (Cause.UNREACHABLE, "nobody there"))
    receiver = pair.receiver(req)
    assert receiver.poll() == KVPoll.Failed
    with pytest.raises(TransferError, match="unreachable: nobody there"):
        receiver.failure_exception()
    pair.d.found = Found((Peer(Source("127.0.0.1", 1, "p"), own_shard(pair.p.pool, 0, 1)),))
    receiver = pair.receiver(req)
    reach(receiver.poll, KVPoll.Failed)
    assert pair.d.forgotten == ["127.0.0.1:8998"]
    receiver.clear()
    until(pair.idle, "idle")


def test_no_exception_leaves_a_hook(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """SGLang would end the whole engine."""
    req = pair.request()
    sender, receiver = pair.sender(req), pair.receiver(req)
    broken = SimpleNamespace()
    monkeypatch.setattr(pair.p, "buffers", broken)
    sender.send(pair.pages(pair.p), [], num_kv_tokens=TOKENS)
    assert sender.poll() == KVPoll.Failed
    with pytest.raises(TransferError, match="internal"):
        sender.failure_exception()
    receiver.send_metadata(None, 2)  # type: ignore[arg-type]
    assert receiver.poll() == KVPoll.Failed
    receiver.clear()
    until(pair.idle, "idle")
