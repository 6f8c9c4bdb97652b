# SPDX-License-Identifier: Apache-2.0
"""Pods are followed by a watch, against an API server that speaks the protocol over a socket."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import aiohttp
import pytest
from router_fakes import FAST, FakeEngine, until
from support.fake_kubernetes import FakeKubernetes, pod
from support.followed_pods import NAME, following

from scheduler_plugins.router.endpoints.app_keys import SHARED
from scheduler_plugins.router.engines import named as named_module
from scheduler_plugins.router.engines.engine import Role
from scheduler_plugins.router.engines.kubernetes import api as api_module
from scheduler_plugins.router.engines.kubernetes import pods as pods_module
from scheduler_plugins.router.engines.kubernetes.pods import Pods
from scheduler_plugins.router.engines.named import NamedEngines
from scheduler_plugins.router.server import RouterServer
from scheduler_plugins.router.settings.config import RouterConfig


def test_changes_arrive_without_another_list(scene: Callable[..., None]) -> None:
    async def scenario(server: FakeKubernetes) -> None:
        async with following() as heard:
            await until(lambda: heard.told("10.0.0.1:8200", "10.0.0.2:8200"), "they are listed")
            await server.put(pod("c", "fd00::3"))
            await until(lambda: "http://[fd00::3]:8200" in (heard.urls or ()), "one joined")
            await server.put(pod("a", "10.0.0.1", ready=False))
            await until(lambda: "http://10.0.0.1:8200" not in (heard.urls or ()), "not ready")
            await server.put(pod("b", "10.0.0.2", app="other"))
            await until(lambda: heard.told("[fd00::3]:8200"), "one lost its label")
            await server.put(pod("a", "10.0.0.9"))
            await until(lambda: heard.told("10.0.0.9:8200", "[fd00::3]:8200"), "a new address")
            await server.remove("c")
            await until(lambda: heard.told("10.0.0.9:8200"), "one is gone")
            assert (server.count("list"), server.count("watch")) == (1, 1)
            assert heard.problems == []
        path, query = server.asked[-1]
        assert path == "/api/v1/namespaces/serving/pods"
        assert query["labelSelector"] == "app=vllm"
        assert query["allowWatchBookmarks"] == "true"

    scene(scenario)


def test_a_pod_that_is_being_deleted_gets_no_requests(scene: Callable[..., None]) -> None:
    async def scenario(server: FakeKubernetes) -> None:
        async with following() as heard:
            await until(lambda: heard.told("10.0.0.1:8200", "10.0.0.2:8200"), "they are listed")
            ending = pod("a", "10.0.0.1")
            ending["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z"
            await server.put(ending)
            await until(lambda: heard.told("10.0.0.2:8200"), "it has left")

    scene(scenario)


def test_a_broken_connection_is_resumed_where_it_broke(scene: Callable[..., None]) -> None:
    async def scenario(server: FakeKubernetes) -> None:
        async with following() as heard:
            await until(lambda: server.watches == 1, "it watches")
            for n in range(3, 6):
                server.cut()
                await server.put(pod(f"p{n}", f"10.0.0.{n}"))  # while nobody watches
                await until(lambda n=n: f"http://10.0.0.{n}:8200" in heard.urls, "it was heard")
            assert len(heard.urls or ()) == 5
            assert server.count("list") == 1, "nothing was missed, so nothing is listed again"

    scene(scenario)


def test_a_watch_that_the_server_ends_is_resumed_from_a_bookmark(
    scene: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(api_module, "WATCH_S", 1.0)

    async def scenario(server: FakeKubernetes) -> None:
        async with following() as heard:
            await until(lambda: server.watches == 1, "it watches")
            await server.bookmark()
            await asyncio.sleep(0.2)  # it is sent and read
            server.compact()  # only the bookmark's version is still known
            await until(lambda: server.count("watch") >= 2, "the first watch has ended")
            await server.put(pod("c", "10.0.0.3"))
            await until(lambda: len(heard.urls or ()) == 3, "it is heard")
            assert server.count("list") == 1
            assert heard.problems == [], "an end in time is not a problem"

    scene(scenario)


def test_pods_join_and_leave_a_router_that_serves(
    scene: Callable[..., None],
) -> None:
    """Without a lookup in between: each of these would have taken up to five seconds."""

    async def scenario(server: FakeKubernetes) -> None:
        engines = [FakeEngine("p", "engine-p"), FakeEngine("d")]
        for engine in engines:
            await engine.start()
        prefill, decode = engines
        await server.remove("a")
        await server.put(pod("b", "127.0.0.1", ready=False))
        name = f"k8s+http://serving:{decode.port}/app=vllm"
        config = RouterConfig(prefill=(prefill.url,), decode=(name,), **FAST)
        async with RouterServer(config) as router:
            pool = router.app[SHARED].pool
            assert pool.up(Role.DECODE) == []
            await server.put(pod("b", "127.0.0.1"))
            await until(lambda: [e.url for e in pool.up(Role.DECODE)] == [decode.url], "joined")
            await server.put(pod("b", "127.0.0.1", ready=False))
            await until(lambda: pool.up(Role.DECODE) == [], "it has left")
        assert server.count("list") == 1
        names = [task.get_name() for task in asyncio.all_tasks()]
        assert not [one for one in names if one.startswith("look up")], "nobody watches any more"
        for engine in engines:
            await engine.die()

    scene(scenario)


@pytest.mark.parametrize("as_status", [False, True])
def test_a_version_that_is_gone_leads_to_a_new_list(
    scene: Callable[..., None], as_status: bool
) -> None:
    async def scenario(server: FakeKubernetes) -> None:
        server.gone_as_status = as_status
        async with following() as heard:
            await until(lambda: server.watches == 1, "it watches")
            await server.stop()
            server.pods.pop("a")  # nobody will ever hear of this by an event
            await server.put(pod("c", "10.0.0.3"))
            server.compact()
            await server.start()
            await until(lambda: heard.told("10.0.0.2:8200", "10.0.0.3:8200"), "listed again")
            assert server.count("list") == 2
            await until(lambda: server.watches == 1, "it watches again")
            await server.put(pod("d", "10.0.0.4"))
            await until(lambda: len(heard.urls or ()) == 3, "it follows again")

    scene(scenario)


def test_a_watch_that_breaks_once_is_resumed_without_a_word(scene: Callable[..., None]) -> None:
    async def scenario(server: FakeKubernetes) -> None:
        async with following() as heard:
            await until(lambda: server.watches == 1, "it watches")
            server.cut()
            await until(lambda: server.count("watch") == 2, "it is resumed")
            await until(lambda: server.watches == 1, "it watches again")
            assert heard.problems == []

    scene(scenario)


@pytest.mark.parametrize(("code", "lists"), [(503, 1), (429, 1), (400, 2)])
def test_a_busy_server_is_not_asked_for_a_list_again(
    scene: Callable[..., None], code: int, lists: int
) -> None:
    async def scenario(server: FakeKubernetes) -> None:
        async with following() as heard:
            await until(lambda: server.watches == 1, "it watches")
            server.refuses_watch = code
            server.cut()
            await until(lambda: server.count("watch") >= 3, "it was refused twice")
            server.refuses_watch = 0
            await until(lambda: server.watches == 1, "it watches again")
            assert server.count("list") >= lists
            assert server.count("list") == 1 or code == 400
            assert heard.told("10.0.0.1:8200", "10.0.0.2:8200")

    scene(scenario)


def test_a_server_that_was_restored_from_a_backup_is_listed_again(
    scene: Callable[..., None],
) -> None:
    async def scenario(server: FakeKubernetes) -> None:
        async with following() as heard:
            await until(lambda: server.watches == 1, "it watches")
            server.refuses_watch = 504  # Kubernetes: Too large resource version
            server.pods.pop("a")
            server.cut()
            await until(lambda: heard.told("10.0.0.2:8200"), "it is listed again")

    scene(scenario)


def test_a_name_is_followed_again_after_an_error_that_nobody_foresaw(
    scene: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(named_module, "MEMBERS_S", 0.01)
    follow, failed = Pods.follow, list[int]()

    async def once(pods: Pods) -> None:
        if not failed:
            failed.append(1)
            raise KeyError("something new")
        await follow(pods)

    monkeypatch.setattr(Pods, "follow", once)

    async def scenario(server: FakeKubernetes) -> None:
        config = RouterConfig(prefill=("a:1",), decode=(NAME,))
        async with aiohttp.ClientSession() as session:
            named = NamedEngines(lambda: config, session)
            await named.start()
            await until(lambda: len(named.members(NAME)) == 2, "it is followed")
            await named.close()

    scene(scenario)


def test_engines_stay_while_the_server_is_away(scene: Callable[..., None]) -> None:
    async def scenario(server: FakeKubernetes) -> None:
        async with following() as heard:
            await until(lambda: server.watches == 1, "it watches")
            await server.stop()
            await until(lambda: len(heard.problems) > 1, "it is said")
            assert heard.told("10.0.0.1:8200", "10.0.0.2:8200")
            heard.urls = None
            await server.start()
            await until(lambda: heard.urls is not None, "it is said that the server is back")

    scene(scenario)


@pytest.mark.parametrize("way", ["ends_at_once", "away"])
def test_a_server_in_trouble_is_asked_ever_more_seldom(
    scene: Callable[..., None], monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    pauses = list[float]()
    slept = asyncio.sleep

    async def sleep(seconds: float) -> None:
        pauses.append(seconds)
        await slept(0)

    monkeypatch.setattr(pods_module.asyncio, "sleep", sleep)
    monkeypatch.setattr(pods_module.random, "uniform", lambda low, high: high)

    async def scenario(server: FakeKubernetes) -> None:
        server.ends_at_once = True
        if way == "away":
            await server.stop()
        async with following():
            while max(pauses, default=0) < 30:
                await slept(0.01)
        if way == "away":
            await server.start()

    scene(scenario)
    ours = [pause for pause in pauses if pause > 0]
    assert ours[:4] == [0.25, 0.5, 1.0, 2.0]
    assert max(ours) == 30.0


def test_a_forbidden_watch_is_said_once_and_replaced_by_lists(
    scene: Callable[..., None],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(pods_module, "LIST_S", 0.02)
    monkeypatch.setattr(pods_module, "LISTS_S", 0.1)

    async def scenario(server: FakeKubernetes) -> None:
        server.forbids_watch = True
        async with following() as heard:
            await until(lambda: heard.told("10.0.0.1:8200", "10.0.0.2:8200"), "they are listed")
            await server.put(pod("c", "10.0.0.3"))
            await until(lambda: len(heard.urls or ()) == 3, "the new one is listed")
            await until(lambda: server.count("watch") > 2, "the watch is tried again")
            server.forbids_watch = False
            await until(lambda: server.watches == 1, "it is permitted now")
            assert heard.problems == []
        said = [line for line in caplog.messages if "not allowed to watch pods" in line]
        assert len(said) == 1
        assert "give it the verb `watch`" in said[0]

    scene(scenario)
