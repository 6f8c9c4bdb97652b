# SPDX-License-Identifier: Apache-2.0
"""The consumer's rules, one at a time. Orders and faults in combination: test_pair.py."""

from collections.abc import Sequence
from typing import Any

import msgspec
import pytest
from support.machines import (
    CONFIG,
    HALVES,
    HEADS,
    LAYERS,
    PAGE_TOKENS,
    ROUTES,
    TOKEN_BYTES,
    WHOLE,
    geometry_of,
    identity_of,
    routes_of,
)

from pd_connector.config import Config
from pd_connector.errors import Cause
from pd_connector.kv.geometry import Shard
from pd_connector.memory.slab import SlotPool
from pd_connector.protocol.consuming.consumer import Consumer
from pd_connector.protocol.consuming.incoming import (
    Dial,
    Finished,
    Held,
    IncomingChunk,
    Load,
    ProducerSession,
    Stalled,
    Tell,
)
from pd_connector.protocol.wire import messages
from pd_connector.protocol.wire.header import ChunkHeader
from pd_connector.protocol.wire.peers import Peer, Source

SOURCE = Source("127.0.0.1", 1, "engine")
SECOND = Source("127.0.0.1", 2, "engine")
PEERS = (Peer(SOURCE, WHOLE),)
SPLIT = (Peer(SOURCE, HALVES[0]), Peer(SECOND, HALVES[1]))
EPOCH = 5


class Bench:
    """A consumer, its pool, and a load of six pages (four chunks for three slots)."""

    def __init__(
        self,
        one_sided: bool = True,
        *,
        peers: tuple[Peer, ...] = PEERS,
        shard: Shard = WHOLE,
        shards: Sequence[Shard] = (),
        config: Config = CONFIG,
        wait: bool = False,
    ) -> None:
        self.config = config
        self.peers = peers
        self.shard = shard
        self.pool = SlotPool(config.slots)
        self.consumer = Consumer(config, geometry_of(shard), self.pool, one_sided, shards)
        pages = (range(20, 26),)
        self.load = Load("request", "t", peers, identity_of("t"), 0, 12, pages, wait)

    def up(self, peer: Peer, now: float = 0.0, *, starts: int = 0) -> list[Any]:
        """A session stands with a producer that has started again `starts` times."""
        epoch = EPOCH + self.peers.index(peer) + 100 * starts
        routes = routes_of(peer.shard, self.shard)
        session = ProducerSession(epoch, self.config.slot_bytes, routes)
        return self.consumer.session_up(peer.source, session, now)

    def open(self) -> messages.Open:
        assert self.consumer.load(self.load, 0.0) == [
            Dial(peer.source, len(self.peers)) for peer in self.peers
        ]
        tells = [tell for peer in self.peers for tell in self.up(peer)]
        assert [type(tell.message) for tell in tells] == [messages.Open] * len(self.peers)
        message = tells[0].message
        assert isinstance(message, messages.Open)
        return message

    def accept(self, chunks: int = 4, complete: bool = True, **place: Any) -> list[Any]:
        transfer, source = place.get("transfer", "t"), place.get("source", SOURCE)
        message = messages.Accept(transfer, chunks, complete)
        return self.consumer.accept(source, message, place.get("now", 1.0))

    def header(
        self, sequence: int, transfer: str = "t", source: Source = SOURCE, **changes: Any
    ) -> ChunkHeader:
        chunk = self.consumer._transfers[transfer].streams[source].missing[sequence]
        number = next(i for i, peer in enumerate(self.peers) if peer.source == source)
        nbytes = chunk.nbytes(routes_of(self.peers[number].shard, self.shard)[0])
        tokens = identity_of("t")
        header = ChunkHeader(
            transfer, EPOCH + number, sequence, tokens, *chunk[1:6], "raw", nbytes, b"sum"
        )
        return msgspec.structs.replace(header, **changes)

    def land(
        self, sequence: int, slot: int, source: Source = SOURCE, now: float = 1.0
    ) -> list[Any]:
        """A right chunk lands and is placed; what comes of it."""
        header = self.header(sequence, source=source)
        payload = memoryview(bytes(header.nbytes))
        (place,) = self.consumer.landings.landed(header, slot, payload, now)
        assert isinstance(place, IncomingChunk)
        return self.consumer.landings.placed(place, None, "", now)


