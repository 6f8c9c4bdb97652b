# SPDX-License-Identifier: Apache-2.0
"""No consumer rank waits for a transfer that has ended, in whatever order ranks, messages and the end come. A
new request of the same name is served, and what is remembered of ended transfers is bounded."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from support.machines import CONFIG, ROUTES, identity_of

from pd_connector.errors import Cause
from pd_connector.protocol.producing import past_transfers
from pd_connector.protocol.producing.openings import Openings
from pd_connector.protocol.producing.outgoing import Action, Offer, Reply
from pd_connector.protocol.producing.past_transfers import PastTransfers
from pd_connector.protocol.producing.producer import Producer
from pd_connector.protocol.wire import messages

HALF = msgspec.structs.replace(CONFIG, lease_share=0.5)
PAGES = 2
TOKENS = 2 * PAGES
ENDINGS = ("evicted", "expired", "withdrawn", "given up", "model", "cancelled", "delivered")
PREFILL = ("not known", "announced", "begun", "ended")
MESSAGES = ("open", "watch", "cancel", "done")
Step = tuple[str, int]
"""A message, and the number of the rank that sends it."""


def offer(transfer: str, *, final: bool = True) -> Offer:
    table = (list(range(PAGES)),)
    tokens = TOKENS if final else TOKENS // 2
    identity = identity_of(transfer)
    return Offer(transfer, f"request {transfer}", table, identity, TOKENS, tokens, final)


@dataclass
class Ranks:
    """A producer, and the ranks of a consumer that want its transfer "a"."""

    count: int
    now: float = 0.0
    producer: Producer = field(default_factory=lambda: Producer(HALF, pages=2 * PAGES))
    waiting: set[int] = field(default_factory=set)

    def announce(self, prefill: str) -> None:
        if prefill != "not known":
            self.producer.expect("a", self.now)
        if prefill in ("begun", "ended"):
            self.take(self.producer.offer(offer("a", final=prefill == "ended"), self.now))

    def send(self, message: str, rank: int) -> list[messages.Message]:
        """Also what the rank is answered at once."""
        session = b"%d" % rank
        self.now += 0.01
        match message:
            case "open":
                actions = self.producer.open(session, self._opening(), ROUTES, self.now)
                self.waiting.add(rank)
            case "watch":
                actions = self.producer.watch(session, "a", self.now)
                self.waiting.add(rank)
            case "cancel":
                cause, readers = Cause.ABORTED, self.count
                actions = self.producer.cancel(session, "a", cause, self.now, readers)
                self.waiting.discard(rank)
            case "done":
                actions = self.producer.done(session, "a")
                self.waiting.discard(rank)
        self.take(actions)
        self.producer.check_integrity()
        return [a.message for a in actions if isinstance(a, Reply) and a.session == session]

    def _opening(self) -> messages.Open:
        identity, slot_bytes = identity_of("a"), CONFIG.slot_bytes
        return messages.Open("a", identity, 0, TOKENS, True, [0], slot_bytes, readers=self.count)

    def take(self, actions: Sequence[Action]) -> None:
        """A rank that has an answer waits no longer for the beginning of its KV."""
        for action in actions:
            if isinstance(action, Reply) and not isinstance(action.message, messages.Accept):
                self.waiting.discard(int(action.session))

    def end(self, ending: str) -> None:
        """The transfer ends, if it is there to be ended like this."""
        match ending:
            case "evicted":
                self.take(self.producer.offer(offer("b"), self.now))
                self.take(self.producer.withdraw("b", "request b"))
            case "expired":
                self.now += CONFIG.wait_timeout_s + CONFIG.lease_s
                self.take(self.producer.tick(self.now))
            case "withdrawn":
                self.take(self.producer.withdraw("a", "request a"))
            case "given up":
                self.take(self.producer.give_up("a", "an unexpected error"))
            case "model":
                self.take(self.producer.end_all(Cause.MODEL, "other weights"))
            case "cancelled":
                for rank in range(self.count):
                    self.send("cancel", rank)
            case "delivered":
                for rank in range(self.count):
                    self.send("open", rank)
                for rank in range(self.count):
                    self.send("done", rank)
        self.producer.check_integrity()

    @property
    def is_over(self) -> bool:
        return self.producer.transfers == 0


def steps(most: int) -> st.SearchStrategy[list[Step]]:
    return st.lists(st.tuples(st.sampled_from(MESSAGES), st.integers(0, 3)), max_size=most)


def play(
    count: int, prefill: str, before: list[Step], ending: str, after: list[Step]
) -> Ranks | None:
    """Everything up to the end and past it: nobody waits. None if the transfer has not ended."""
    ranks = Ranks(count)
    ranks.announce(prefill)
    for message, rank in before:
        ranks.send(message, rank % count)
    known = prefill != "not known" or before
    ranks.end(ending)
    if not ranks.is_over or not known:
        return None
    assert ranks.waiting == set(), "the end is told to all that wait"
    for message, rank in after:
        answers = ranks.send(message, rank % count)
        if message == "cancel":
            assert answers == [messages.Cancelled("a")]
        if message in ("open", "watch"):
            assert [type(answer) for answer in answers] == [messages.Refuse], (message, answers)
        assert ranks.is_over, "nothing is kept for what is over"
    return ranks


EACH_IN_TURN: list[Step] = [("open", 0), ("cancel", 0), ("open", 1), ("cancel", 1)]


@given(st.integers(1, 4), st.sampled_from(PREFILL), steps(6), st.sampled_from(ENDINGS), steps(8))
@example(2, "ended", [], "evicted", EACH_IN_TURN)
@example(2, "announced", [], "withdrawn", EACH_IN_TURN)
@example(4, "begun", [("watch", 0)], "given up", [("cancel", 0), ("watch", 1)])
@example(1, "announced", [("cancel", 0)], "withdrawn", [("open", 0)])
def test_nobody_waits_for_what_is_over(
    count: int, prefill: str, before: list[Step], ending: str, after: list[Step]
) -> None:
    play(count, prefill, before, ending, after)


@given(st.integers(1, 4), steps(6), st.sampled_from(ENDINGS), steps(8))
@example(1, [], "evicted", [("cancel", 0)])
@example(2, [("open", 0)], "cancelled", [("cancel", 1)])
def test_a_new_request_of_the_name_of_one_that_has_ended_is_served(
    count: int, before: list[Step], ending: str, after: list[Step]
) -> None:
    ranks = play(count, "ended", before, ending, after)
    if ranks is None:
        return
    ranks.announce("announced")
    for rank in range(count):
        assert ranks.send("open", rank) == [], "it waits for the prefill"
    actions = ranks.producer.offer(offer("a"), ranks.now)
    accepted = [action.session for action in actions if isinstance(action, Reply)]
    assert accepted == [b"%d" % rank for rank in range(count)]
    assert ranks.producer.leased_pages == PAGES


@given(st.integers(1, 4), st.sampled_from(ENDINGS), st.booleans(), st.permutations(range(4)))
def test_a_prefill_of_which_the_transfer_has_ended_leases_nothing_once_a_rank_has_cancelled(
    count: int, ending: str, watched: bool, order: list[int]
) -> None:
    """The prefill was slower than `wait_timeout_s`, for instance, and ends all the same."""
    ranks = Ranks(count)
    ranks.announce("announced")
    if watched:
        ranks.send("watch", 0)
    ranks.end(ending)
    if not ranks.is_over:
        return
    for rank in order[:1]:
        ranks.send("cancel", rank % count)
    if ending == "withdrawn":  # its request has ended, so this is another
        return
    ranks.producer.offer(offer("a"), ranks.now)
    assert ranks.producer.leased_pages == 0
    assert [type(m) for m in ranks.send("open", 0)] == [messages.Refuse]


def test_once_a_prefill_that_nobody_wanted_has_ended_nobody_waits_for_it() -> None:
    ranks = Ranks(1)
    ranks.announce("announced")
    ranks.send("cancel", 0)
    ranks.producer.offer(offer("a"), ranks.now)
    assert [type(m) for m in ranks.send("open", 0)] == [messages.Refuse]


def test_of_readers_that_have_all_ended_none_waits_for_the_end_of_the_prefill() -> None:
    """The first connection was lost; on the next one the rank asks again."""
    ranks = Ranks(1)
    ranks.announce("begun")
    ranks.send("open", 0)
    ranks.producer.session_lost(b"0")
    for message in ("watch", "open"):
        assert [type(m) for m in ranks.send(message, 1)] == [messages.Refuse]
    ranks.producer.check_integrity()


@pytest.mark.parametrize("ending", ENDINGS)
@pytest.mark.parametrize("count", [1, 2])
def test_memory_of_what_has_ended_is_bounded(
    ending: str, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(past_transfers, "_REMEMBERED", 10)
    monkeypatch.setattr(past_transfers, "_MOST_UNWANTED", 20)
    producer = Producer(HALF, pages=2 * PAGES)
    for number in range(200):
        name = f"{number}"
        producer.expect(name, 0.0)
        producer.offer(offer(name, final=number % 2 == 0), 0.0)
        match ending:
            case "withdrawn":
                producer.withdraw(name, f"request {name}")
            case "given up":
                producer.give_up(name, "an unexpected error")
            case "expired":
                producer.tick(2 * CONFIG.wait_timeout_s)
            case _:
                producer.end_all(Cause.MODEL, "other weights")
        for rank in range(count):
            producer.cancel(b"%d" % rank, name, Cause.ABORTED, 0.0, count)
    assert producer.transfers == 0
    assert len(producer._past._ended) == 10
    assert len(producer._past._unwanted) <= 20
    producer.tick(2 * CONFIG.lease_s)
    assert producer._past._unwanted == {}


def test_a_cancel_that_makes_the_transfer_anew_leaves_the_next_rank_waiting(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What the rule prevents: the memory is not asked when a rank cancels."""
    cancel = Openings.cancel

    def forgetful(self: Openings, *args: object) -> list[Action]:
        with monkeypatch.context() as patch:
            patch.setattr(PastTransfers, "is_over", lambda *_: False)
            return cancel(self, *args)  # type: ignore[arg-type]

    monkeypatch.setattr(Openings, "cancel", forgetful)
    ranks = Ranks(2)
    ranks.announce("ended")
    ranks.end("evicted")
    ranks.send("open", 0)
    ranks.send("cancel", 0)
    assert ranks.send("open", 1) == []
    assert ranks.waiting == {1}
