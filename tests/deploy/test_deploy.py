# SPDX-License-Identifier: Apache-2.0
"""The image, the chart and the compose file say what engines and the router understand."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
import yaml
from support.charts import FOLDER, rendered

from pd_connector.hosts import port_range
from pd_connector.tools.cli.check import examine
from pd_connector.tools.cli.checks.finding import Status
from pd_connector.versions import advice
from scheduler_plugins.commands import main as pd_router
from scheduler_plugins.router.settings.config import RouterConfig

CUSTOM = json.loads(
    (Path(__file__).parents[1] / "support" / "prometheus_operator.json").read_text()
)
"""Schemas of kinds of Prometheus' operator. Kubernetes' own do not have them."""
MANIFESTS = FOLDER / "kubernetes.yaml"
WIDE = {
    "prefill": {
        "tensorParallelSize": 4,
        "args": ["--block-size=64"],
        "connector": {"codec": "int8"},
    },
    "networkPolicy": {"alsoFrom": [{"namespaceSelector": {"matchLabels": {"name": "monitoring"}}}]},
    "podMonitor": {"enabled": True},
    "prometheusRule": {"enabled": True},
    "dashboards": {"enabled": True},
}


def committed() -> list[dict[str, Any]]:
    return [one for one in yaml.safe_load_all(MANIFESTS.read_text()) if one]


def by_name(documents: list[dict[str, Any]], kind: str) -> dict[str, dict[str, Any]]:
    return {one["metadata"]["name"]: one for one in documents if one["kind"] == kind}


def container(deployment: dict[str, Any]) -> dict[str, Any]:
    (found,) = deployment["spec"]["template"]["spec"]["containers"]
    assert isinstance(found, dict)
    return found


def transfer(deployment: dict[str, Any]) -> dict[str, Any]:
    args = container(deployment)["args"]
    found = json.loads(args[args.index("--kv-transfer-config") + 1])
    assert isinstance(found, dict)
    return found


def test_the_manifests_are_the_charts() -> None:
    def sorted_(documents: list[dict[str, Any]]) -> list[dict[str, Any]]:
        return sorted(documents, key=lambda one: (one["kind"], one["metadata"]["name"]))

    assert sorted_(rendered({})) == sorted_(committed())


@pytest.mark.parametrize("values", [None, WIDE])
def test_every_manifest_is_valid_by_kubernetes_own_schema(values: dict[str, Any] | None) -> None:
    schemas = pytest.importorskip(
        "kubernetes_validate", reason="kubernetes-validate is not installed"
    )
    for one in committed() if values is None else rendered(values):
        if one["kind"] not in CUSTOM:
            schemas.validate(one, schemas.latest_version(), strict=True)


def custom(kind: str) -> dict[str, Any]:
    """The chart's document of this kind."""
    (found,) = [one for one in rendered(WIDE) if one["kind"] == kind]
    return found


def complaints(document: dict[str, Any]) -> list[str]:
    validator = pytest.importorskip("jsonschema").Draft202012Validator
    return [one.message for one in validator(CUSTOM[document["kind"]]).iter_errors(document)]


@pytest.mark.parametrize("kind", ["PodMonitor", "PrometheusRule"])
def test_every_custom_resource_is_valid_by_its_operators_schema(kind: str) -> None:
    assert complaints(custom(kind)) == []


def test_a_custom_resource_with_a_slip_is_refused() -> None:
    """The schema is strict enough to notice what operators write by mistake."""
    slips: list[tuple[str, Callable[[dict[str, Any]], object], str]] = [
        ("PrometheusRule", lambda rule: rule.pop("expr"), "'expr' is a required property"),
        ("PrometheusRule", lambda rule: rule.update({"for": "5 min"}), "does not match"),
        ("PrometheusRule", lambda rule: rule.update(runbook="x"), "'runbook' was unexpected"),
        ("PrometheusRule", lambda rule: rule["labels"].update(level=1), "is not of type 'string'"),
        ("PodMonitor", lambda one: one.update(portName="http"), "'portName' was unexpected"),
        ("PodMonitor", lambda one: one.update(interval="fast"), "does not match"),
    ]
    for kind, slip, complaint in slips:
        document = custom(kind)
        spec = document["spec"]
        slip(spec["groups"][0]["rules"][0] if "groups" in spec else spec["podMetricsEndpoints"][0])
        assert any(complaint in one for one in complaints(document)), complaint