def test_a_load_dials_then_opens_with_the_slots_there_are():
    bench = Bench()
    message = bench.open()
    assert (message.first_token, message.stop_token) == (0, 12)
    assert message.slots == [0, 1, 2]
    assert message.readers == 1
    assert bench.pool.free == 0


def test_a_load_that_waits_for_its_prefill_holds_no_slots():
    bench = Bench(wait=True)
    assert bench.open().slots == []
    (tell,) = bench.accept()
    assert tell == Tell(SOURCE, messages.Credit("t", [0, 1, 2]))


@pytest.mark.parametrize("provisional", [False, True])
def test_what_is_provisional_ends_no_load_before_the_prefill_has_ended(provisional: bool):
    bench = Bench(wait=True)
    assert bench.open().provisional
    early = messages.Accept("t", 4, False, provisional=provisional)
    bench.consumer.accept(SOURCE, early, 1.0)
    ended = [a for i in range(4) for a in bench.land(i, i % 3) if isinstance(a, Finished)]
    if provisional:
        assert ended == []
        ended = [a for a in bench.accept() if isinstance(a, Finished)]
    assert [end.cause for end in ended] == [None]


def test_a_returned_slot_is_granted_again_and_the_last_chunk_ends_the_load():
    bench = Bench()
    bench.open()
    bench.accept(now=0.5)
    assert bench.land(2, slot=1) == [Tell(SOURCE, messages.Credit("t", [1]))]
    assert bench.land(0, slot=0) == []
    assert bench.land(3, slot=1) == []
    done, finished = bench.land(1, slot=2)
    assert done == Tell(SOURCE, messages.Done("t"))
    assert finished == Finished(
        "request", None, "", LAYERS * HEADS * 12 * TOKEN_BYTES, 4, 1.0, source=SOURCE
    )
    assert bench.pool.held == 0


def test_a_chunk_goes_into_the_pages_of_its_range():
    bench = Bench()
    bench.open()
    header = bench.header(3)
    payload = memoryview(bytes(header.nbytes))
    (place,) = bench.consumer.landings.landed(header, 0, payload, 1.0)
    assert isinstance(place, IncomingChunk)
    assert list(place.pages) == [23, 24, 25]


@pytest.mark.parametrize(
    "changes",
    [
        {"epoch": EPOCH + 1},
        {"identity": b"other"},
        {"route": 1},
        {"first_layer": 1},
        {"stop_layer": 2},
        {"first_token": 1},
        {"stop_token": 5},
        {"codec": "int8"},
        {"nbytes": 1},
        {"nbytes": 2**62},
    ],
)
def test_a_chunk_that_does_not_fit_the_plan_fails_the_load(changes: dict[str, Any]):
    bench = Bench()
    bench.open()
    header = bench.header(0)
    payload = memoryview(bytes(header.nbytes))
    wrong = msgspec.structs.replace(header, **changes)
    actions = bench.consumer.landings.landed(wrong, 0, payload, 1.0)
    if "epoch" in changes:
        assert actions == [], "nobody with whom there is a session"
        return
    cancel, finished = actions
    assert cancel == Tell(SOURCE, messages.Cancel("t", Cause.CHUNK_MISMATCH))
    assert isinstance(finished, Finished)
    assert finished.cause == Cause.CHUNK_MISMATCH


def test_a_payload_of_another_length_fails_the_load():
    bench = Bench()
    bench.open()
    _, finished = bench.consumer.landings.landed(bench.header(0), 0, memoryview(b"short"), 1.0)
    assert isinstance(finished, Finished)
    assert finished.cause == Cause.CHUNK_MISMATCH


def test_a_read_that_failed_fails_the_load_for_what_it_is():
    bench = Bench()
    bench.open()
    bench.accept()
    reason = "the producer has hung up"
    actions = bench.consumer.landings.landed(
        bench.header(0), 0, memoryview(b""), 1.0, problem=reason
    )
    finished = next(action for action in actions if isinstance(action, Finished))
    assert (finished.cause, finished.detail) == (Cause.TRANSPORT, reason)


