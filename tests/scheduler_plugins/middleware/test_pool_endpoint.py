# SPDX-License-Identifier: Apache-2.0
"""`GET /pd/pool`: what an engine's API server tells a router of the KV pool of its host."""

from __future__ import annotations

import asyncio
import contextlib
import json
import shutil
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from chunks import chain, save
from support.pool_stores import wait_for_books
from support.waits import until

from pd_connector.pool.advertised import AdvertisedEngine
from pd_connector.pool.carrier import asking
from pd_connector.pool.carrier.asking import CarrierLink
from pd_connector.pool.carrier.far_journal import FarJournal
from pd_connector.pool.carrier.messages import SOCKET, SocketFolder, Status, new_socket
from pd_connector.pool.carrier.server import CarrierServer
from pd_connector.pool.settings import SHM_VARIABLE, memory_folder
from pd_connector.pool.store import reports
from pd_connector.pool.store.local import LocalStore
from pd_connector.pool.store.tier_storage import Space
from scheduler_plugins.admission.pool_report import PATH, PoolReport, decode
from scheduler_plugins.middleware import pool as pool_middleware
from scheduler_plugins.middleware.middleware import AdmissionMiddleware
from scheduler_plugins.middleware.pool import PoolMiddleware
from scheduler_plugins.router.engines.inquiry import BRIEF_S

ENGINE, MODEL = "7b0e-engine", "ab" * 32
ANSWERED_BY_VLLM = 418


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> Iterator[LocalStore]:
    """The store as an engine of this host has opened it."""
    folder = Path(tempfile.mkdtemp(prefix="pd-test-", dir="/dev/shm"))
    monkeypatch.setenv(SHM_VARIABLE, str(folder))
    wait_for_books(monkeypatch)
    memory_folder().mkdir(parents=True, mode=0o700)
    opened = LocalStore(Space(memory_folder(), 64 << 20))
    yield opened
    opened.close()
    shutil.rmtree(folder)


def told(store: LocalStore, engine: str = ENGINE, model: str = MODEL) -> None:
    """The engine's scheduler knows its model."""
    speeds = {"memory": 2e9}
    about = AdvertisedEngine(engine=engine, model=model, chunk_bytes=4096, bytes_per_s=speeds)
    store.advertise(about.encode())


