# SPDX-License-Identifier: Apache-2.0
"""One request on each side, as SGLang's queues drive it, between real agents: every state it may be
left in, and what is left behind."""

import contextlib
from collections.abc import Iterator
from types import SimpleNamespace

import pytest

pytest.importorskip("sglang.srt")

import torch
from sglang.srt.disaggregation.base.conn import KVPoll
from sglang.srt.disaggregation.decode_hicache_mixin import (
    DecodePrefixMatch,
    HiCacheRestoreGatedKVReceiver,
    HiCacheRestoreResult,
)
from sglang_door.door import ROOM, Pair, reach
from sglang_door.test_sglang_cache import SLIDING_WINDOW, TOKENS, slots_of, with_windows
from support.agents import until

from pd_connector.agent.commands import Drop, Hold
from pd_connector.errors import Cause
from pd_connector.protocol.wire.peers import Peer, Source
from pd_connector.sglang.cache import own_shard
from pd_connector.sglang.failure import TransferError
from pd_connector.sglang.prefill_engines import LookupResult
from pd_connector.sglang.receiver import Receiver
from pd_connector.sglang.requests import transfer_of


@pytest.fixture
def pair(request: pytest.FixtureRequest) -> Iterator[Pair]:
    made = Pair(getattr(request, "param", (16, 16)))
    yield made
    made.close()


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
    assert int(pair.d.rank.buffers.output_ids[2, 0]) == 9
    assert int(pair.d.rank.buffers.bootstrap_room[2, 0]) == ROOM
    pair.assert_same_slots("k_buffer")
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
        pages, size = pair.pages(pair.d), pair.d.rank.pages.size
        first = (TOKENS - SLIDING_WINDOW) // size
        window = pools[1].full_to_swa_index_mapping[torch.from_numpy(pages[first:]) * size] // size
        before = pools[1].swa_kv_pool.k_buffer[0].clone()
        receiver.send_metadata(pages, 2, [window.numpy()], decode_prefix_len=0)
        reach(receiver.poll, KVPoll.Success)
        here = slots_of(pair.pages(pair.p).tolist(), pair.p.rank.pages.size)
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
        assert pair.p.rank.pages.tables([1, 2]) == ((1, 2), (-1, 3))
    finally:
        pair.close()


def test_an_adapter_that_is_not_known_ends_its_request_and_nothing_else(pair: Pair) -> None:
    """The engine waits for nothing, its agent goes on, and the decode engine is told."""
    receiver, req = pair.receiver(pair.request()), pair.request()
    req.lora_id = "nobody's"
    sender = pair.sender(req)
    assert sender.poll() == KVPoll.Failed
    reach(receiver.poll, KVPoll.Failed)
    with pytest.raises(TransferError, match="not loaded"):
        sender.failure_exception()
    receiver.clear()
    until(pair.idle, "idle")
    counted = pair.p.agent.telemetry.take()
    assert counted is None or ("agent_failures", ()) not in counted.counts


