# SPDX-License-Identifier: Apache-2.0
"""A consumer that needs the producer's final token gets them, whole and its own, or fails by name."""

import pickle
from collections.abc import Callable

import msgspec
import pytest
from support.machines import GEOMETRY, ROUTES, WHOLE

from pd_connector.config import Config
from pd_connector.errors import Cause, MalformedMessageError
from pd_connector.memory.slab import SlotPool
from pd_connector.protocol.consuming.consumer import Consumer
from pd_connector.protocol.consuming.incoming import Finished, IncomingChunk, Load, ProducerSession
from pd_connector.protocol.producing.outgoing import Free, Offer, Reply
from pd_connector.protocol.producing.producer import Producer
from pd_connector.protocol.wire import messages
from pd_connector.protocol.wire.final_token import (
    FIRST_TOKEN,
    MAX_ALTERNATIVES,
    FinalToken,
    FirstDraft,
    draft_form,
    needs_drafts,
    unsent,
)
from pd_connector.protocol.wire.peers import Peer, Source

SOURCE = Source("p", 1, "")
TOKENS = b"identity"
WORDS = FinalToken("t", TOKENS, 7, -0.5, [(7, -0.5), (3, -1.5)], {"cached_tokens": 2})
CHUNK_BYTES = 256 * 1024


class Loading:
    """A consumer that needs words, with one load of 8 tokens (or of none) opened."""

    def __init__(self, *, needs_final_token: bool = True, first_token: int = 0) -> None:
        config = Config(slots=4)
        self.consumer = Consumer(
            config, GEOMETRY, SlotPool(4), False, needs_final_token=needs_final_token
        )
        self.session = ProducerSession(1, config.slot_bytes, ROUTES)
        self.consumer.session_up(SOURCE, self.session, 0.0)
        load = Load("r", "t", (Peer(SOURCE, WHOLE),), TOKENS, first_token, 8, ([0, 1, 2, 3],), True)
        self.load = load
        self.consumer.load(load, 0.0)
        self.chunks = dict(self.consumer._transfers["t"].streams[SOURCE].missing)

    def accept(
        self, *, complete: bool, final_token: FinalToken | None = None, now: float = 1.0
    ) -> list[Finished]:
        message = messages.Accept("t", len(self.chunks), complete, final_token)
        actions = self.consumer.accept(SOURCE, message, now)
        granted = [a.message for a in actions if getattr(a, "message", None)]
        self.slots = [s for m in granted if isinstance(m, messages.Credit) for s in m.slots]
        self.consumer.check_integrity()
        return [action for action in actions if isinstance(action, Finished)]

    def place_all(self) -> list[Finished]:
        """All chunks land and are right."""
        ended: list[Finished] = []
        slots = list(self.slots)
        for chunk in self.chunks.values():
            slot = slots.pop(0)
            header = self.session.header(self.load, ROUTES[chunk.route], chunk, b"sum")
            (place,) = self.consumer.landings.landed(
                header, slot, memoryview(bytes(header.nbytes)), 2.0
            )
            assert isinstance(place, IncomingChunk)
            actions = self.consumer.landings.placed(place, None, "", 2.0)
            for action in actions:
                message = getattr(action, "message", None)
                if isinstance(message, messages.Credit):
                    slots += message.slots
            ended += [action for action in actions if isinstance(action, Finished)]
        self.consumer.check_integrity()
        return ended


def test_a_load_that_needs_words_is_not_over_before_they_have_come() -> None:
    loading = Loading()
    assert not loading.accept(complete=False)
    assert not loading.place_all(), "all KV is there, and nobody has said what follows"
    (ended,) = loading.accept(complete=True, final_token=WORDS)
    assert ended.cause is None
    assert ended.final_token == WORDS


def test_a_load_that_needs_none_ends_with_its_last_chunk() -> None:
    """The negative control: this is how a load could end before the words came."""
    loading = Loading(needs_final_token=False)
    loading.accept(complete=False)
    (ended,) = loading.place_all()
    assert (ended.cause, ended.final_token) == (None, None)


def test_words_that_come_before_the_last_chunk_wait_for_it() -> None:
    loading = Loading()
    assert not loading.accept(complete=True, final_token=WORDS)
    (ended,) = loading.place_all()
    assert ended.final_token == WORDS


def test_nothing_left_to_load_but_the_words() -> None:
    loading = Loading(first_token=8)
    assert loading.chunks == {}
    assert not loading.accept(complete=False)
    (ended,) = loading.accept(complete=True, final_token=WORDS)
    assert (ended.cause, ended.final_token) == (None, WORDS)


