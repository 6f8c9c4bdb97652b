# SPDX-License-Identifier: Apache-2.0
"""`GET /pd/load`: what the middleware tells a router of its engine."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from admission_fakes import MODEL, Bench, Got

from scheduler_plugins.admission.ledger import Ledger
from scheduler_plugins.admission.report import PATH, decode

CONFIG = SimpleNamespace(
    cache_config=SimpleNamespace(block_size=16, num_gpu_blocks=1000),
    kv_events_config=SimpleNamespace(
        enable_kv_cache_events=True,
        publisher="zmq",
        endpoint="tcp://*:5557",
        replay_endpoint="tcp://*:5558",
    ),
)


def get(bench: Bench, config: Any = CONFIG, key: str = "", keys: tuple[str, ...] = ()) -> Got:
    state = SimpleNamespace(args=SimpleNamespace(api_key=list(keys)), vllm_config=config)
    headers = [(b"authorization", f"Bearer {key}".encode())] if key else []
    scope = {
        "type": "http",
        "method": "GET",
        "path": PATH,
        "headers": headers,
        "app": SimpleNamespace(state=state),
    }
    return asyncio.run(bench._send(scope, b""))


def test_all_ranks_are_told_and_where_events_are(tmp_path: Path) -> None:
    bench = Bench(tmp_path, ranks=2)
    bench.boards[0].write(waiting_s=4.0)
    bench.boards[1].write(waiting_s=0.0)
    told = decode(get(bench).body)
    assert [rank.queued_s for rank in told.ranks] == [4.0, 0.0]
    assert [rank.waiting for rank in told.ranks] == [16, 0]
    assert told.ranks[0].model == MODEL
    assert (told.block_tokens, told.blocks) == (16, 1000)
    assert told.kv_events is not None
    assert (told.kv_events.events, told.kv_events.replay) == ("tcp://*:5557", "tcp://*:5558")


def test_a_rank_that_has_posted_nothing_is_left_out(tmp_path: Path) -> None:
    bench = Bench(tmp_path, ranks=2)
    bench.boards[1].write()
    assert [rank.rank for rank in decode(get(bench, None).body).ranks] == [1]


def test_load_is_told_to_nobody_without_the_servers_key(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    assert get(bench, keys=("secret",)).status == 401
    assert get(bench, key="secret", keys=("secret",)).status == 200


def test_a_clock_that_is_set_back_takes_nothing_from_sums() -> None:
    """The scheduler's clock is that of arrivals, which is the wall clock. A counter that falls is a restart to
    Prometheus."""
    ledger = Ledger()
    for number, now_s in enumerate((10_001.0, 3000.0)):
        ledger.arrived(f"r{number}", "only", 10_000.0, 0.5)
        ledger.token(f"r{number}", now_s)
    assert ledger.classes["only"].ttft.sum_s == 1.0
    assert sum(ledger.classes["only"].ttft.counts) == 2
    assert ledger.age_s("r0", 3000.0) == 0.0
    assert ledger.age_s("r0", 10_003.0) == 2.0
