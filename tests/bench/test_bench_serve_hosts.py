# SPDX-License-Identifier: Apache-2.0
"""`bench serve --far`: when its next step may begin: all is put, and engines look into the far store again after a fault."""

import shutil
import tempfile
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace

import pytest
from support.far_hosts import KEY, Host
from support.redis_servers import redis_server
from support.waits import until

from pd_bench.serve.hosts import BenchHost, _Run
from pd_bench.serve.trace import TimedRequest
from pd_connector.pool.carrier import asking
from pd_connector.pool.carrier.messages import Status
from pd_connector.pool.settings import SHM_VARIABLE, memory_folder


@pytest.mark.parametrize(
    ("look_ups", "looks"),
    [
        ([1, 1], True),
        ([0, 1], None),  # it leaves the store alone
        ([1, 0], None),  # the one look-up while it does
    ],
)
def test_an_engine_looks_into_the_far_store_again_if_two_prompts_in_a_row_do(look_ups, looks):
    counts, left = {"finds_none": 5, "finds_found": 2}, iter(look_ups)

    def post(path, body, timeout_s):
        assert body["kv_transfer_params"] == {"pool": {"write": False}}
        assert len(body["prompt"]) >= 256, "a chunk has 128 tokens"
        counts["finds_none"] += next(left)
        return {"choices": [{"text": "x"}]}

    engine = SimpleNamespace(client=SimpleNamespace(model=lambda: "m", post=post))
    host = SimpleNamespace(
        engines=[engine], status=lambda: Status(far="redis://h", sealed=True, counts=dict(counts))
    )
    run = _Run([host], None, None, [], print)
    assert run._looks_far(host, engine) is looks


def test_without_a_carrier_an_engine_does_not_look_into_the_far_store():
    answer = {"choices": [{"text": "x"}]}
    client = SimpleNamespace(model=lambda: "m", post=lambda *_, **__: answer)
    host = SimpleNamespace(engines=[SimpleNamespace(client=client)], status=lambda: None)
    assert _Run([host], None, None, [], print)._looks_far(host, host.engines[0]) is None


@pytest.mark.parametrize(
    ("loaded", "asked", "said"),
    [
        ([0, 3], 2, []),  # the first one is compared
        ([0, 0, 0], 3, ["b0 has computed what the far store has: it found that faster"]),
    ],
)
def test_an_engine_is_asked_for_what_the_other_host_computed_until_it_loads(
    monkeypatch, loaded, asked, said
):
    monkeypatch.setattr(_Run, "_looks_far", lambda *_: True)
    far, sent, comes, lines = [0.0], [], iter(loaded), []

    def post(path, body, timeout_s):
        if body["prompt"].startswith("prompt"):
            sent.append(body["prompt"])
            far[0] += next(comes)
        return {"choices": [{"text": "x"}]}

    client = SimpleNamespace(model=lambda: "m", post=post)
    engine = SimpleNamespace(client=client, name="b0")
    host = SimpleNamespace(engines=[engine], chunks=lambda: (far[0], far[0]))
    run = _Run([host], None, None, [], lines.append)
    prompts = [TimedRequest(0.0, f"prompt {number}", 2) for number in range(3)]
    while run._loads_far(host, engine, prompts) is None:
        pass
    assert len(set(sent)) == asked
    assert lines == said


def test_a_host_has_put_all_when_the_far_store_has_every_chunk(monkeypatch, tmp_path):
    monkeypatch.setattr(asking, "FIND_S", 30.0)  # a busy machine
    with ExitStack() as opened:
        redis = opened.enter_context(redis_server(tmp_path))
        shm = Path(tempfile.mkdtemp(prefix="pd-pool-test-", dir="/dev/shm"))
        opened.callback(shutil.rmtree, shm)
        bench = BenchHost("a", None, shm, [], [], redis.address, tmp_path / "log")
        folder = memory_folder({SHM_VARIABLE: str(shm)})
        host = Host(folder.parent, redis.address, (KEY,), 64 << 20, 30.0)
        opened.callback(host.close)
        host.ready()
        assert not bench.has_put_all(), "there is nothing yet"
        for number in range(3):
            save(host.own, bytes([number]) * 16)
        until(bench.has_put_all)
        host.stop()
        assert not bench.has_put_all(), "without a carrier"
        host.start()
        until(bench.has_put_all, "a carrier that finds all of them there")
        assert host.count("put") == 0


def save(store, key):
    writing = store.begin(key, parent=b"", part="p", parts=1, nbytes=1000)
    with writing:
        writing.write(0, memoryview(bytes(1000)))
        assert writing.publish()
