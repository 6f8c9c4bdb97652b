# SPDX-License-Identifier: Apache-2.0
"""When a comparison has found something, and who is believed after it: without tensors, engines and sockets."""

import dataclasses
import math

import msgspec
import pytest
from support.machines import CONFIG, ROUTES, WHOLE, geometry_of, identity_of

from pd_connector.errors import Cause
from pd_connector.kv.coding import Part
from pd_connector.kv.geometry import DRAFT_LAYERS
from pd_connector.memory.slab import SlotPool
from pd_connector.protocol.consuming.audit import (
    AuditBook,
    Comparison,
    Counterpart,
    Distance,
    relative,
)
from pd_connector.protocol.consuming.codec_choice import CodecChoice
from pd_connector.protocol.consuming.consumer import Consumer
from pd_connector.protocol.consuming.incoming import Dial, Finished, Load, ProducerSession, Tell
from pd_connector.protocol.wire import messages
from pd_connector.protocol.wire.peers import Peer, Source

SOURCE = Source("127.0.0.1", 1, "engine")
(ROUTE,) = ROUTES  # float32: 0.1 of a page, 0.3 of a token, 0.05 of all pages; two layers
PRODUCER = Counterpart(SOURCE, 5, "engine", b"model", "model")
KEY, VALUE = Part.KEY, Part.VALUE


def distance(
    layer: int,
    part: Part,
    by_page: list[float],
    whole: float,
    first_page: int = 0,
    by_token: list[float] | None = None,
) -> Distance:
    """A distance for pages of four tokens; the third token of each page is the furthest."""
    pages = list(range(first_page, first_page + len(by_page)))
    tokens = [4 * page + 2 for page in pages]
    furthest = by_token or by_page
    return Distance(layer, part, pages, by_page, tokens, furthest, whole**2, 1.0, range(8))


def right(*layers: int) -> list[Distance]:
    return [distance(layer, KEY, [0.01, 0.0], 0.001) for layer in layers]


def judged(*found: Distance) -> object:
    comparison = Comparison()
    comparison.note(ROUTE, found)
    return comparison.judge([PRODUCER], ROUTES)


def test_all_that_is_near_passes() -> None:
    assert judged(*right(0, 1)) is None


def test_a_page_that_is_far_is_named() -> None:
    far = distance(1, VALUE, [0.01, 0.7], 0.0, 4)
    assert judged(*right(0, 1), far) == (
        Cause.AUDIT,
        "layer 1, page 5, V: KV is 0.7 apart from what this engine computes (at most 0.1)",
    )


def test_a_token_that_is_far_is_named_where_its_page_is_near() -> None:
    far = distance(1, VALUE, [0.01, 0.09], 0.0, 4, by_token=[0.02, 0.9])
    assert judged(*right(0, 1), far) == (
        Cause.AUDIT,
        "layer 1, token 22, V: KV is 0.9 apart from what this engine computes (at most 0.3)",
    )


def test_what_is_a_little_wrong_everywhere_is_named_by_its_layer() -> None:
    little = distance(0, KEY, [0.08, 0.08], 0.08)
    cause, detail = judged(little, *right(1))  # type: ignore[misc]
    assert cause == Cause.AUDIT
    assert detail.startswith("layer 0, all its pages together, K: KV is 0.08 apart")


@pytest.mark.parametrize(("passed", "allowed"), [("raw", 0.05), ("int8", 0.07)])
def test_kv_that_had_passed_in_a_codec_before_may_be_further_away(
    passed: str, allowed: float
) -> None:
    """As a chunk of the pool whose writer took it in INT8."""
    for whole in (0.06, 0.08):
        comparison = Comparison()
        comparison.note(ROUTE, [distance(0, KEY, [whole], whole), *right(1)], passed)
        assert (comparison.judge([PRODUCER], ROUTES) is None) == (whole < allowed)


def test_the_first_wrong_layer_is_named_in_whatever_order_they_come() -> None:
    """Later ones compute from what it gave them."""
    later = distance(1, VALUE, [0.01, 0.7], 0.0, 4)
    page = distance(0, KEY, [0.2, 0.0], 0.0, 4)
    little = distance(0, KEY, [0.08, 0.08], 0.08, 4)
    for first in (page, little):
        _, detail = judged(later, first)  # type: ignore[misc]
        assert detail.startswith("layer 0,")