@pytest.mark.parametrize("told", [True, False], ids=["told", "negative control"])
@pytest.mark.parametrize(
    ("device", "host", "storage"),
    [(16, 0, 0), (0, 32, 0), (16, 16, 0), (0, 16, 16)],
    ids=["radix", "HiCache", "both", "HiCache's storage"],
)
def test_what_the_decode_engine_has_is_not_fetched(
    pair: Pair, device: int, host: int, storage: int, told: bool
) -> None:
    """Nor what SGLang restores from host memory or storage meanwhile: it tells of one prefix, in device
    memory or not. A request that is told of none has all of it fetched, over what is there."""
    match = DecodePrefixMatch(torch.arange(device), host, storage, None)
    prefix = match.decode_prefix_len if told else 0
    req = pair.request()
    sender, receiver = pair.sender(req), pair.receiver(req)
    pair.send_all(sender, req)
    reach(receiver.poll, KVPoll.WaitingForInput)
    held = slice(16, 16 + match.decode_prefix_len)
    before = pair.d.pool.k_buffer[0][held].clone()
    pages = pair.pages(pair.d)
    receiver.send_metadata(pages[prefix // 16 :], 2, [], decode_prefix_len=prefix)
    waiting = SimpleNamespace(
        kv_receiver=receiver, hicache_restore_status=HiCacheRestoreResult.PENDING
    )
    gated = HiCacheRestoreGatedKVReceiver(waiting)
    if match.needs_local_restore:
        reach(receiver.poll, KVPoll.Success)
        assert gated.poll() == KVPoll.Transferring, "what is restored is not there yet"
    waiting.hicache_restore_status = HiCacheRestoreResult.READY
    reach(gated.poll, KVPoll.Success)
    after = 16 + prefix
    assert torch.equal(
        pair.d.pool.k_buffer[0][after : 16 + TOKENS], pair.p.pool.k_buffer[0][after : 16 + TOKENS]
    )
    assert torch.equal(pair.d.pool.k_buffer[0][held], before) is told
    counted = pair.d.agent.telemetry.take()
    assert counted is not None
    page_bytes = sum(buffer[:16].nbytes for buffer in pair.d.pool.k_buffer) * 2
    assert counted.counts["received_bytes", ()] == (len(pages) - prefix // 16) * page_bytes


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


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_decode_engine_that_needs_nothing_fails_no_prefill(pair: Pair, when: str) -> None:
    """vLLM's computes the last token itself, and may have the others in its prefix cache. A prefill that
    failed for it would make a router give up the answer that is under way."""
    req = pair.request()
    sender, transfer = pair.sender(req), transfer_of(ROOM)
    if when == "after":
        pair.send_all(sender, req)
    pair.d.agent.submit(Hold("r", transfer, pair.d.found.replicas[0], watch=False))
    pair.d.agent.submit(Drop("r", Cause.NOT_NEEDED))
    if when == "before":
        past = pair.p.agent._loop.producer_side._producer._past
        until(lambda: past.is_unwanted(transfer), "cancelled")
        pair.send_all(sender, req)
    reach(sender.poll, KVPoll.Success)
    sender.clear()
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
    assert not int(pair.d.rank.buffers.bootstrap_room[2, 0]), "no row is filled"


@pytest.mark.parametrize("vocabulary", [9, 10])
def test_a_first_token_that_is_none_ends_its_request(pair: Pair, vocabulary: int) -> None:
    """The pair's is 9. SGLang would go on from it."""
    pair.d.rank.vocabulary = vocabulary
    req = pair.request()
    sender, receiver = pair.sender(req), pair.receiver(req)
    pair.send_all(sender, req)
    reach(receiver.poll, KVPoll.WaitingForInput)
    receiver.send_metadata(pair.pages(pair.d), 2, [], decode_prefix_len=0)
    if vocabulary == 10:
        reach(receiver.poll, KVPoll.Success)
        return
    reach(receiver.poll, KVPoll.Failed)
    with pytest.raises(TransferError, match=r"words: first token 9: .* vocabulary has 9"):
        receiver.failure_exception()
    assert not int(pair.d.rank.buffers.bootstrap_room[2, 0]), "no row is filled"


def test_an_engine_that_is_not_there_is_named_and_asked_for_anew(pair: Pair) -> None:
    req = pair.request()
    pair.d.found = LookupResult((), (Cause.UNREACHABLE, "nobody there"))
    receiver = pair.receiver(req)
    assert receiver.poll() == KVPoll.Failed
    with pytest.raises(TransferError, match="unreachable: nobody there"):
        receiver.failure_exception()
    pair.d.found = LookupResult(
        ((Peer(Source("127.0.0.1", 1, "p"), own_shard(pair.p.pool, 0, 1)),),)
    )
    receiver = pair.receiver(req)
    reach(receiver.poll, KVPoll.Failed)
    assert pair.d.forgotten == ["127.0.0.1:8998"]
    receiver.clear()
    until(pair.idle, "idle")


@pytest.mark.parametrize("replica", [-1, 1])
def test_a_replica_that_is_not_there_ends_the_request(pair: Pair, replica: int) -> None:
    """A client may name one (`disagg_prefill_dp_rank`)."""
    receiver = Receiver(pair.d, "127.0.0.1:8998", ROOM)
    receiver.bind(pair.request())
    receiver.init(replica)
    assert receiver.poll() == KVPoll.Failed
    with pytest.raises(TransferError, match=f"prefill replica {replica} of 1"):
        receiver.failure_exception()
    receiver.clear()
    until(pair.idle, "idle")


@pytest.mark.parametrize("room", [0, -1])
def test_a_prompt_that_never_fits_ends_at_once_and_frees_its_prefill(pair: Pair, room: int) -> None:
    """SGLang's queue would let it wait, and all that come after it: it wants room for an answer, too."""
    req = pair.request()
    admission, pages = pair.d.rank.admission, -(-TOKENS // pair.d.rank.pages.size)
    admission.page_size = pair.d.rank.pages.size
    admission.most_prompt_tokens = pages * pair.d.rank.pages.size + room
    sender, receiver = pair.sender(req), pair.receiver(req)
    if room == 0:  # it fits: the control
        assert receiver.poll() == KVPoll.Bootstrapping
        receiver.abort()
    else:
        assert receiver.poll() == KVPoll.Failed
        with pytest.raises(TransferError, match=f"no_room: a prompt of {TOKENS} tokens"):
            receiver.failure_exception()
    pair.send_all(sender, req)
    reach(sender.poll, KVPoll.Failed)
    for side in (sender, receiver):
        side.clear()
    until(pair.idle, "idle")


@pytest.mark.parametrize("page", [-1, 10**6, 2**31 - 1])
def test_pages_that_are_not_of_the_pool_end_their_request_alone(pair: Pair, page: int) -> None:
    req = pair.request()
    sender, receiver = pair.sender(req), pair.receiver(req)
    pair.p.rank.buffers.set_buf(req)
    pages = pair.pages(pair.p)
    pages[1] = page
    sender.send(pages, [], num_kv_tokens=TOKENS)
    until(lambda: receiver.poll() != KVPoll.Bootstrapping, "told")
    if receiver.poll() == KVPoll.WaitingForInput:
        receiver.send_metadata(pair.pages(pair.d), 2, [], decode_prefix_len=0)
    reach(receiver.poll, KVPoll.Failed)
    reach(sender.poll, KVPoll.Failed)
    for side in (sender, receiver):
        with pytest.raises(TransferError, match=r"\w+: "):
            side.failure_exception()
        side.clear()
    until(pair.idle, "idle")


def test_a_decode_engine_that_is_named_as_the_prefill_engine_says_so(pair: Pair) -> None:
    """A request that names the engine that it is sent to."""
    itself = Peer(Source("127.0.0.1", pair.d.agent.port, "d"), pair.d.shard)
    pair.d.found = LookupResult(((itself,),))
    receiver = pair.receiver(pair.request())
    reach(receiver.poll, KVPoll.Failed)
    with pytest.raises(TransferError, match=r"role|unreachable"):
        receiver.failure_exception()
    receiver.clear()
    until(pair.idle, "idle")


@pytest.mark.parametrize("first", ["decode", "prefill"])
def test_a_request_that_prefill_turns_away_does_not_keep_decode_waiting(
    pair: Pair, first: str
) -> None:
    """A prompt that is longer than its pool, for instance. SGLang makes no sender for it."""
    req = pair.request()
    if first == "prefill":
        pair.p.rank.refused(req)
    receiver = pair.receiver(req)
    if first == "decode":
        pair.p.rank.refused(req)
    reach(receiver.poll, KVPoll.Failed)
    with pytest.raises(TransferError, match="prefill_ended"):
        receiver.failure_exception()
    receiver.clear()
    until(pair.idle, "idle")


@pytest.mark.parametrize("end", ["clear", "abort", "failure_exception"])
def test_a_room_is_free_when_sglang_has_ended_its_request(pair: Pair, end: str) -> None:
    """Not before: a failure of one rank alone is not known to the others yet, and all must take the same
    requests."""
    req = pair.request()
    sender, receiver = pair.sender(req), pair.receiver(req)
    taken = [engine.rank.admission for engine in (pair.p, pair.d)]
    for side in (sender, receiver):
        side.fail(Cause.STALLED, "this rank alone")
    assert all(ROOM in admission._rooms for admission in taken)
    with contextlib.suppress(TransferError):
        getattr(sender, end)()
    receiver.clear()  # SGLang calls it whatever came before
    assert not any(admission._rooms for admission in taken)
    until(pair.idle, "idle")


def test_no_exception_leaves_a_hook(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """SGLang would end the whole engine."""
    req = pair.request()
    sender, receiver = pair.sender(req), pair.receiver(req)
    broken = SimpleNamespace()
    monkeypatch.setattr(pair.p.rank, "buffers", broken)
    sender.send(pair.pages(pair.p), [], num_kv_tokens=TOKENS)
    assert sender.poll() == KVPoll.Failed
    with pytest.raises(TransferError, match="internal"):
        sender.failure_exception()
    receiver.send_metadata(None, 2)  # type: ignore[arg-type]
    assert receiver.poll() == KVPoll.Failed
    receiver.clear()
    until(pair.idle, "idle")