HOSTS = FOLDER / "compose-hosts.yaml"
VALUES = {
    "MODEL": "m",
    "SECRET": "s",
    "FIRST": "10.0.0.1",
    "SECOND": "10.0.0.2",
    "HOST": "10.0.0.1",
    "KEY": "k",
    "HF_TOKEN": "",
}


def filled(text: str) -> str:
    """A compose file with its variables, as Docker fills them in."""
    return re.sub(r"\$\{(\w+):[?-][^}]*\}", lambda found: VALUES.get(found[1], "/cache"), text)


def services_of_hosts() -> dict[str, Any]:
    services: dict[str, Any] = yaml.safe_load(filled(HOSTS.read_text()))["services"]
    return services


def test_the_router_of_two_hosts_knows_all_four_engines(monkeypatch: pytest.MonkeyPatch) -> None:
    services = services_of_hosts()
    router = services["router"]
    asked = understood(monkeypatch, [*router["entrypoint"], *router["command"]])
    ports = {
        service["command"][service["command"].index("--port") + 1]
        for name, service in services.items()
        if name.startswith("engine")
    }
    wanted = {f"http://{host}:{port}" for host in ("10.0.0.1", "10.0.0.2") for port in ports}
    assert set(asked.engine) == wanted


def test_the_carrier_of_two_hosts_passes_our_check_and_dials_the_redis_of_the_file(
    tmp_path: Path,
) -> None:
    services = services_of_hosts()
    carrier, redis = services["carrier"], services["redis"]["command"]
    far = urlsplit(carrier["environment"]["PD_CONNECTOR_FAR"])
    assert far.hostname == redis[redis.index("--bind") + 1]
    assert str(far.port) == redis[redis.index("--port") + 1]
    assert far.password == redis[redis.index("--requirepass") + 1]
    script = tmp_path / "carry.sh"
    command = " ".join([*carrier["entrypoint"], *carrier["command"]])
    script.write_text(f"PD_CONNECTOR_FAR={far.geturl()} {command}\n")
    (told,) = [each for each in examine(str(script), {}).findings if each.name == "carrier"]
    assert told.status in (Status.OK, Status.WARN), told
    bound = carrier["volumes"][0].split(":")[1]
    assert carrier["command"][carrier["command"].index("--key-file") + 1] == bound
    extras = services["carrier"]["build"]["args"]["EXTRAS"].split(",")
    assert {"router", "redis"} <= set(extras)


@pytest.mark.parametrize("file", [MANIFESTS, FOLDER / "compose.yaml", HOSTS])
def test_the_engines_configs_pass_our_own_check(file: Path) -> None:
    findings = examine(str(file), {}).findings
    assert [one for one in findings if one.status is not Status.OK] == []
    assert len([one for one in findings if one.name == "config"]) == 2


def assert_policies_fit(documents: list[dict[str, Any]]) -> None:
    """What a decode engine dials is what the policy of prefill engines lets through."""
    engine = transfer(by_name(documents, "Deployment")["pd-prefill"])
    extra = engine["kv_connector_extra_config"]
    wanted = {*port_range(extra["control_port"]), *port_range(extra["data_port"])}
    policy = by_name(documents, "NetworkPolicy")["pd-prefill"]
    (rule,) = [
        one
        for one in policy["spec"]["ingress"]
        if one["from"][0]["podSelector"]["matchLabels"]["app.kubernetes.io/component"] == "decode"
    ]
    passed = {
        number for port in rule["ports"] for number in range(port["port"], port["endPort"] + 1)
    }
    assert passed == wanted
    named = container(by_name(documents, "Deployment")["pd-prefill"])["ports"]
    assert {port["containerPort"] for port in named} == {*wanted, 8000}


