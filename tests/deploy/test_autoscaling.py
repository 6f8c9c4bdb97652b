# SPDX-License-Identifier: Apache-2.0
"""The chart's autoscalers count by a metric that the router has and the adapter's rule serves."""

import re
from typing import Any

import pytest
import yaml
from support.charts import FOLDER, rendered

from scheduler_plugins.router.metrics import Metrics
from scheduler_plugins.router.policies.base import Role

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
    for role in Role:
        metrics.engine_in_flight.labels("http://a:1", role).set(1)
    (family,) = [one for one in metrics.registry.collect() if one.name == series]
    roles = {sample.labels["role"] for sample in family.samples}
    documents = rendered(ON)
    for side, scaler in of_kind(documents, "HorizontalPodAutoscaler").items():
        (metric,) = scaler["spec"]["metrics"]
        asked = metric["external"]["metric"]
        assert asked["name"] == rule["name"]["as"] == re.sub(r"[^a-z_]", "_", series)
        assert asked["selector"]["matchLabels"]["role"] in roles
        assert side == f"pd-{asked['selector']['matchLabels']['role']}"
    (monitor,) = of_kind(documents, "PodMonitor").values()
    label = re.sub(r"[^a-z_]", "_", monitor["spec"]["podTargetLabels"][0])
    assert asked["selector"]["matchLabels"][label] == "pd"