@pytest.mark.parametrize("what", [math.nan, math.inf])
@pytest.mark.parametrize("where", ["page", "token", "layer"])
def test_what_is_no_distance_is_far(what: float, where: str) -> None:
    page, token, whole = (what if where == each else 0.0 for each in ("page", "token", "layer"))
    far = distance(0, KEY, [page], whole, by_token=[token])
    found = judged(*right(0, 1), far)
    assert found is not None
    assert f"layer 0, {'all its pages' if where == 'layer' else where}" in found[1]  # type: ignore[index]


def test_nothing_is_concluded_before_all_has_come() -> None:
    """A chunk of a running prefill may be taken back; then the load fails, and is not judged."""
    comparison = Comparison()
    comparison.note(ROUTE, [distance(0, KEY, [1.0], 1.0)])
    assert comparison.counterparts == ()


def test_a_layer_of_which_nothing_was_compared_is_not_passed_over() -> None:
    cause, detail = judged(*right(0))  # type: ignore[misc]
    assert (cause, "layer 1" in detail) == (Cause.WINDOW, True)


def test_a_comparison_tells_how_far_apart_pages_and_layers_were() -> None:
    comparison = Comparison()
    assert str(comparison) == "nothing was compared"
    comparison.note(ROUTE, [*right(0, 1), distance(0, VALUE, [0.02], 0.01, by_token=[0.05])])
    assert str(comparison) == (
        "5 pages of layers compared, largest distance K 0.01, V 0.02; of a token K 0.01, V 0.05; "
        "of a whole layer K 0.001, V 0.01"
    )


def test_a_draft_that_differs_makes_no_wrong_answers() -> None:
    assert judged(*right(0, 1), distance(DRAFT_LAYERS, KEY, [1.0], 1.0)) is None


def test_sums_of_squares() -> None:
    assert relative(0.0, 0.0) == 0.0
    assert relative(1.0, 4.0) == 0.5
    assert relative(1.0, 0.0) == math.inf
    assert relative(math.nan, 1.0) == math.inf


def test_who_has_passed_is_believed_for_that_adapter_and_model_until_it_starts_anew() -> None:
    book = AuditBook()

    def refused(adapter: str = "", *, compares: bool = False, **changes: object) -> object:
        found = book.problem(PRODUCER._replace(**changes), adapter, compares=compares)  # type: ignore[arg-type]
        return found and found[0]

    assert refused() == Cause.UNAUDITED
    assert refused(compares=True) is None
    book.passed(PRODUCER, "")
    assert refused() is None
    assert refused("adapter") == Cause.UNAUDITED
    assert refused(epoch=6) == Cause.UNAUDITED
    assert refused(model=b"other") == Cause.UNAUDITED
    book.passed(PRODUCER, "adapter")
    book.distrust(SOURCE, 5, "", "it")
    assert [refused(), refused("adapter"), refused(compares=True)] == [Cause.AUDIT] * 3
    assert refused(epoch=6) == Cause.UNAUDITED
    assert book.distrusted == 1


def test_what_is_wrong_with_one_adapter_is_distrusted_with_that_adapter_only() -> None:
    book = AuditBook()

    def refused(adapter: str, *, compares: bool = False) -> object:
        found = book.problem(PRODUCER, adapter, compares=compares)
        return found and found[0]

    for adapter in ("", "sql 1", "law 1"):
        book.passed(PRODUCER, adapter)
    book.distrust(SOURCE, 5, "sql 1", "it")
    assert [refused("sql 1"), refused("sql 1", compares=True)] == [Cause.AUDIT] * 2
    assert [refused(""), refused("law 1")] == [None, None], "others are right"
    assert refused("sql 2") == Cause.UNAUDITED, "other content under its name may pass"
    assert refused("sql 2", compares=True) is None
    assert book.distrusted == 1, "one producer, whatever is wrong with it"
    book.distrust(SOURCE, 5, "", "the model")
    assert [refused(adapter) for adapter in ("", "law 1", "sql 2")] == [Cause.AUDIT] * 3