def test_the_network_policy_passes_the_ports_of_the_config() -> None:
    assert_policies_fit(committed())


def test_the_network_policy_passes_the_ports_of_four_ranks() -> None:
    documents = rendered(WIDE)
    assert_policies_fit(documents)
    extra = transfer(by_name(documents, "Deployment")["pd-prefill"])["kv_connector_extra_config"]
    assert extra == {"control_port": "7100-7103", "data_port": "7200-7203", "codec": "int8"}


def test_every_service_and_policy_selects_the_pods_of_a_deployment() -> None:
    documents = committed()
    pods = [
        one["spec"]["template"]["metadata"]["labels"]
        for one in by_name(documents, "Deployment").values()
    ]
    selectors = [one["spec"]["selector"] for one in by_name(documents, "Service").values()]
    for policy in by_name(documents, "NetworkPolicy").values():
        selectors.append(policy["spec"]["podSelector"]["matchLabels"])
        for rule in policy["spec"]["ingress"]:
            selectors += [one["podSelector"]["matchLabels"] for one in rule["from"]]
    assert all(selector in pods for selector in selectors)


def understood(monkeypatch: pytest.MonkeyPatch, command: list[str]) -> RouterConfig:
    """The settings that `pd-router` itself makes of this command."""
    found = list[RouterConfig]()
    monkeypatch.setattr(
        "scheduler_plugins.router.__main__._run", lambda config, settings: found.append(config)
    )
    assert command[0] == "pd-router"
    assert pd_router(command[1:]) == 0
    return found[0]


def test_the_router_understands_its_arguments_and_finds_the_services(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    documents = committed()
    router = container(by_name(documents, "Deployment")["pd-router"])
    asked = understood(monkeypatch, [*router["command"], *router["args"]])
    services = by_name(documents, "Service")
    for url, side in ((asked.prefill, "prefill"), (asked.decode, "decode")):
        assert url == (f"dns+http://pd-{side}:8000",)
        assert services[f"pd-{side}"]["spec"]["clusterIP"] == "None"
    compose = yaml.safe_load((FOLDER / "compose.yaml").read_text())["services"]
    understood(monkeypatch, [*compose["router"]["entrypoint"], *compose["router"]["command"]])


def test_vllm_understands_its_arguments() -> None:
    pytest.importorskip("vllm.entrypoints.launchers.cli_args", reason="no vLLM of 0.32")
    from vllm.entrypoints.launchers.cli_args import make_arg_parser
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    compose = yaml.safe_load((FOLDER / "compose.yaml").read_text())["services"]
    commands = [compose[side]["command"] for side in ("prefill", "decode")]
    hosts = services_of_hosts()
    commands += [service["command"] for name, service in hosts.items() if "engine" in name]
    deployments = by_name(committed(), "Deployment")
    commands += [container(deployments[f"pd-{side}"])["args"] for side in ("prefill", "decode")]
    parser = make_arg_parser(FlexibleArgumentParser())
    for command in commands:
        assert parser.parse_args(command).kv_transfer_config.kv_connector == "PDConnector"


def test_the_image_is_of_a_version_that_is_supported_and_checks_itself() -> None:
    text = (FOLDER / "Dockerfile").read_text()
    base = re.search(r"^ARG BASE=.*:v(\S+)$", text, re.MULTILINE)
    assert base
    assert advice(base[1]) == ""
    checked = re.search(r"pd-connector check '(.*)'", text)
    assert checked
    assert all(one.status is Status.OK for one in examine(checked[1], {}).findings)
