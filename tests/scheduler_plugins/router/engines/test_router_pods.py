# SPDX-License-Identifier: Apache-2.0
"""Pods are followed by a watch, against an API server that speaks the protocol over a socket."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import yaml
from router_fakes import run, until
from support.fake_kubernetes import FakeKubernetes, pod

from scheduler_plugins.router.engines import named as named_module
from scheduler_plugins.router.engines.kubernetes import api as api_module
from scheduler_plugins.router.engines.kubernetes import pods as pods_module
from scheduler_plugins.router.engines.kubernetes.pods import Pods
from scheduler_plugins.router.engines.named import NamedEngines
from scheduler_plugins.router.settings.config import RouterConfig
from scheduler_plugins.router.settings.members import checked_name

NAME = "k8s+http://serving:8200/app=vllm"
POOL = "inference.networking.k8s.io/v1/namespaces/serving/inferencepools/llama"


class Followed:
    """What was heard of one name."""

    def __init__(self) -> None:
        self.urls: list[str] | None = None
        self.problems: list[str] = []

    def told(self, *addresses: str) -> bool:
        return self.urls == [f"http://{address}" for address in addresses]

    def tell(self, urls: Any) -> None:
        self.urls = list(urls)


@asynccontextmanager
async def following(url: str = NAME) -> AsyncIterator[Followed]:
    heard = Followed()
    async with aiohttp.ClientSession() as session:
        pods = Pods(checked_name("decode", url), session, heard.tell, heard.problems.append)
        task = asyncio.create_task(pods.follow())
        try:
            yield heard
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)


@pytest.fixture
def scene(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Run a scenario with an API server that has two pods."""

    def play(scenario: Callable[[FakeKubernetes], Coroutine[Any, Any, None]]) -> None:
        async def whole() -> None:
            async with FakeKubernetes() as server:
                monkeypatch.setenv(api_module.API_VARIABLE, server.url)
                await server.put(pod("a", "10.0.0.1"), pod("b", "10.0.0.2"))
                await scenario(server)

        run(whole())

    return play


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
            await until(lambda: server.count("watch") >= 2, "the first watch has ended")
            server.compact()  # only the bookmark's version is still known
            await server.put(pod("c", "10.0.0.3"))
            await until(lambda: len(heard.urls or ()) == 3, "it is heard")
            assert server.count("list") == 1
            assert heard.problems == [], "an end in time is no problem"

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


def test_a_token_that_cannot_be_read_is_named_and_read_again(
    scene: Callable[..., None], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "ca.crt").write_text("no certificate")
    monkeypatch.setattr(api_module, "ACCOUNT", tmp_path)

    async def scenario(server: FakeKubernetes) -> None:
        async with following() as heard:
            await until(lambda: bool(heard.problems), "it is said")
            (tmp_path / "ca.crt").unlink()
            await until(lambda: heard.told("10.0.0.1:8200", "10.0.0.2:8200"), "it is read again")

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
        said = [line for line in caplog.messages if "may not watch pods" in line]
        assert len(said) == 1
        assert "give it the verb `watch`" in said[0]

    scene(scenario)


@pytest.mark.parametrize(
    ("url", "spec", "told"),
    [
        (
            "pool+http://serving/llama",
            {"selector": {"matchLabels": {"app": "vllm"}}, "targetPorts": [{"number": 8000}]},
            ["10.0.0.1:8000", "10.0.0.2:8000"],
        ),
        (
            "pool+http://serving/llama/role=decode",
            {"selector": {"matchLabels": {"app": "vllm"}}, "targetPorts": [{"number": 8000}]},
            ["10.0.0.3:8000"],
        ),
        (
            "pool+http://serving/llama/role=decode",
            {
                "selector": {"matchLabels": {"app": "vllm"}},
                "targetPorts": [{"number": 8000}, {"number": 8001}],
            },
            ["10.0.0.3:8000", "10.0.0.3:8001"],
        ),
    ],
)
def test_the_pods_and_ports_of_an_inference_pool_are_engines(
    scene: Callable[..., None], url: str, spec: dict[str, Any], told: list[str]
) -> None:
    async def scenario(server: FakeKubernetes) -> None:
        server.pools[POOL] = {"kind": "InferencePool", "spec": spec}
        if "role" in url:
            await server.put(pod("c", "10.0.0.3", app="vllm", role="decode"))
        async with following(url) as heard:
            await until(lambda: heard.told(*told), "its pods are engines")
            await server.put(pod("d", "10.0.0.4", app="vllm", role="decode"))
            await until(lambda: f"http://10.0.0.4:{told[-1][-4:]}" in heard.urls, "it is followed")

    scene(scenario)