def test_a_chunk_that_came_already_or_belongs_to_nobody_is_dropped():
    bench = Bench()
    bench.open()
    first = bench.header(0)
    payload = memoryview(bytes(first.nbytes))
    bench.land(0, slot=0)
    nobodys = msgspec.structs.replace(first, transfer="u")
    assert bench.consumer.landings.landed(first, 1, payload, 1.0) == []
    assert bench.consumer.landings.landed(nobodys, 1, payload, 1.0) == []
    assert bench.consumer.landings.landed(bench.header(1), 0, payload, 1.0) == [], (
        "slot 0 is not its"
    )


def test_a_chunk_that_arrives_into_pages_is_awaited_until_it_is_placed():
    bench = Bench()
    bench.open()
    landings = bench.consumer.landings
    chunk = landings.expected(bench.header(0), 0)
    assert chunk is not None
    assert landings.awaits(chunk)
    bench.land(0, slot=0)
    assert not landings.awaits(chunk), "its pages may be in use"


@pytest.mark.parametrize("chunks", [5, 3, 0, 2**62])
@pytest.mark.parametrize("complete", [False, True])
def test_another_plan_than_ours_fails_the_load(chunks: int, complete: bool):
    bench = Bench()
    bench.open()
    _, finished = bench.accept(chunks, complete)
    assert finished.cause == Cause.CHUNK_MISMATCH


def test_another_producer_cannot_speak_for_this_one():
    bench = Bench()
    bench.open()
    other = SOURCE._replace(port=2)
    assert bench.consumer.refuse(other, messages.Refuse("t", "model", ""), 1.0) == []
    assert bench.accept(99, source=other) == []
    assert bench.consumer.ready(other, "t") == []
    bench.consumer.cancelled(other, "t", 1.0)
    assert bench.consumer.transfers == 1
    assert bench.pool.held == 3


@pytest.mark.parametrize(
    ("accepted", "wait", "patience", "cause"),
    [
        (None, False, CONFIG.stall_timeout_s, Cause.WAIT_TIMEOUT),
        (None, True, CONFIG.wait_timeout_s, Cause.WAIT_TIMEOUT),
        (messages.Accept("t", 4, False), True, CONFIG.wait_timeout_s, Cause.WAIT_TIMEOUT),
        (messages.Accept("t", 4, True), True, CONFIG.stall_timeout_s, Cause.STALLED),
        (messages.Accept("t", 4, True), False, CONFIG.stall_timeout_s, Cause.STALLED),
    ],
)
def test_silence_fails_a_load_a_prefill_may_take_longer_than_a_chunk(
    accepted: messages.Accept | None, wait: bool, patience: float, cause: Cause
):
    bench = Bench(wait=wait)
    bench.open()
    if accepted:
        bench.consumer.accept(SOURCE, accepted, 0.0)
    assert bench.consumer.tick(patience - 0.1) == []
    _, finished, *stalled = bench.consumer.tick(patience)
    assert isinstance(finished, Finished)
    assert finished.cause == cause
    limit = "stall_timeout_s" if patience == CONFIG.stall_timeout_s else "wait_timeout_s"
    assert limit in finished.detail
    assert stalled == ([Stalled(SOURCE)] if cause is Cause.STALLED else [])


def test_a_load_without_a_session_fails_after_connect_timeout():
    bench = Bench()
    bench.consumer.load(bench.load, 0.0)
    (finished,) = bench.consumer.tick(CONFIG.connect_timeout_s)
    assert isinstance(finished, Finished)
    assert finished.cause == Cause.UNREACHABLE


def test_a_transfer_that_waits_for_slots_of_ours_is_not_failed_for_it():
    bench = Bench()
    bench.open()
    second = bench.load._replace(request="second", transfer="u")
    bench.consumer.load(second, 0.0)
    bench.accept(transfer="u", now=0.0)
    for i in range(1, 5):
        now = 0.9 * i * CONFIG.stall_timeout_s
        bench.consumer._transfers["t"].streams[SOURCE].deadline = now + 1
        assert bench.consumer.tick(now) == []


