# SPDX-License-Identifier: Apache-2.0
"""What carriers tell routers of a far store: which chunks it has, and whether it is still the same one."""

from collections.abc import Sequence

import pytest
from chunks import chain, save
from support.far_hosts import KEY, Host, NewHost
from support.far_objects import Objects
from support.redis_servers import RedisServer
from support.waits import until

from pd_connector.pool.carrier import far_journal, putting
from pd_connector.pool.carrier.far_journal import FarJournal, read_mark
from pd_connector.pool.carrier.messages import FarPage
from pd_connector.pool.far.seal import Seal

A, B = "a" * 32, "b" * 32


def keys(count: int, first: int = 0) -> list[bytes]:
    return [number.to_bytes(32, "big") for number in range(first, first + count)]


def pages(journal: FarJournal, after: int = 0) -> list[FarPage]:
    read = [journal.page(after)]
    while read[-1].more:
        read.append(journal.page(read[-1].next))
    return read


def known(read: Sequence[FarPage], before: set[bytes] | None = None) -> set[bytes]:
    """What a router knows after these pages."""
    there = set(before or ())
    for page in read:
        if page.whole:
            there.clear()
        for key, is_there in page.events:
            (there.add if is_there else there.discard)(key)
    return there


def test_a_reader_learns_what_is_there_and_then_what_changes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(far_journal, "MOST_PAGE", 3)
    journal = FarJournal()
    journal.note(keys(10), True)
    journal.note(keys(2), False)
    read = pages(journal)
    assert [page.whole for page in read] == [True] + [False] * (len(read) - 1)
    assert known(read) == set(keys(8, 2))
    journal.note(keys(1), True)
    further = pages(journal, read[-1].next)
    assert [(page.whole, page.events) for page in further] == [(False, [(keys(1)[0], True)])]
    assert pages(journal, further[-1].next)[0].events == []


def test_a_chunk_that_was_never_there_is_told_as_gone_because_another_host_may_have_told_of_it() -> (
    None
):
    journal = FarJournal()
    journal.note(keys(1), False)
    assert journal.page(0).events == [(keys(1)[0], False)]


def test_a_page_of_an_earlier_carrier_begins_the_whole() -> None:
    first, second = FarJournal(), FarJournal()
    for journal in (first, second):
        journal.note(keys(3), True)
    page = second.page(first.page(0).next)
    assert page.whole
    assert len(page.events) == 3


def test_a_store_with_another_mark_has_nothing_of_what_was_there() -> None:
    journal = FarJournal()
    assert not journal.is_of(A), "the first is not a change"
    journal.note(keys(3), True)
    after = journal.page(0).next
    assert not journal.is_of(A)
    assert journal.is_of(B)
    assert journal.page(after) == FarPage(B, [], journal.page(0).next, whole=True)


def test_a_journal_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(far_journal, "MOST_KEYS", 8)
    journal = FarJournal()
    after = journal.page(0).next
    for round_ in range(50):
        journal.note(keys(4, round_ % 3), round_ % 2 == 0)
    journal.note(keys(20), True)
    assert known(pages(journal)) == set(keys(8, 12)), "the latest"
    assert known(pages(journal, after)) == set(keys(8, 12)), "a reader that is far behind"


def mark(far: Objects, *of: bytes) -> str:
    return read_mark(far, Seal(of))  # type: ignore[arg-type]


@pytest.mark.parametrize("overwrites", [True, False])
@pytest.mark.parametrize("longer", [0, 1])
def test_all_carriers_read_one_mark_and_a_stranger_cannot_write_it(
    overwrites: bool, longer: int
) -> None:
    far = Objects(overwrites=overwrites)
    first = mark(far, KEY)
    assert mark(far, KEY) == first
    (name,) = far.objects
    far.objects[name] = bytes(len(far.objects[name]) + longer)
    second = mark(far, KEY)
    assert second not in (first, "0" * 32)
    assert mark(far, KEY) == second, "it was put again"


@pytest.mark.parametrize("overwrites", [True, False])
def test_a_mark_that_is_listed_and_cannot_be_read_is_no_other_mark(overwrites: bool) -> None:
    far = Objects(overwrites=overwrites)
    first = mark(far, KEY)
    far.gives = False
    assert mark(far, KEY) == ""
    far.gives = True
    assert mark(far, KEY) == first


def test_a_mark_that_cannot_be_read_back_is_none() -> None:
    far = Objects()
    far.gives = False
    assert mark(far, KEY) == "", "a store that takes everything and gives nothing"


def test_while_the_key_is_changed_all_hosts_read_the_mark_of_the_old_one() -> None:
    far, new = Objects(), b"n" * 32
    first = mark(far, KEY)
    assert mark(far, new, KEY) == first
    assert mark(far, new) != first, "control: a host without the old key"
    assert mark(far, new, KEY) == first


def test_two_hosts_tell_of_one_store_and_a_restart_empties_what_both_tell(
    new_host: NewHost, redis: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(putting, "_MARKS_S", 0.1)
    a, b = new_host("a"), new_host("b")
    chunks = chain("prompt", 9)

    def told(host: Host) -> FarPage:
        page = host.store.carrier.far_page(0)
        assert page is not None
        return page

    def there(host: Host) -> set[bytes]:
        return known(pages(host.carrier.journal))

    save(a.own, chunks)
    until(lambda: there(a) >= set(chunks), "what a has put", 60)
    until(lambda: told(a).far == told(b).far != "", "both have one mark", 60)
    assert b.store.carrier.find(chunks).sizes
    assert there(b) >= set(chunks), "what b has found, also between the places that it asked for"
    before = told(a).far
    redis.client().flushall()
    until(lambda: told(a).far == told(b).far not in ("", before), "another mark", 60)
    assert not there(b)


def test_a_chunk_that_is_gone_is_told_when_it_is_looked_for(
    new_host: NewHost, redis: RedisServer
) -> None:
    a, b = new_host("a"), new_host("b")
    chunks = chain("prompt", 3)
    save(a.own, chunks)
    until(lambda: known(pages(a.carrier.journal)) >= set(chunks), "what a has put", 60)
    redis.client().delete(*[f"pd:{Seal((KEY,)).names(chunks[0])[0]}"])
    assert b.store.carrier.find(chunks).sizes == []
    assert (chunks[0], False) in told_events(b)


def test_look_ups_of_chunks_that_nobody_has_push_nothing_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(far_journal, "MOST_KEYS", 8)
    monkeypatch.setattr(far_journal, "MOST_GONE", 4)
    journal = FarJournal()
    journal.note(keys(8), True)
    for first in range(100, 200):
        journal.note(keys(1, first), False)
        assert known(pages(journal)) == set(keys(8))
    assert len(journal._places) <= 12
    journal.note(keys(1, 3), False)
    assert known(pages(journal)) == set(keys(8)) - set(keys(1, 3))


def told_events(host: Host) -> list[tuple[bytes, bool]]:
    return [event for page in pages(host.carrier.journal) for event in page.events]
