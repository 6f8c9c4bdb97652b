# SPDX-License-Identifier: Apache-2.0
"""Two engines swap prefill and decode while they serve: nothing is lost, and every answer is that of one engine.

It runs after test_unlike.py and shares its last pair. test_role_kills.py swaps engines of unlike parallelism.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from pairs import Pair
from steered import Steered, Users
from test_unlike import PAGE_SIZES
from tools import delta

SWAPS = 6

pytestmark = pytest.mark.parametrize(
    "setup", [PAGE_SIZES], indirect=True, ids=["pages of 32 and 64"]
)


@pytest.fixture
def router(pair: Pair, tmp_path: Path) -> Iterator[Steered]:
    with Steered(pair, tmp_path / "router.log") as made:
        yield made.wait_ready()


def test_roles_swap_under_load(pair: Pair, router: Steered, reference) -> None:
    both = pair.p, pair.d
    with (
        delta(pair.p, "pd_connector:received_transfers_total") as there,
        delta(pair.d, "pd_connector:received_transfers_total") as back,
        Users(router).asking() as users,
    ):
        for n in range(SWAPS):
            prefill, decode = both if n % 2 else both[::-1]
            router.swap(prefill.base_url, decode.base_url)
            users.wait_for(8)
            time.sleep(0.1)
    assert min(there.amount, back.amount) > 0, "KV moved both ways"
    assert users.lost() == []
    assert len(users.asked) >= 8 * SWAPS
    users.assert_answers(reference)
    assert router.client.get("/metrics").count("role_moves_total{") == 2
    pair.assert_idle()