def test_slots_of_an_ended_load_wait_for_the_producers_confirmation():
    bench = Bench()
    bench.open()
    bench.consumer.drop("request", Cause.ABORTED, 1.0)
    assert (bench.pool.free, bench.pool.held) == (0, 3)
    bench.consumer.cancelled(SOURCE, "t", 1.0)
    assert (bench.pool.free, bench.pool.held) == (3, 0)


def test_without_a_confirmation_slots_come_home_when_the_lease_would_have_ended():
    bench = Bench()
    bench.open()
    bench.consumer.drop("request", Cause.ABORTED, 1.0)
    bench.consumer.tick(1.0 + CONFIG.lease_s - 0.1)
    assert bench.pool.free == 0
    bench.consumer.tick(1.0 + CONFIG.lease_s)
    assert bench.pool.free == 3


def test_free_slots_are_granted_in_turn():
    bench = Bench()
    bench.open()
    second = bench.load._replace(request="second", transfer="u")
    bench.consumer.load(second, 0.0)
    bench.accept(now=0.5)
    bench.accept(transfer="u", now=0.5)
    assert bench.land(0, slot=0) == [Tell(SOURCE, messages.Credit("t", [0]))]
    assert bench.land(1, slot=1) == [Tell(SOURCE, messages.Credit("u", [1]))]


def test_a_transfer_is_loaded_by_one_request_at_a_time():
    bench = Bench()
    bench.open()
    (finished,) = bench.consumer.load(bench.load._replace(request="another"), 1.0)
    assert isinstance(finished, Finished)
    assert (finished.request, finished.cause) == ("another", Cause.DUPLICATE)
    assert bench.consumer.transfers == 1


def test_what_is_held_or_loading_is_spoken_for_and_what_is_dropped_is_not():
    bench = Bench()
    bench.open()
    assert bench.consumer.hold("waiting", "u", PEERS, False, 0.0) == []
    assert bench.consumer.transfers_of(SOURCE) == ("t", "u")
    assert bench.consumer.drop("waiting", Cause.ABORTED, 1.0) == [
        Tell(SOURCE, messages.Cancel("u", Cause.ABORTED))
    ]
    assert bench.consumer.transfers_of(SOURCE) == ("t",)


def test_a_drop_before_the_session_stands_is_told_once_it_does():
    bench = Bench()
    bench.consumer.hold("request", "t", PEERS, False, 0.0)
    bench.consumer.drop("request", Cause.ABORTED, 0.0)
    assert bench.up(PEERS[0]) == [Tell(SOURCE, messages.Cancel("t", Cause.ABORTED))]


# KV that comes while its prefill is under way.


def test_accepted_twice_once_that_kv_comes_and_once_that_it_is_complete():
    bench = Bench(wait=True)
    bench.open()
    assert bench.accept(complete=False) == [Tell(SOURCE, messages.Credit("t", [0]))]
    assert bench.land(0, slot=0) == [Tell(SOURCE, messages.Credit("t", [1]))]
    assert bench.accept(complete=True) == [Tell(SOURCE, messages.Credit("t", [2, 0]))]
    assert bench.accept(complete=True) == [], "a third time means nothing"
    assert bench.land(1, slot=1) == []
    assert bench.land(2, slot=2) == []
    done, finished = bench.land(3, slot=0)
    assert done == Tell(SOURCE, messages.Done("t"))
    assert finished.cause is None


def test_a_load_may_end_before_the_producer_says_that_it_is_complete():
    bench = Bench(wait=True)
    bench.open()
    bench.accept(complete=False)
    for sequence, slot in ((0, 0), (1, 1), (2, 2)):
        bench.land(sequence, slot)
    done, finished = bench.land(3, slot=0)
    assert done == Tell(SOURCE, messages.Done("t"))
    assert finished.cause is None
    assert bench.accept(complete=True) == []


