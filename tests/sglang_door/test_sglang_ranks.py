# SPDX-License-Identifier: Apache-2.0
"""Two ranks of an engine that disagree. SGLang takes the worst poll of all ranks, asks each rank why,
and gives the request's pages back on all of them: from then on no rank's agent may touch them."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

pytest.importorskip("sglang.srt")

import torch
from sglang.srt.disaggregation.base.conn import KVPoll
from sglang_door.door import ROOM, Engine, make_request, reach
from sglang_door.test_sglang_cache import TOKENS
from support.agents import until

from pd_connector.errors import Cause
from pd_connector.protocol.wire.peers import Peer, Source
from pd_connector.sglang.failure import TransferError
from pd_connector.sglang.prefill_engines import LookupResult
from pd_connector.sglang.receiver import Receiver
from pd_connector.sglang.sender import Sender

PAGES = np.arange(1, 1 + -(-TOKENS // 16), dtype=np.int32)
GAUGES = ("leased_pages", "outgoing_transfers", "incoming_transfers", "landing_slots", "send_slots")


class Ranks:
    """A prefill engine and a decode engine with these numbers of ranks, and one request on all of them."""

    def __init__(self, prefill: int, decode: int) -> None:
        self.prefill = [Engine(produces=True, rank=(n, prefill)) for n in range(prefill)]
        self.decode = [Engine(produces=False, rank=(n, decode)) for n in range(decode)]
        peers = tuple(Peer(Source("127.0.0.1", e.agent.port, "p"), e.shard) for e in self.prefill)
        self.request = make_request()
        self.senders, self.receivers = [], []
        for engine in self.prefill:
            sender = Sender(engine, "", ROOM)
            sender.bind(self.request)
            sender.init(len(PAGES), 1)
            self.senders.append(sender)
        for engine in self.decode:
            engine.found = LookupResult((peers,))
            receiver = Receiver(engine, "127.0.0.1:8998", ROOM)
            receiver.bind(self.request)
            receiver.init(0)
            self.receivers.append(receiver)

    def send_first(self) -> None:
        for sender in self.senders:
            sender.send(PAGES[:1], None, num_kv_tokens=16)

    def send_last(self) -> None:
        for engine, sender in zip(self.prefill, self.senders, strict=True):
            engine.rank.buffers.set_buf(self.request)
            sender.send(PAGES[1:], [], num_kv_tokens=TOKENS - 16)

    def load(self) -> None:
        for receiver in self.receivers:
            reach(receiver.poll, KVPoll.WaitingForInput)
            receiver.send_metadata(PAGES, 2, [], decode_prefix_len=0)

    def fail_all(self, side: list[Any], first: int) -> None:
        """One rank fails; SGLang asks all of them, and frees what they hold."""
        side[first].fail(Cause.STALLED, "this rank alone")
        assert min(rank.poll() for rank in side) == KVPoll.Failed
        for place, rank in enumerate(side):
            with pytest.raises(TransferError) as caught:
                rank.failure_exception()
            # Another rank may have been told by its peer meanwhile.
            assert place != first or not caught.value.is_from_another_rank
            rank.clear()

    def pages(self) -> list[torch.Tensor]:
        """Everything in the decode engine's pools."""
        return [
            buffer.clone()
            for engine in self.decode
            for buffer in (*engine.pool.k_buffer, *engine.pool.v_buffer)
        ]

    def idle(self) -> bool:
        engines = [*self.prefill, *self.decode]
        held = (e.agent.telemetry.gauges().get(name) for e in engines for name in GAUGES)
        return not any(held) and not any(e.rank.outcomes.watched for e in engines)

    def close(self) -> None:
        for engine in (*self.prefill, *self.decode):
            engine.agent.close()


@pytest.fixture
def ranks(request: pytest.FixtureRequest) -> Iterator[Ranks]:
    made = Ranks(*request.param)
    yield made
    made.close()


@pytest.mark.parametrize("first", [0, 1])
@pytest.mark.parametrize("when", ["held", "told", "loading", "landed"])
@pytest.mark.parametrize("ranks", [(1, 2)], indirect=True)
def test_a_decode_rank_fails_alone(ranks: Ranks, when: str, first: int) -> None:
    if when != "held":
        ranks.send_first()
        for receiver in ranks.receivers:
            reach(receiver.poll, KVPoll.WaitingForInput)
    if when in ("loading", "landed"):
        ranks.load()
    if when == "landed":
        ranks.send_last()
        reach(ranks.receivers[1 - first].poll, KVPoll.Success)
    ranks.fail_all(ranks.receivers, first)
    pages = ranks.pages()
    if when != "landed":
        ranks.send_last()
    sender = ranks.senders[0]
    until(lambda: sender.poll() in (KVPoll.Failed, KVPoll.Success), "the end of the prefill")
    assert when == "landed" or sender.poll() == KVPoll.Failed
    sender.clear()
    until(ranks.idle, "idle")
    for before, after in zip(pages, ranks.pages(), strict=True):
        assert torch.equal(before, after), "written to after it was given back"


@pytest.mark.parametrize("first", [0, 1])
@pytest.mark.parametrize("when", ["bound", "chunk", "loading", "final"])
@pytest.mark.parametrize("ranks", [(2, 1), (2, 2)], indirect=True)
def test_a_prefill_rank_fails_alone(ranks: Ranks, when: str, first: int) -> None:
    if when != "bound":
        ranks.send_first()
    if when in ("loading", "final"):
        ranks.load()
    if when == "final":
        for engine, sender in zip(ranks.prefill, ranks.senders, strict=True):
            if sender is not ranks.senders[first]:
                engine.rank.buffers.set_buf(ranks.request)
                sender.send(PAGES[1:], [], num_kv_tokens=TOKENS - 16)
    ranks.fail_all(ranks.senders, first)
    ends = [the_end(receiver, when) for receiver in ranks.receivers]
    assert min(ends) == KVPoll.Failed
    for receiver, end in zip(ranks.receivers, ends, strict=True):
        filled = int(receiver.kv_mgr.rank.buffers.bootstrap_room[2, 0])
        assert bool(filled) == (end == KVPoll.Success), "a row is filled with success alone"
        with pytest.raises(TransferError):
            receiver.failure_exception()
        receiver.clear()
    until(ranks.idle, "idle")


def the_end(receiver: Receiver, when: str) -> int:
    """How it ends on this rank. A rank that has all of its own part knows of no failure."""
    if when == "chunk":
        until(lambda: receiver.poll() != KVPoll.Bootstrapping, "told")
    if receiver.poll() == KVPoll.WaitingForInput:
        receiver.send_metadata(PAGES, 2, [], decode_prefix_len=0)
    until(lambda: receiver.poll() in (KVPoll.Failed, KVPoll.Success), "its end")
    return receiver.poll()
