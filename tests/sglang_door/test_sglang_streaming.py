# SPDX-License-Identifier: Apache-2.0
"""Prefill steps as the decode engine hears of them: announced when they begin, and told layer by layer."""

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("sglang.srt")

import torch
from sglang.srt.disaggregation.base.conn import KVPoll
from sglang_door.door import ROOM, Pair, reach
from sglang_door.test_sglang_cache import TOKENS, slots_of
from support.agents import until

from pd_connector.sglang import streaming as module
from pd_connector.sglang.failure import TransferError
from pd_connector.sglang.requests import transfer_of
from pd_connector.sglang.sender import Sender
from pd_connector.sglang.streaming import Streaming


@pytest.fixture
def pair() -> Iterator[Pair]:
    made = Pair()
    yield made
    made.close()


def streaming(
    pair: Pair, monkeypatch: pytest.MonkeyPatch, *, layers: bool, loads: Any = None
) -> Streaming:
    """That of the prefill engine, without hooks in SGLang's pools."""
    hooks = SimpleNamespace(register=lambda *hook: None, apply_hooks=lambda: None)
    monkeypatch.setattr(module, "HookRegistry", hooks)
    monkeypatch.setattr(module, "MIN_STEP_TOKENS", 1)
    slots = slots_of(pair.pages(pair.p).tolist(), pair.p.rank.pages.size)[None, :]
    pool = SimpleNamespace(req_to_token=slots.to(torch.int32))
    kv = SimpleNamespace(layer_transfer_counter=loads, start_layer=0)
    return Streaming(pair.p.rank, SimpleNamespace(req_to_token_pool=pool), kv, layers=layers)


def batch_of(req: Any, sender: Any) -> Any:
    """A step that computes the whole prompt."""
    req.disagg_kv_sender, req.extend_end, req.prefix_len = sender, TOKENS, 0
    req.kv = SimpleNamespace(req_pool_idx=0)
    return SimpleNamespace(reqs=[req], forward_mode=SimpleNamespace(is_extend=lambda: True))


def watched(pair: Pair) -> bool:
    """Whether the decode engine has asked the prefill engine for the transfer."""
    transfers = pair.p.agent._loop.producer_side._producer._transfers
    found = transfers.get(transfer_of(ROOM))
    return found is not None and bool(found.watchers)


@pytest.mark.parametrize("layers", [False, True])
def test_the_transfer_is_open_before_the_prompt_is_computed(
    pair: Pair, monkeypatch: pytest.MonkeyPatch, layers: bool
) -> None:
    """When the prefill has ended, nobody waits for pages or for an answer to an opening."""
    req = pair.request()
    sender, receiver = pair.sender(req), pair.receiver(req)
    until(lambda: watched(pair), "asked")
    assert receiver.poll() == KVPoll.Bootstrapping, "nothing has begun"
    with streaming(pair, monkeypatch, layers=layers).step(batch_of(req, sender)):
        reach(receiver.poll, KVPoll.WaitingForInput)
        receiver.send_metadata(pair.pages(pair.d), 2, [], decode_prefix_len=0)
        streams = pair.p.agent._loop.producer_side._producer._transfers.get(transfer_of(ROOM))
        until(
            lambda: any(one.credits for one in list(streams.streams.values())), "slots are granted"
        )
        assert receiver.poll() == KVPoll.Transferring
    pair.send_all(sender, req)
    reach(receiver.poll, KVPoll.Success)
    reach(sender.poll, KVPoll.Success)
    pair.assert_same_slots("v_buffer")
    sender.clear()
    receiver.clear()
    until(pair.idle, "idle")


def test_a_layer_is_told_once_its_prefix_is_loaded(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SGLang writes a layer's new KV, and waits for the load of its prefix only when it attends."""
    req = pair.request()
    sender, receiver = pair.sender(req), pair.receiver(req)
    events: list[Any] = []
    loads = SimpleNamespace(wait_until=lambda layer: events.append(f"loaded {layer}"))
    steps = streaming(pair, monkeypatch, layers=True, loads=loads)
    steps._written(None, None, SimpleNamespace(layer_id=0))
    assert events == [], "no step of ours"
    with steps.step(batch_of(req, sender)), monkeypatch.context() as patched:
        patched.setattr(pair.p.agent, "submit", lambda command, **_: events.append(command))
        for layer in range(2):
            steps._written(None, None, SimpleNamespace(layer_id=layer))
    told = [event if isinstance(event, str) else event.stop_layer for event in events]
    assert told == ["loaded 0", 1, "loaded 1", 2]
    sender.abort()
    receiver.abort()
    receiver.clear()
    until(pair.idle, "idle")


def test_with_overlap_off_nothing_is_told_before_the_end(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pair.p.rank, "offers_early", False)
    req = pair.request()
    sender, receiver = pair.sender(req), pair.receiver(req)
    until(lambda: watched(pair), "asked")
    submitted: list[Any] = []
    with monkeypatch.context() as patched:
        patched.setattr(pair.p.agent, "submit", lambda command, **_: submitted.append(command))
        sender.send(pair.pages(pair.p)[:1], None, num_kv_tokens=16)
    assert not submitted
    pair.send_all(sender, req)
    reach(receiver.poll, KVPoll.WaitingForInput)
    receiver.send_metadata(pair.pages(pair.d), 2, [], decode_prefix_len=0)
    reach(receiver.poll, KVPoll.Success)
    reach(sender.poll, KVPoll.Success)


def test_a_step_that_cannot_be_told_ends_its_request_alone(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    req = pair.request()
    sender, receiver = pair.sender(req), pair.receiver(req)
    steps = streaming(pair, monkeypatch, layers=True)
    monkeypatch.setattr(Sender, "begin_step", lambda *args: 1 / 0)
    with steps.step(batch_of(req, sender)):
        pass
    assert sender.poll() == KVPoll.Failed
    with pytest.raises(TransferError, match="internal"):
        sender.failure_exception()
    receiver.abort()
    receiver.clear()
    until(pair.idle, "idle")


def test_requests_that_pass_no_kv_are_none_of_ours(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SGLang's health checks."""
    steps = streaming(pair, monkeypatch, layers=True)
    with steps.step(batch_of(pair.request(), object())):
        assert not steps._step