@pytest.mark.parametrize(
    "final_token",
    [
        None,
        msgspec.structs.replace(WORDS, transfer="another"),
        msgspec.structs.replace(WORDS, identity=b"other tokens"),
    ],
)
def test_missing_words_and_words_of_another_request_fail_the_load(
    final_token: FinalToken | None,
) -> None:
    loading = Loading()
    ended = loading.accept(complete=True, final_token=final_token) or loading.place_all()
    assert [end.cause for end in ended] == [Cause.WORDS]


def test_a_prefill_that_never_ends_is_given_up_although_its_kv_is_there() -> None:
    loading = Loading()
    loading.accept(complete=False)
    loading.place_all()
    assert not [a for a in loading.consumer.tick(299.0) if isinstance(a, Finished)]
    (ended,) = [a for a in loading.consumer.tick(301.0) if isinstance(a, Finished)]
    assert ended.cause is Cause.WAIT_TIMEOUT


def _offer(*, final: bool, final_token: FinalToken | None = None) -> Offer:
    return Offer("t", "r", ([0, 1, 2, 3],), TOKENS, 8, 8, final, final_token)


def _open(first_token: int = 0) -> messages.Open:
    return messages.Open("t", TOKENS, first_token, 8, True, [], CHUNK_BYTES)


@pytest.mark.parametrize("opened_first", [True, False])
def test_a_producer_sends_words_with_the_end_and_not_before(opened_first: bool) -> None:
    producer = Producer(Config())
    steps: list[Callable[[], list[object]]] = [
        lambda: list(producer.open(b"s", _open(), ROUTES, 0.0)),
        lambda: list(producer.offer(_offer(final=False), 0.0)),
    ]
    said = [action for step in (steps if opened_first else steps[::-1]) for action in step()]
    said += producer.offer(_offer(final=True, final_token=WORDS), 1.0)
    accepts = [a.message for a in said if isinstance(a, Reply)]
    assert [(a.complete, a.final_token) for a in accepts if isinstance(a, messages.Accept)] == [
        (False, None),
        (True, WORDS),
    ]
    assert producer.done(b"s", "t") == [Free("r", None)]


def test_a_producer_lets_a_consumer_ask_for_the_words_alone() -> None:
    producer = Producer(Config())
    producer.offer(_offer(final=True, final_token=WORDS), 0.0)
    (reply,) = producer.open(b"s", _open(first_token=8), ROUTES, 0.0)
    assert isinstance(reply, Reply)
    assert reply.message == messages.Accept("t", 0, True, WORDS)


def test_what_is_not_told_is_named() -> None:
    assert unsent([FIRST_TOKEN], []) == "first_token"
    assert unsent([FIRST_TOKEN], [FIRST_TOKEN, "more"]) == ""
    assert unsent([], [FIRST_TOKEN]) == ""


@pytest.mark.parametrize(
    "changes",
    [
        {"first_token": -1},
        {"first_token": "seven"},
        {"first_token": 1 << 31},
        {"top_logprobs": [[1, -0.5]] * (MAX_ALTERNATIVES + 1)},
        {"top_logprobs": [[1]]},
        {"counts": {"x" * 513: 1}},
        {"counts": {f"{n}": n for n in range(33)}},
        {"of another schema": 1},
    ],
)
def test_words_that_are_huge_or_of_another_schema_are_no_message(
    changes: dict[str, object],
) -> None:
    said = msgspec.to_builtins(messages.Accept("t", 1, True, WORDS), builtin_types=(bytes,))
    good = msgspec.msgpack.encode(said)
    assert messages.decode_producer_message(good) == messages.Accept("t", 1, True, WORDS)
    said["words"] |= changes
    with pytest.raises(MalformedMessageError):
        messages.decode_producer_message(msgspec.msgpack.encode(said))
    with pytest.raises(MalformedMessageError):
        messages.decode_producer_message(good[:-3])


def test_a_final_token_without_a_draft_has_no_field_that_older_versions_refuse() -> None:
    assert b"draft" not in msgspec.msgpack.encode(WORDS)
    drafted = msgspec.structs.replace(WORDS, draft=FirstDraft(b"hidden", [3], [0.5]))
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(drafted), type=FinalToken) == drafted


def test_a_consumer_names_the_form_of_draft_that_it_needs() -> None:
    here, there = draft_form(1, 4096, "bfloat16"), draft_form(4, 4096, "bfloat16")
    assert unsent([FIRST_TOKEN, here], [FIRST_TOKEN, there]) == here
    assert needs_drafts([FIRST_TOKEN, here])
    assert not needs_drafts([FIRST_TOKEN])


def test_pickle_asks_no_module_for_what_a_final_token_holds() -> None:
    """Engines pickle it for their workers. `msgspec.UNSET` is in no module that pickle knows, so pickle asks every imported
    module for it, and some of them import what is not installed then: with it in a token this raises, or finds the name."""
    final_token = FinalToken(transfer="a", identity=b"i" * 16, first_token=3)
    assert b"UNSET" not in pickle.dumps(final_token)
