# SPDX-License-Identifier: Apache-2.0
"""Two engines swap prefill and decode while they serve: nothing is lost, and every answer is that of one engine.

It runs after test_unlike.py and shares its last pair.
"""

from __future__ import annotations

import itertools
import json
import threading
import time
import urllib.request
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest
from harness import Answer, assert_same_logprobs, completion, wait_until
from pairs import Pair
from test_handoff import prompt_of
from test_unlike import PAGE_SIZES
from tools import TOLERANCE, delta

from pd_connector.tools.launch import RouterProcess

KEY = "0123456789abcdef-operator-of-a-test"
LENGTHS = (40, 131, 700, 1500)
SWAPS = 6

pytestmark = pytest.mark.parametrize(
    "setup", [PAGE_SIZES], indirect=True, ids=["pages of 32 and 64"]
)


class Steered(RouterProcess):
    """A router that its operator steers."""

    def __init__(self, pair: Pair, log_path: Path) -> None:
        super().__init__([pair.p.base_url], [pair.d.base_url], log_path=log_path)
        self.admin_port = self.reserve()
        self.args += ["--admin-port", str(self.admin_port)]

    def post(self, path: str, body: object) -> dict:
        headers = {"Authorization": f"Bearer {KEY}", "Content-Type": "application/json"}
        url = f"http://127.0.0.1:{self.admin_port}{path}"
        asked = urllib.request.Request(url, json.dumps(body).encode(), headers)
        with urllib.request.urlopen(asked, timeout=60) as answer:
            return json.loads(answer.read())

    def swap(self, prefill: str, decode: str) -> None:
        changes = [{"url": prefill, "role": "prefill"}, {"url": decode, "role": "decode"}]
        self.post("/engines/role", changes)


@pytest.fixture
def router(pair: Pair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Steered]:
    monkeypatch.setenv("PD_ROUTER_ADMIN_KEY", KEY)
    made = Steered(pair, tmp_path / "router.log")
    made.start()
    made.wait_ready()
    yield made
    made.stop()


@contextmanager
def load(router: Steered) -> Iterator[list[tuple[list[int], Future[Answer]]]]:
    """Two users, each with one request after the other, until the block ends."""
    ended, asked = threading.Event(), list[tuple[list[int], Future[Answer]]]()
    numbers = itertools.count()

    def user(threads: ThreadPoolExecutor) -> None:
        while not ended.is_set():
            n = next(numbers)
            prompt = prompt_of(LENGTHS[n % len(LENGTHS)], start=37 * (n % 24))
            future = threads.submit(completion, router, prompt, 24)
            asked.append((prompt, future))
            future.exception()

    with ThreadPoolExecutor(2) as threads, ThreadPoolExecutor(2) as users:
        served = [users.submit(user, threads) for _ in range(2)]
        try:
            yield asked
        finally:
            ended.set()
            for one in served:
                one.result()


def test_roles_swap_under_load(pair: Pair, router: Steered, reference) -> None:
    both = pair.p, pair.d
    with (
        delta(pair.p, "pd_connector:received_transfers_total") as there,
        delta(pair.d, "pd_connector:received_transfers_total") as back,
        load(router) as asked,
    ):
        for n in range(SWAPS):
            prefill, decode = both if n % 2 else both[::-1]
            router.swap(prefill.base_url, decode.base_url)
            before = len(asked)
            wait_until(lambda before=before: len(asked) >= before + 8, "some requests")
            time.sleep(0.1)
    assert min(there.amount, back.amount) > 0, "KV moved both ways"
    assert len(asked) >= 8 * SWAPS
    for prompt, answer in asked:
        assert_same_logprobs(answer.result(), reference(prompt, 24), TOLERANCE)
    assert router.client.get("/metrics").count("role_moves_total{") == 2
    pair.assert_idle()