def test_the_stall_deadline_counts_from_when_the_prefill_has_ended():
    bench = Bench(wait=True)
    bench.open()
    bench.accept(complete=False, now=1.0)
    late = CONFIG.wait_timeout_s - 1
    assert bench.consumer.tick(late) == []
    bench.accept(complete=True, now=late)
    assert bench.consumer.tick(late + CONFIG.stall_timeout_s - 0.1) == []
    _, finished, stalled = bench.consumer.tick(late + CONFIG.stall_timeout_s)
    assert isinstance(finished, Finished)
    assert finished.cause == Cause.STALLED
    assert stalled == Stalled(SOURCE)


@pytest.mark.parametrize("slots", [1, 2, 3, 16])
def test_transfers_that_wait_for_their_prefill_leave_slots_for_one_that_does_not(slots: int):
    bench = Bench(wait=True, config=msgspec.structs.replace(CONFIG, slots=slots))
    bench.open()
    names = ["t", *(f"patient {i}" for i in range(20))]
    for name in names[1:]:
        bench.consumer.load(bench.load._replace(request=name, transfer=name), 0.0)
    for name in names:
        bench.accept(transfer=name, complete=False)
    assert bench.pool.free * 2 >= slots
    bench.consumer.load(bench.load._replace(request="ready", transfer="ready"), 1.0)
    (tell,) = bench.accept(transfer="ready", complete=True)
    assert tell.message.transfer == "ready"
    assert len(tell.message.slots) == min(4, (slots + 1) // 2)


# Several ranks on either side.


def test_a_load_asks_every_rank_that_holds_a_part_and_ends_when_all_have_sent():
    bench = Bench(peers=SPLIT)
    bench.open()
    assert bench.accept(2) == []
    assert bench.accept(2, source=SECOND) == []
    assert bench.land(0, slot=0) == [Tell(SECOND, messages.Credit("t", [0]))]
    assert bench.land(1, slot=1) == []
    assert bench.land(0, slot=2, source=SECOND) == []
    done, also_done, finished = bench.land(1, slot=0, source=SECOND)
    assert done == Tell(SOURCE, messages.Done("t"))
    assert also_done == Tell(SECOND, messages.Done("t"))
    assert finished.cause is None
    assert finished.nbytes == LAYERS * HEADS * 12 * TOKEN_BYTES


def test_a_chunk_in_a_slot_that_was_granted_to_another_rank_is_dropped():
    bench = Bench(peers=SPLIT)
    bench.open()
    header = bench.header(0, source=SECOND)
    assert bench.consumer.landings.landed(header, 0, memoryview(bytes(header.nbytes)), 1.0) == []


@pytest.mark.parametrize("how", ["refused", "lost", "wrong chunk", "silent"])
def test_a_rank_that_fails_fails_the_load_once_and_the_others_are_cancelled(how: str):
    bench = Bench(peers=SPLIT)
    bench.open()
    bench.accept(2, now=0.0)
    if how == "refused":
        refusal = messages.Refuse("t", Cause.WINDOW, "")
        actions, cause = bench.consumer.refuse(SECOND, refusal, 1.0), Cause.WINDOW
    elif how == "lost":
        cause = Cause.SESSION_LOST
        actions = bench.consumer.session_down(SECOND, cause, "", 1.0)
    elif how == "silent":
        bench.accept(2, now=5.0)
        bench.accept(2, source=SECOND, now=0.0)
        bench.land(0, slot=0, now=9.0)
        actions, cause = bench.consumer.tick(CONFIG.stall_timeout_s), Cause.STALLED
    else:
        bench.accept(2, source=SECOND, now=0.0)
        bench.land(0, slot=0)
        wrong = bench.header(0, source=SECOND, identity=b"other")
        actions = bench.consumer.landings.landed(wrong, 0, memoryview(bytes(wrong.nbytes)), 1.0)
        cause = Cause.CHUNK_MISMATCH
    finished = [action for action in actions if isinstance(action, Finished)]
    assert [one.cause for one in finished] == [cause]
    assert Tell(SOURCE, messages.Cancel("t", cause)) in actions
    bench.consumer.cancelled(SOURCE, "t", 10.0)
    bench.consumer.tick(10.0 + CONFIG.lease_s)
    assert bench.pool.held == 0
    assert bench.consumer.transfers == 0


def test_a_producer_whose_ranks_leave_something_out_never_finishes_a_load_well():
    bench = Bench(peers=SPLIT[:1])
    bench.open()
    bench.accept(2)
    bench.land(0, slot=0)
    cancel, finished = bench.land(1, slot=1)
    assert cancel == Tell(SOURCE, messages.Cancel("t", Cause.GEOMETRY))
    assert finished.cause == Cause.GEOMETRY
    assert finished.detail == "no rank of the producer has sent layer 0 head 1"


def test_a_producer_that_holds_nothing_of_ours_is_not_even_asked():
    bench = Bench(peers=SPLIT[1:], shard=HALVES[0])
    (finished,) = bench.consumer.load(bench.load, 0.0)
    assert isinstance(finished, Finished)
    assert finished.cause == Cause.GEOMETRY


def test_a_watched_hold_of_what_holds_nothing_of_ours_is_told_so_at_once():
    bench = Bench(peers=(Peer(SOURCE, HALVES[0]),), shard=HALVES[1])
    (held,) = bench.consumer.hold("request", "t", bench.peers, True, 0.0)
    assert (held.request, held.cause) == ("request", Cause.GEOMETRY)
    assert bench.consumer.transfers == 0


def test_each_rank_is_asked_with_the_number_of_ranks_that_read_from_it():
    bench = Bench(shard=HALVES[1], shards=HALVES)
    message = bench.open()
    assert message.readers == 2
    cancel, _ = bench.consumer.drop("request", Cause.ABORTED, 1.0)
    assert cancel == Tell(SOURCE, messages.Cancel("t", Cause.ABORTED, 2))


def test_a_name_that_comes_again_from_another_producer_is_another_transfer():
    """The first one still wanted slots when it ended, and there were none."""
    bench = Bench()
    bench.open()
    bench.accept()
    bench.land(0, slot=0)
    bench.consumer.drop("request", Cause.ABORTED, 1.0)
    elsewhere = Peer(SECOND, WHOLE)
    again = bench.load._replace(request="again", peers=(elsewhere,))
    bench.consumer.load(again, 1.0)
    bench.consumer.session_up(SECOND, ProducerSession(99, CONFIG.slot_bytes, ROUTES), 1.0)
    bench.consumer.cancelled(SOURCE, "t", 1.0)
    assert bench.consumer.tick(2.0) == []


def test_a_producer_known_by_two_names_is_one_that_has_two_sessions():
    bench = Bench(wait=True)
    bench.open()
    bench.accept()
    localhost = Peer(SOURCE._replace(host="localhost"), WHOLE)
    other = bench.load._replace(request="other", transfer="u", peers=(localhost,))
    bench.consumer.load(other, 1.0)
    bench.consumer.session_up(
        localhost.source, ProducerSession(EPOCH, CONFIG.slot_bytes, ROUTES), 1.0
    )
    assert bench.land(0, slot=0) != []


# Watched holds: a request that allocates pages only when there is something to load.


def test_a_watched_hold_is_told_once_when_kv_is_there_and_is_loaded_then():
    bench = Bench(wait=True)
    assert bench.consumer.hold("request", "t", PEERS, True, 0.0) == [Dial(SOURCE)]
    assert bench.up(PEERS[0]) == [Tell(SOURCE, messages.Watch("t"))]
    assert bench.consumer.transfers_of(SOURCE) == ("t",)
    assert bench.consumer.ready(SOURCE, "t") == [Held("request", None, "")]
    assert bench.consumer.ready(SOURCE, "t") == []
    (tell,) = bench.consumer.load(bench.load, 1.0)
    assert isinstance(tell, Tell)
    assert isinstance(tell.message, messages.Open)


def test_all_ranks_are_watched_and_the_first_answer_counts():
    bench = Bench(peers=SPLIT)
    bench.consumer.hold("request", "t", SPLIT, True, 0.0)
    assert bench.up(SPLIT[0]) == [Tell(SOURCE, messages.Watch("t"))]
    assert bench.up(SPLIT[1]) == [Tell(SECOND, messages.Watch("t"))]
    assert bench.consumer.ready(SECOND, "t") == [Held("request", None, "")]
    assert bench.consumer.ready(SOURCE, "t") == []
    assert bench.consumer.tick(CONFIG.wait_timeout_s + 1) == [], "it waits for room now"


@pytest.mark.parametrize("how", ["refused", "lost", "silent", "unreachable"])
def test_a_watched_hold_whose_kv_will_not_come_is_told_so_once(how: str):
    bench = Bench()
    bench.consumer.hold("request", "t", PEERS, True, 0.0)
    if how == "unreachable":
        cause = Cause.UNREACHABLE
        actions = bench.consumer.session_down(SOURCE, cause, "", 1.0)
    else:
        bench.up(PEERS[0])
        if how == "refused":
            cause = Cause.PREFILL_ENDED
            actions = bench.consumer.refuse(SOURCE, messages.Refuse("t", cause, ""), 1.0)
        elif how == "lost":
            cause = Cause.SESSION_LOST
            actions = bench.consumer.session_down(SOURCE, cause, "", 1.0)
        else:
            cause = Cause.WAIT_TIMEOUT
            assert bench.consumer.tick(CONFIG.wait_timeout_s - 1) == []
            actions = bench.consumer.tick(CONFIG.wait_timeout_s)
    assert [a.cause for a in actions if isinstance(a, Held)] == [cause]
    assert bench.consumer.transfers == 0
    assert bench.consumer.ready(SOURCE, "t") == []


@pytest.mark.parametrize("cause", [Cause.UNREACHABLE, Cause.SESSION_LOST, Cause.SESSION_LIMIT])
def test_a_producer_that_could_not_be_told_the_end_is_told_when_a_session_stands(cause: Cause):
    """Otherwise its pages stay leased although no transfer wants them."""
    bench = Bench()
    bench.consumer.load(bench.load, 0.0)
    actions = bench.consumer.session_down(SOURCE, cause, "", 1.0)
    assert not any(isinstance(action, Tell) for action in actions), "there is no connection"
    last = Tell(SOURCE, messages.Cancel("t", cause))
    assert bench.up(PEERS[0], CONFIG.lease_s) == [last]
    assert bench.up(PEERS[0], CONFIG.lease_s) == [], "once"


def test_a_producer_with_which_no_session_is_agreed_on_is_told_at_once():
    """The connection stands."""
    bench = Bench()
    bench.consumer.load(bench.load, 0.0)
    actions = bench.consumer.session_down(SOURCE, Cause.MODEL, "", 1.0)
    assert Tell(SOURCE, messages.Cancel("t", Cause.MODEL)) in actions
    assert bench.up(PEERS[0]) == []


def test_the_end_is_not_told_any_more_when_the_lease_is_over():
    bench = Bench()
    bench.consumer.load(bench.load, 0.0)
    bench.consumer.session_down(SOURCE, Cause.UNREACHABLE, "", 1.0)
    bench.consumer.tick(1.0 + CONFIG.lease_s)
    assert bench.up(PEERS[0], 1.0 + CONFIG.lease_s) == []


def test_what_is_wanted_again_is_not_cancelled():
    bench = Bench()
    bench.consumer.load(bench.load, 0.0)
    bench.consumer.session_down(SOURCE, Cause.UNREACHABLE, "", 1.0)
    bench.consumer.load(bench.load, 2.0)
    (told,) = bench.up(PEERS[0], 2.0)
    assert isinstance(told.message, messages.Open)


def test_a_second_hold_of_a_transfer_that_is_watched_is_told_that_it_is_one():
    bench = Bench()
    bench.consumer.hold("request", "t", PEERS, True, 0.0)
    (held,) = bench.consumer.hold("another", "t", PEERS, True, 0.0)
    assert isinstance(held, Held)
    assert (held.request, held.cause) == ("another", Cause.DUPLICATE)
    assert bench.consumer.transfers == 1


def test_a_watched_hold_that_is_dropped_is_told_nothing():
    bench = Bench()
    bench.consumer.hold("request", "t", PEERS, True, 0.0)
    bench.up(PEERS[0])
    cancel = Tell(SOURCE, messages.Cancel("t", Cause.ABORTED))
    assert bench.consumer.drop("request", Cause.ABORTED, 1.0) == [cancel]
    assert bench.consumer.ready(SOURCE, "t") == []


def test_pages_are_of_two_tokens():
    """The numbers above are counted in them."""
    assert PAGE_TOKENS == 2


def stall(bench: Bench, request: str, now: float) -> None:
    """A transfer is opened at `now`, and no chunk comes."""
    load = bench.load._replace(request=request, transfer=request)
    told = bench.consumer.load(load, now)
    told += bench.up(bench.peers[0], now) if SOURCE not in bench.consumer._sessions else []
    assert [type(tell.message) for tell in told if isinstance(tell, Tell)] == [messages.Open]
    bench.accept(transfer=request, now=now)
    ended = bench.consumer.tick(now + bench.config.stall_timeout_s)
    assert Cause.STALLED in [end.cause for end in ended if isinstance(end, Finished)]
    bench.consumer.cancelled(SOURCE, request, now)


def test_a_load_from_a_producer_that_stalls_ends_at_once_and_frees_its_pages():
    bench = Bench()
    limit_s = bench.config.stall_timeout_s
    stall(bench, "first", 0)
    stall(bench, "second", limit_s)
    now = 2 * limit_s
    third = bench.load._replace(request="third", transfer="third")
    ended = bench.consumer.load(third, now)
    assert Tell(SOURCE, messages.Cancel("third", Cause.STALLED, 1)) in ended
    assert [(end.request, end.cause) for end in ended if isinstance(end, Finished)] == [
        ("third", Cause.STALLED)
    ]
    assert bench.pool.held == 0
    bench.consumer.check_integrity()


def test_stalls_that_the_producer_has_found_out_count_too():
    bench = Bench()
    for number in range(2):
        bench.consumer.load(bench.load, number)
        bench.up(bench.peers[0], number)
        bench.consumer.session_down(SOURCE, Cause.STALLED, "", number + 0.5)
    bench.consumer.load(bench.load, 2)
    ended = bench.up(bench.peers[0], 2)
    assert [end.cause for end in ended if isinstance(end, Finished)] == [Cause.STALLED]


def test_requests_that_come_in_the_turn_of_a_stall_have_not_waited():
    """The stall ends their session, and with it them; counted one by one they would stop the producer for half a minute."""
    bench = Bench()
    limit_s = bench.config.stall_timeout_s
    bench.consumer.load(bench.load, 0)
    bench.up(bench.peers[0], 0)
    for number in range(8):
        load = bench.load._replace(request=f"other {number}", transfer=f"other {number}")
        bench.consumer.load(load, limit_s)
    assert bench.consumer.tick(limit_s)
    bench.consumer.session_down(SOURCE, Cause.STALLED, "", limit_s)
    again = bench.load._replace(request="again", transfer="again")
    bench.consumer.load(again, limit_s)
    (told,) = bench.up(bench.peers[0], limit_s)
    assert isinstance(told.message, messages.Open)


def test_a_producer_that_has_started_again_is_asked_at_once():
    bench = Bench()
    limit_s = bench.config.stall_timeout_s
    stall(bench, "first", 0)
    stall(bench, "second", limit_s)
    now = 2 * limit_s
    bench.consumer.session_down(SOURCE, Cause.SESSION_LOST, "", now)
    bench.consumer.load(bench.load, now)
    (told,) = bench.up(bench.peers[0], now, starts=1)
    assert isinstance(told.message, messages.Open)


def test_a_chunk_that_comes_ends_the_pause():
    bench = Bench()
    limit_s = bench.config.stall_timeout_s
    stall(bench, "first", 0)
    stall(bench, "second", limit_s)
    now = 3 * limit_s
    bench.consumer.load(bench.load, now)
    bench.accept(now=now)
    slot = bench.consumer._transfers["t"].streams[SOURCE].slots[0]
    bench.land(0, slot, now=now)
    other = bench.load._replace(request="other", transfer="other")
    (told,) = bench.consumer.load(other, now)
    assert isinstance(told.message, messages.Open)