class Server:
    """An API server of vLLM with a middleware."""

    def __init__(
        self, pool: object = True, kind: Callable[..., Any] = PoolMiddleware, **transfer: Any
    ) -> None:
        self.transfer = {
            "engine_id": ENGINE,
            "kv_connector": "PDConnector",
            "kv_connector_extra_config": {"pool": pool},
            **transfer,
        }
        self.keys: tuple[str, ...] = ()
        self.middleware = kind(self._app)

    async def _app(self, scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": ANSWERED_BY_VLLM, "headers": []})
        await send({"type": "http.response.body", "body": b"{}"})

    def get(self, query: str = "", key: str = "", path: str = PATH) -> tuple[int, bytes]:
        config = SimpleNamespace(kv_transfer_config=SimpleNamespace(**self.transfer))
        state = SimpleNamespace(args=SimpleNamespace(api_key=list(self.keys)), vllm_config=config)
        scope = {
            "type": "http",
            "method": "GET",
            "path": path,
            "query_string": query.encode(),
            "headers": [(b"authorization", f"Bearer {key}".encode())] if key else [],
            "app": SimpleNamespace(state=state),
        }
        sent: list[Any] = []

        async def send(message: Any) -> None:
            sent.append(message)

        async def receive() -> Any:
            return {"type": "http.request", "body": b"", "more_body": False}

        asyncio.run(self.middleware(scope, receive, send))
        return sent[0]["status"], b"".join(one.get("body", b"") for one in sent[1:])

    def page(self, after: int | None = None) -> PoolReport:
        status, body = self.get("" if after is None else f"after={after}")
        assert status == 200, body
        return decode(body)

    def refusal(self, query: str = "") -> tuple[int, str]:
        status, body = self.get(query)
        return status, json.loads(body)["error"]["message"]


def test_a_journal_is_told_from_its_beginning_and_then_what_follows(store: LocalStore) -> None:
    told(store)
    server, keys = Server(), chain("a", 3)
    save(store, keys[:2])
    first = server.page(0)
    assert (first.whole, first.more) == (True, False)
    assert [(one.key, one.tier) for one in first.events] == [(k.hex(), "memory") for k in keys[:2]]
    save(store, keys[2:])
    store.remove(keys[:1])
    until(lambda: store.was_stored(keys[0]), "the removal in the books")
    further = server.page(first.next)
    assert not further.whole
    assert {one.key: one.tier for one in further.events} == {
        keys[2].hex(): "memory",
        keys[0].hex(): "",
    }
    assert server.page(further.next).events == ()


def test_what_the_carrier_tells_of_the_far_store_is_told_on(store: LocalStore) -> None:
    told(store)
    server, journal, keys = Server(), FarJournal(), chain("a", 3)

    def far_page(after: int) -> PoolReport:
        status, body = server.get(f"after={after}&of=far")
        assert status == 200, body
        return decode(body)

    assert (server.page().far, far_page(0).far, far_page(0).events) == ("", "", ())
    journal.is_of("f" * 32)
    journal.note(keys, True)
    carrier: Any = SimpleNamespace(
        journal=journal, status=lambda: Status(far="redis://h", sealed=True, mark=journal.far)
    )
    serving = CarrierServer(carrier, memory_folder())
    try:
        assert server.page().far == "f" * 32
        first = far_page(0)
        assert (first.far, first.store, first.whole) == ("f" * 32, store.id, True)
        assert [(one.key, one.tier) for one in first.events] == [(k.hex(), "far") for k in keys]
        journal.note(keys[:1], False)
        further = far_page(first.next)
        assert not further.whole
        assert [(one.key, one.tier) for one in further.events] == [(keys[0].hex(), "")]
        assert server.page(0).events == (), "the host's own journal is another"
    finally:
        serving.close()
    assert (server.page().far, far_page(0).events) == ("", ())


def test_a_carrier_that_hangs_hides_neither_the_hosts_own_pool_nor_soon_the_far_store(
    store: LocalStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    told(store)
    server, journal, (key,), waited = Server(), FarJournal(), chain("a", 1), []
    save(store, [key])
    request = CarrierLink._request

    def waiting(self: CarrierLink, message: Any, silent_s: float, most_s: float) -> Any:
        waited.append(max(silent_s, most_s))
        return request(self, message, 30.0 if answers else 0.01, 30.0)

    monkeypatch.setattr(CarrierLink, "_request", waiting)
    monkeypatch.setattr(pool_middleware, "_MOST_SILENT", 4)
    answers = True
    journal.is_of("f" * 32)
    carrier: Any = SimpleNamespace(
        journal=journal, status=lambda: Status(far="redis://h", sealed=True, mark=journal.far)
    )
    serving = CarrierServer(carrier, memory_folder())
    assert server.page().far == "f" * 32, "control"
    serving.close()
    answers = False
    folder, hanging = SocketFolder(memory_folder()), new_socket()
    with contextlib.suppress(FileNotFoundError):
        (memory_folder() / SOCKET).unlink()
    hanging.bind(folder.path)
    hanging.listen()
    try:
        for _ in range(2):
            assert (server.page().far, server.page().store) == ("f" * 32, store.id)
        page = decode(server.get("after=77&of=far")[1])
        assert (page.far, page.events, page.next) == ("", (), 0), "it is silent for too long"
        assert server.page().far == ""
        assert [one.key for one in server.page(0).events] == [key.hex()]
    finally:
        hanging.close()
        folder.close()
    assert max(waited) + asking.FIND_S < BRIEF_S / 2, "a router has not given up"


def test_a_page_of_a_far_store_whose_carrier_hangs_is_empty_and_goes_on_later(
    store: LocalStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    told(store)
    server = Server()
    server.page()
    carrier = server.middleware._opened[1]
    carrier._far = "f" * 32
    monkeypatch.setattr(CarrierLink, "far_page", lambda *_: None)
    monkeypatch.setattr(CarrierLink, "is_there", True)
    page = decode(server.get("after=77&of=far")[1])
    assert (page.far, page.events, page.next, page.whole) == ("f" * 32, (), 77, False)


def test_another_journal_than_the_far_stores_is_refused_by_name(store: LocalStore) -> None:
    told(store)
    assert Server().refusal("after=0&of=near") == (400, "of 'near': must be far, or be left out")


def test_a_long_journal_comes_in_pages(store: LocalStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reports, "PAGE_EVENTS", 4)
    told(store)
    keys = chain("a", 10)
    save(store, keys)
    server, found, after, begun = Server(), [], 0, []
    while True:
        page = server.page(after)
        begun.append(page.whole)
        found += [one.key for one in page.events]
        after = page.next
        if not page.more:
            break
    assert found == [key.hex() for key in keys]
    assert begun == [True, False, False]


def test_an_engine_tells_its_model_and_its_speed_without_the_journal(store: LocalStore) -> None:
    told(store)
    save(store, chain("a", 2))
    report = Server().page()
    assert (report.model, report.chunk_tokens, report.chunk_bytes) == (MODEL, 128, 4096)
    assert report.bytes_per_s == {"memory": 2e9}
    assert report.events == ()


def test_all_engines_of_a_host_name_the_same_store_and_another_host_names_another(
    store: LocalStore, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    told(store)
    second = LocalStore(Space(memory_folder(), 64 << 20))
    told(second, "second", "cd" * 32)
    a, b = Server().page(), Server(engine_id="second").page()
    assert a.store == b.store == store.id
    assert (a.model, b.model) == (MODEL, "cd" * 32)
    second.close()
    monkeypatch.setenv(SHM_VARIABLE, str(tmp_path))
    memory_folder().mkdir(parents=True, mode=0o700)
    elsewhere = LocalStore(Space(memory_folder(), 64 << 20))
    told(elsewhere)
    assert Server().page().store == elsewhere.id != store.id
    elsewhere.close()


def test_data_parallel_ranks_tell_for_their_engine_and_no_other_engine_does(
    store: LocalStore,
) -> None:
    told(store, f"{ENGINE}_dp1")
    assert Server().page().model == MODEL
    told(store, f"{ENGINE}0")
    assert Server().refusal()[0] == 503


def test_an_engine_that_does_not_know_its_weights_tells_nothing(store: LocalStore) -> None:
    assert Server().refusal("after=0")[0] == 503, "it has told nothing yet"
    told(store)
    assert Server().page(0).model == MODEL
    told(store, model="")
    assert Server().refusal("after=0")[0] == 503, "its weights have changed"


def test_a_dead_engine_tells_nothing(store: LocalStore) -> None:
    dead = LocalStore(Space(memory_folder(), 64 << 20))
    told(dead)
    assert Server().page().model == MODEL
    dead.maintenance.stop()
    dead._tier_storage.alive.forget_in_child()  # as when its process ends: the lock is free, its file stays
    assert Server().refusal()[0] == 503


@pytest.mark.parametrize("removed", ["", "v1/writers"])
def test_a_pool_that_was_removed_is_told_of_again(store: LocalStore, removed: str) -> None:
    told(store)
    memory_folder().parent.chmod(0o700)  # as an engine makes it
    server, (key,) = Server(), chain("a", 1)
    server.page(0)
    shutil.rmtree(memory_folder() / removed)
    until(lambda: server.get("after=0")[0] == 200, "the engine has created it again")
    save(store, [key])
    until(lambda: key.hex() in [one.key for one in server.page(0).events], "the new chunk")


@pytest.mark.parametrize("pool", [False, None, {}])
def test_an_engine_without_a_pool_says_how_to_have_one(pool: object) -> None:
    status, message = Server(pool).refusal()
    assert status == 404
    assert '"pool": true' in message
    assert Server(kv_connector="NixlConnector").refusal()[0] == 404


def test_a_connector_within_a_multi_connector_counts(store: LocalStore) -> None:
    told(store)
    inner = {"kv_connector": "PDConnector", "kv_connector_extra_config": {"pool": True}}
    several = {"connectors": [{"kv_connector": "Other"}, inner]}
    server = Server(kv_connector="MultiConnector", kv_connector_extra_config=several)
    assert server.page().model == MODEL


def test_nobody_without_the_servers_key_learns_what_is_stored(store: LocalStore) -> None:
    told(store)
    server = Server()
    server.keys = ("secret",)
    assert server.get("after=0")[0] == 401
    assert server.get("after=0", key="wrong")[0] == 401
    assert server.get("after=0", key="secret")[0] == 200


@pytest.mark.parametrize("after", [(1 << 63) - 1, 1 - (1 << 63)])
def test_each_number_that_a_journal_can_have_is_taken(store: LocalStore, after: int) -> None:
    told(store)
    keys = chain("a", 2)
    save(store, keys)
    page = Server().page(after)
    assert page.whole, "no journal reaches so far"
    assert len(page.events) == 2


@pytest.mark.parametrize("after", ["x", "1e3", "9" * 40, "-", f"{1 << 63}", "٣"])
def test_a_number_that_is_none_is_refused_by_name(store: LocalStore, after: str) -> None:
    told(store)
    status, message = Server().refusal(f"after={after}")
    assert status == 400
    assert "after" in message


def test_the_admission_middleware_answers_it_too_and_passes_all_else_on(
    store: LocalStore,
) -> None:
    told(store)
    assert Server(kind=AdmissionMiddleware).page().model == MODEL
    assert Server(kind=AdmissionMiddleware).get(path="/health")[0] == ANSWERED_BY_VLLM
    assert Server().get(path="/pd/load")[0] == ANSWERED_BY_VLLM


def test_an_sglang_engine_is_found_by_the_name_that_its_launcher_gave_it(store: LocalStore) -> None:
    server = Server(pool=False, kind=partial(PoolMiddleware, engine="sglang-1"))
    told(store)
    assert server.get()[0] == 503, "another engine's"
    told(store, engine="sglang-1")
    status, body = server.get()
    assert (status, decode(body).model) == (200, MODEL)
