# SPDX-License-Identifier: Apache-2.0
"""Whether transfers are coded follows from how fast KV comes with the codec and without."""

import pytest

from pd_connector.protocol.consuming import codec_choice
from pd_connector.protocol.consuming.codec_choice import CHANGED, PROBE, SOON, CodecChoice
from pd_connector.protocol.consuming.incoming import ProducerSession

SAVING = 2.0


def transfers(choice: CodecChoice, link: float, coders: float, count: int) -> list[bool]:
    """Measure `count` transfers: over a link, in wire bytes a second, with coders, in bytes of KV a second. Returns
    which were coded."""
    done = []
    for _ in range(count):
        coded = choice.coded
        choice.measured(coded=coded, wire_bytes_per_s=min(link, coders / SAVING) if coded else link)
        done.append(coded)
    return done


@pytest.mark.parametrize(("link", "faster"), [(100e6, True), (1_000e6, False)])
def test_the_faster_way_is_taken_once_both_are_measured(link: float, faster: bool) -> None:
    choice = CodecChoice(SAVING)
    done = transfers(choice, link, coders=500e6, count=40)
    assert done[:2] == [True, False], "the codec first: on a slow link raw costs most"
    assert done[2:].count(faster) >= 35


def test_measuring_the_slower_way_costs_a_few_percent() -> None:
    for link in (100e6, 240e6, 260e6, 1_000e6):
        choice = CodecChoice(SAVING)
        done = transfers(choice, link, coders=500e6, count=1_000)
        best = max(link, min(link * SAVING, 500e6))
        seconds = sum(1 / (min(link * SAVING, 500e6) if coded else link) for coded in done)
        assert seconds < 1.07 * len(done) / best
        assert done.count(min(done, key=done.count)) >= 3, "and never ends"


@pytest.mark.parametrize("soon", [SOON, PROBE])
def test_coders_that_are_slow_at_first_are_not_given_up(
    monkeypatch: pytest.MonkeyPatch, soon: int
) -> None:
    """Their loops are compiled during the first transfer."""
    monkeypatch.setattr(codec_choice, "SOON", soon)
    choice = CodecChoice(SAVING)
    transfers(choice, 120e6, coders=95e6, count=1)
    done = transfers(choice, 120e6, coders=500e6, count=12)
    assert all(done[8:]) == (soon == SOON)


def test_it_decides_again_when_the_link_changes() -> None:
    choice = CodecChoice(SAVING)
    assert not transfers(choice, 1_000e6, coders=500e6, count=10)[-1]
    assert transfers(choice, 100e6, coders=500e6, count=12)[-1], f"{CHANGED} times slower"
    assert not transfers(choice, 1_000e6, coders=500e6, count=20 * PROBE)[-1]


def test_it_decides_again_when_the_coders_become_slower() -> None:
    choice = CodecChoice(SAVING)
    assert transfers(choice, 300e6, coders=600e6, count=10)[-1]
    assert not transfers(choice, 300e6, coders=100e6, count=10)[-1]


def test_the_log_is_told_once_of_each_change() -> None:
    choice = CodecChoice(SAVING)
    told = []
    for link in [1_000e6] * 10 + [100e6] * 12:
        transfers(choice, link, coders=500e6, count=1)
        told.append(choice.news())
    said = [news for news in told if news]
    assert [news.split(":")[0] for news in said] == ["raw", "codec"]


def test_the_link_rate_is_that_of_the_way_that_is_taken() -> None:
    """Chunk sizes and overlap follow it."""
    session = ProducerSession(1, 1 << 20, (), plain=(), choice=CodecChoice(SAVING))
    assert session.coded
    session.measured(250, 1.0, coded=True)
    assert not session.coded
    assert session.bytes_per_s is None, "raw was not measured yet"
    session.measured(1_000, 1.0, coded=False)
    assert (session.coded, session.bytes_per_s) == (False, 1_000)
