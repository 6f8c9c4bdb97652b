# SPDX-License-Identifier: Apache-2.0
"""The chart's autoscalers count by a metric that the router has and the adapter's rule serves."""

import re
from typing import Any

import pytest
import yaml
from support.charts import FOLDER, rendered

from scheduler_plugins.router.metrics import Metrics
from scheduler_plugins.router.policies.base import Role
from scheduler_plugins.router.settings.elastic import DEFAULT_GROUP

ON = {"autoscaling": {"enabled": True}, "podMonitor": {"enabled": True}}


def of_kind(documents: list[dict[str, Any]], kind: str) -> dict[str, dict[str, Any]]:
    return {one["metadata"]["name"]: one for one in documents if one["kind"] == kind}


def test_autoscaling_is_off_until_it_is_asked_for() -> None:
    documents = rendered({})
    assert not of_kind(documents, "HorizontalPodAutoscaler")
    assert of_kind(documents, "Deployment")["pd-prefill"]["spec"]["replicas"] == 2


def test_each_side_has_an_autoscaler_and_no_fixed_number_of_pods() -> None:
    documents = rendered(ON)
    scalers = of_kind(documents, "HorizontalPodAutoscaler")
    deployments = of_kind(documents, "Deployment")
    assert set(scalers) == {"pd-prefill", "pd-decode"}
    for name, scaler in scalers.items():
        assert scaler["spec"]["scaleTargetRef"]["name"] == name
        assert "replicas" not in deployments[name]["spec"], "an upgrade would undo the autoscaler"
    assert deployments["pd-router"]["spec"]["replicas"] == 1


def test_every_manifest_with_autoscaling_is_valid_by_kubernetes_own_schema() -> None:
    schemas = pytest.importorskip(
        "kubernetes_validate", reason="kubernetes-validate is not installed"
    )
    for one in rendered(ON):
        if one["kind"] != "PodMonitor":
            schemas.validate(one, schemas.latest_version(), strict=True)


def test_the_metric_is_one_of_the_routers_with_these_labels() -> None:
    (rule,) = yaml.safe_load((FOLDER / "prometheus-adapter.yaml").read_text())["rules"]["external"]
    series = rule["seriesQuery"].partition("{")[0]
    metrics = Metrics()
    for role in (Role.PREFILL, Role.DECODE):
        metrics.engines_wanted.labels(DEFAULT_GROUP, role).set(1)
    (family,) = [one for one in metrics.registry.collect() if one.name == series]
    roles = {sample.labels["role"] for sample in family.samples}
    documents = rendered(ON)
    for side, scaler in of_kind(documents, "HorizontalPodAutoscaler").items():
        (metric,) = scaler["spec"]["metrics"]
        asked = metric["external"]["metric"]
        assert asked["name"] == rule["name"]["as"] == re.sub(r"[^a-z_]", "_", series)
        assert asked["selector"]["matchLabels"]["role"] in roles
        assert asked["selector"]["matchLabels"]["group"] == DEFAULT_GROUP
        assert metric["external"]["target"] == {"type": "AverageValue", "averageValue": "1"}
        assert side == f"pd-{asked['selector']['matchLabels']['role']}"
    (monitor,) = of_kind(documents, "PodMonitor").values()
    label = re.sub(r"[^a-z_]", "_", monitor["spec"]["podTargetLabels"][0])
    assert asked["selector"]["matchLabels"][label] == "pd"


def test_a_step_of_one_pod_of_many_is_not_ignored() -> None:
    """Kubernetes ignores changes below 10 % unless it is told otherwise: 11 pods would never become 12."""
    for scaler in of_kind(rendered(ON), "HorizontalPodAutoscaler").values():
        for way in ("scaleUp", "scaleDown"):
            behavior = scaler["spec"]["behavior"][way]
            assert float(behavior["tolerance"]) < 1 / 100
            assert behavior["stabilizationWindowSeconds"] == 0, "the router has waited already"


def test_the_router_decides_on_the_number_of_pods_within_the_autoscalers_bounds() -> None:
    documents = rendered(ON | {"autoscaling": {"enabled": True, "decode": {"maxReplicas": 9}}})
    (container,) = of_kind(documents, "Deployment")["pd-router"]["spec"]["template"]["spec"][
        "containers"
    ]
    assert {"--roles=slo", "--max-prefill=4", "--max-decode=9", "--engine-start-s=120"} <= set(
        container["args"]
    )
    off = of_kind(rendered({}), "Deployment")["pd-router"]["spec"]["template"]["spec"]["containers"]
    assert not any("slo" in argument for argument in off[0]["args"])


def test_several_routers_that_do_not_hear_each_other_are_refused() -> None:
    """Each would count its own part of the requests, and the adapter takes the largest: too few pods."""
    with pytest.raises(Exception, match=r"router.replicas 2 with autoscaling.*set it to 1"):
        rendered({**ON, "router": {"replicas": 2}})
    args = ["--exchange", "tcp://0.0.0.0:9100", "--fellows", "tcp://pd-router-1:9100"]
    assert rendered({**ON, "router": {"replicas": 2, "args": args}})