def test_a_changed_inference_pool_is_noticed_when_a_watch_ends(
    scene: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(api_module, "WATCH_S", 1.0)

    async def scenario(server: FakeKubernetes) -> None:
        old = "inference.networking.x-k8s.io/v1alpha2/namespaces/serving/inferencepools/llama"
        server.pools[old] = {"spec": {"selector": {"app": "vllm"}, "targetPortNumber": 1}}
        async with following("pool+http://serving/llama") as heard:
            await until(lambda: heard.told("10.0.0.1:1", "10.0.0.2:1"), "by its older API")
            server.pools[old] = {"spec": {"selector": {"app": "vllm"}, "targetPortNumber": 2}}
            await until(lambda: heard.told("10.0.0.1:2", "10.0.0.2:2"), "the port is another")

    scene(scenario)


def test_a_pool_that_nobody_knows_is_named(scene: Callable[..., None]) -> None:
    async def scenario(server: FakeKubernetes) -> None:
        async with following("pool+http://serving/llama") as heard:
            await until(lambda: bool(heard.problems), "it is said")
            assert "no InferencePool llama in namespace serving" in heard.problems[0]
            assert heard.urls is None

    scene(scenario)


@pytest.mark.parametrize(
    ("given", "usual"),
    [
        ("pool+http://serving/llama/", "pool+http://serving/llama"),
        ("pool+http://serving/llama/llm-d.ai%2Frole=decode", "pool+http://serving/llama/llm-d.ai/role=decode"),
        ("k8s+http://serving:8000/llm-d.ai/role=decode", "k8s+http://serving:8000/llm-d.ai/role=decode"),
        ("pool+http://serving", None),
        ("pool+http://serving:8000/llama", None),
        ("pool+http://serving/app=vllm", None),
        ("k8s+http://serving/app=vllm", None),
    ],
)  # fmt: skip
def test_names_have_one_form(given: str, usual: str | None) -> None:
    if usual is not None:
        assert checked_name("engine", given) == usual
        return
    form = given.partition(":")[0]
    with pytest.raises(ValueError, match=rf"engine '.*': must look like {form.replace('+', '.')}"):
        checked_name("engine", given)


def test_the_kubeconfig_is_used_outside_of_a_cluster(
    scene: Callable[..., None], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    pytest.importorskip("kubernetes_asyncio", reason="kubernetes-asyncio is not installed")

    async def scenario(server: FakeKubernetes) -> None:
        monkeypatch.delenv(api_module.API_VARIABLE)
        monkeypatch.delenv(api_module.HOST_VARIABLE, raising=False)
        server.token = "of-a-user"
        config = tmp_path / "config"
        config.write_text(yaml.safe_dump(kubeconfig(server)))
        monkeypatch.setenv("KUBECONFIG", str(config))
        async with following() as heard:
            await until(lambda: heard.told("10.0.0.1:8200", "10.0.0.2:8200"), "they are listed")
            await until(lambda: server.watches == 1, "and watched")

    scene(scenario)


def kubeconfig(server: FakeKubernetes) -> dict[str, Any]:
    return {
        "apiVersion": "v1",
        "kind": "Config",
        "current-context": "c",
        "contexts": [{"name": "c", "context": {"cluster": "k", "user": "u"}}],
        "clusters": [{"name": "k", "cluster": {"server": server.url}}],
        "users": [{"name": "u", "user": {"token": server.token}}],
    }


def test_the_server_of_these_tests_is_understood_by_kubernetes_own_client(
    scene: Callable[..., None],
) -> None:
    pytest.importorskip("kubernetes_asyncio", reason="kubernetes-asyncio is not installed")
    from kubernetes_asyncio.client import ApiClient, Configuration, CoreV1Api
    from kubernetes_asyncio.client.exceptions import ApiException
    from kubernetes_asyncio.watch import Watch

    async def scenario(server: FakeKubernetes) -> None:
        async with ApiClient(Configuration(host=server.url)) as client:
            core = CoreV1Api(client)
            listed = await core.list_namespaced_pod("serving", label_selector="app=vllm")
            assert [one.status.pod_ip for one in listed.items] == ["10.0.0.1", "10.0.0.2"]
            version = listed.metadata.resource_version
            await server.put(pod("c", "10.0.0.3"))
            await server.remove("a")
            named = {
                "label_selector": "app=vllm",
                "resource_version": version,
                "timeout_seconds": 1,
            }

            async def seen() -> list[tuple[str, str]]:
                async with Watch() as watch:
                    stream = watch.stream(core.list_namespaced_pod, "serving", **named)
                    return [(one["type"], one["object"].status.pod_ip) async for one in stream]

            assert await seen() == [("ADDED", "10.0.0.3"), ("DELETED", "10.0.0.1")]
            server.compact()
            with pytest.raises(ApiException) as gone:
                await seen()
            assert gone.value.status == 410

    scene(scenario)


def test_outside_of_a_cluster_it_is_said_what_to_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(api_module.API_VARIABLE, raising=False)
    monkeypatch.delenv(api_module.HOST_VARIABLE, raising=False)
    monkeypatch.setitem(__import__("sys").modules, "kubernetes_asyncio.client", None)

    async def scenario() -> None:
        async with following() as heard:
            await until(lambda: bool(heard.problems), "it is said")
            assert "set PD_ROUTER_KUBERNETES_API" in heard.problems[0]
            assert "pd-connector[kubernetes]" in heard.problems[0]

    run(scenario())
