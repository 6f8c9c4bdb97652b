# SPDX-License-Identifier: Apache-2.0
"""InferencePools, names of pods, and credentials for the API server."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from router_fakes import run, until
from support.fake_kubernetes import FakeKubernetes, pod
from support.followed_pods import following

from scheduler_plugins.router.engines.kubernetes import api as api_module
from scheduler_plugins.router.settings.members import checked_name

POOL = "inference.networking.k8s.io/v1/namespaces/serving/inferencepools/llama"


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