def test_a_load_is_refused_before_anything_is_asked_for() -> None:
    book, pool = AuditBook(), SlotPool(CONFIG.slots)
    consumer = Consumer(CONFIG, geometry_of(WHOLE), pool, one_sided=True, audits=book)
    load = Load("r", "t", (Peer(SOURCE, WHOLE),), identity_of("t"), 0, 12, (range(20, 26),), False)
    assert consumer.load(load, 0.0) == [Dial(SOURCE)]
    session = ProducerSession(5, CONFIG.slot_bytes, ROUTES, engine_id="engine")
    actions = consumer.session_up(SOURCE, session, 0.0)
    assert [type(a.message) for a in actions if isinstance(a, Tell)] == [messages.Cancel]
    (ended,) = [action for action in actions if isinstance(action, Finished)]
    assert (ended.cause, ended.comparison) == (Cause.UNAUDITED, None)
    compares = load._replace(request="c", transfer="u", compares=True)
    (tell,) = consumer.load(compares, 0.0)
    assert isinstance(tell, Tell)
    assert isinstance(tell.message, messages.Open)


def test_what_is_compared_comes_by_the_path_of_what_is_used() -> None:
    consumer = Consumer(CONFIG, geometry_of(WHOLE), SlotPool(CONFIG.slots), one_sided=True)
    session = ProducerSession(5, CONFIG.slot_bytes, ROUTES, read=True, direct=True)
    consumer.session_up(SOURCE, session, 0.0)
    pages = (range(20, 26),)
    load = Load("r", "t", (Peer(SOURCE, WHOLE),), identity_of("t"), 0, 12, pages, False)
    opened = []
    for each in (load, load._replace(request="c", transfer="u", compares=True)):
        (tell,) = consumer.load(each, 0.0)
        assert isinstance(tell, Tell)
        opened.append(msgspec.structs.asdict(tell.message)["direct"])
    assert opened == [True, True]


def test_a_path_that_no_audit_has_passed_is_audited_before_it_is_used() -> None:
    """With `codec: auto` some transfers come coded, and some do not."""
    book = AuditBook()
    consumer = Consumer(
        CONFIG, geometry_of(WHOLE), SlotPool(CONFIG.slots), one_sided=True, audits=book
    )
    coded = tuple(dataclasses.replace(route, codec="int8") for route in ROUTES)
    session = ProducerSession(
        5, CONFIG.slot_bytes, coded, way="tcp, written", plain=ROUTES, choice=CodecChoice(2.0)
    )
    consumer.session_up(SOURCE, session, 0.0)

    def opened(transfer: str, *, compares: bool) -> object:
        """Whether it is wanted coded; the cause, where it is not asked for."""
        load = Load(
            transfer, transfer, (Peer(SOURCE, WHOLE),), identity_of(transfer), 0, 12,
            (range(20, 26),), False, compares=compares,
        )  # fmt: skip
        for action in consumer.load(load, 0.0):
            if isinstance(action, Tell) and isinstance(action.message, messages.Open):
                consumer.drop(transfer, Cause.ABORTED, 0.0)
                return action.message.coded
            if isinstance(action, Finished):
                return action.cause
        raise AssertionError

    by_int8, by_raw = (session.counterpart(SOURCE, coded=coded) for coded in (True, False))
    assert (by_int8.path, by_raw.path) == ("tcp, written, int8", "tcp, written, raw")
    assert opened("a", compares=False) == Cause.UNAUDITED
    assert opened("b", compares=True) is True
    book.passed(by_int8, "")
    assert consumer.unaudited(SOURCE, "") == by_raw.path
    assert opened("c", compares=False) is True
    assert opened("d", compares=True) is False, "the path that has not passed"
    assert session.choice is not None
    session.choice.coded = False
    assert opened("e", compares=False) == Cause.UNAUDITED
    book.passed(by_raw, "")
    assert consumer.unaudited(SOURCE, "") == ""
    assert opened("f", compares=False) is False
