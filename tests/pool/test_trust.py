# SPDX-License-Identifier: Apache-2.0
"""The book of writers that are believed, and of those that are not."""

from __future__ import annotations

from pd_connector.pool.trust import MOST_WRITERS, WriterTrust


def writer(number: int) -> bytes:
    return number.to_bytes(16, "big")


def test_the_book_forgets_the_oldest_writers_and_compares_them_again() -> None:
    trust = WriterTrust("own", audits=True)
    for number in range(MOST_WRITERS + 1):
        trust.passed(writer(number))
    assert trust.problem("other", writer(0)) is not None
    assert trust.problem("other", writer(1)) is None
    for number in range(MOST_WRITERS + 2):
        trust.distrust(writer(number), "it differs")
    assert len(trust._distrusted) == MOST_WRITERS
    assert len(trust._passed) == 0
    found = trust.problem("own", writer(MOST_WRITERS + 1))
    assert found is not None
    assert "it differs" in found[1]
