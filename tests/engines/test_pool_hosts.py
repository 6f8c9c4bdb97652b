# SPDX-License-Identifier: Apache-2.0
"""Two hosts, each with a pool, a carrier and an engine, and Redis between them."""

from __future__ import annotations

import os
import re
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

import pytest
from harness import assert_same_logprobs, completion, fresh_salt, wait_until
from pools import CHUNKS, PROMPT, PooledEngines, counted, hits, sharing_a_pool
from support.redis_servers import RedisServer, redis_server
from tools import TOLERANCE

from pd_connector.pool.carrier.asking import CarrierLink
from pd_connector.pool.settings import SHM_VARIABLE, memory_folder
from pd_connector.tools.launch import VllmEngine


class Host(NamedTuple):
    """A pool of its own, with one engine and a carrier."""

    pool: PooledEngines
    engine: VllmEngine
    carrier: subprocess.Popen[bytes]

    @property
    def link(self) -> CarrierLink:
        return CarrierLink(memory_folder({SHM_VARIABLE: str(self.pool.shm)}))

    def counts(self) -> dict[str, int]:
        status = self.link.status()
        return status.counts if status and not status.problem else {}


class Site(NamedTuple):
    """Two hosts and what is between them."""

    writer: Host
    reader: Host
    redis: RedisServer


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    folder = tmp_path_factory.mktemp("site")
    key = folder / "key"
    key.write_text(secrets.token_hex(32))
    key.chmod(0o600)
    with ExitStack() as opened:
        redis = opened.enter_context(redis_server(folder))
        hosts = []
        for place, page in enumerate((32, 64)):
            logs = folder / str(place)
            logs.mkdir()
            pool = opened.enter_context(sharing_a_pool(logs))
            engine = pool.start(page)
            carrier = carry(redis, key, pool.shm, logs / "carrier.log")
            opened.callback(ended, carrier)
            hosts.append(Host(pool, engine, carrier))
        for host in hosts:
            wait_until(lambda host=host: host.link.status(), "the carrier")
            wait_until(lambda host=host: not host.link.status().problem, "its far store")
        yield Site(*hosts, redis)


def carry(redis: RedisServer, key: Path, shm: Path, log: Path) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "pd_connector", "pool", "carry", "--key-file", str(key)]
    with log.open("wb") as output:
        return subprocess.Popen(
            [*command, "--answers-within", "2"],
            env={**os.environ, SHM_VARIABLE: str(shm), "PD_CONNECTOR_FAR": redis.address},
            stdout=output,
            stderr=output,
        )


def ended(process: subprocess.Popen[bytes]) -> None:
    process.send_signal(signal.SIGCONT)
    process.terminate()
    process.wait(20)


def put(site: Site, salt: str) -> object:
    """Have the writer's host compute a prompt and put its chunks. Returns the answer."""
    before = site.writer.counts().get("put", 0)
    answer = site.writer.pool.computed(site.writer.engine, salt)
    wait_until(lambda: site.writer.counts().get("put", 0) >= before + CHUNKS, "the chunks in Redis")
    return answer


def test_what_one_host_computed_answers_a_prompt_on_another(site: Site) -> None:
    far_hits = 0.0
    for _ in range(3):  # a look-up on a busy machine may come too late
        salt = fresh_salt()
        wanted = put(site, salt)
        found = completion(site.reader.engine, PROMPT, 32, cache_salt=salt)
        assert_same_logprobs(found, wanted, TOLERANCE)
        hits(site.reader.engine)
        if far_hits := counted(site.reader.engine, "pool_far_hits"):
            break
        time.sleep(6)
    assert far_hits == CHUNKS
    assert site.reader.counts()["brought"] >= CHUNKS


def test_a_stranger_in_redis_causes_misses_and_no_wrong_answer(site: Site) -> None:
    salt = fresh_salt()
    wanted = put(site, salt)
    stranger = site.redis.client()
    names = stranger.keys("*")
    assert all(re.fullmatch(rb"pd:[0-9a-f]{64}", name) for name in names)
    for name in names:
        data = bytearray(stranger.get(name))
        data[len(data) // 2] ^= 1
        stranger.set(name, bytes(data))
    before = hits(site.reader.engine)
    found = completion(site.reader.engine, PROMPT, 32, cache_salt=salt)
    assert_same_logprobs(found, wanted, TOLERANCE)
    assert hits(site.reader.engine) == before
    assert site.reader.counts()["not_brought_damaged"] >= 1


def test_without_its_carrier_an_engine_computes_and_waits_for_nobody(site: Site) -> None:
    salt = fresh_salt()
    wanted = put(site, salt)
    site.reader.carrier.send_signal(signal.SIGSTOP)
    try:
        began_s = time.monotonic()
        for _ in range(3):
            found = completion(site.reader.engine, PROMPT, 32, cache_salt=salt)
            assert_same_logprobs(found, wanted, TOLERANCE)
        assert time.monotonic() - began_s < 60
    finally:
        site.reader.carrier.send_signal(signal.SIGCONT)
