# SPDX-License-Identifier: Apache-2.0
"""Pods of the chart have what a production cluster gives to its pods: caches, tokens, RDMA, places to run."""

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from support.charts import FOLDER, rendered

SIDES = ("prefill", "decode", "router")
POD: dict[str, Any] = {
    "podAnnotations": {"k8s.v1.cni.cncf.io/networks": "rdma-net"},
    "podLabels": {"team": "serving"},
    "serviceAccountName": "serving",
    "runtimeClassName": "nvidia",
    "priorityClassName": "high",
    "nodeSelector": {"pool": "h100"},
    "tolerations": [{"key": "gpu", "operator": "Exists", "effect": "NoSchedule"}],
    "affinity": {
        "podAntiAffinity": {
            "requiredDuringSchedulingIgnoredDuringExecution": [
                {
                    "topologyKey": "kubernetes.io/hostname",
                    "labelSelector": {"matchLabels": {"team": "serving"}},
                }
            ]
        }
    },
    "topologySpreadConstraints": [
        {
            "maxSkew": 1,
            "topologyKey": "topology.kubernetes.io/zone",
            "whenUnsatisfiable": "ScheduleAnyway",
            "labelSelector": {"matchLabels": {"team": "serving"}},
        }
    ],
    "initContainers": [{"name": "wait", "image": "busybox", "command": ["true"]}],
    "volumes": [{"name": "certs", "secret": {"secretName": "certs"}}],
    "env": [{"name": "A", "value": "b"}],
    "envFrom": [{"secretRef": {"name": "variables"}}],
    "volumeMounts": [{"name": "certs", "mountPath": "/certs", "readOnly": True}],
    "resources": {"requests": {"cpu": "8", "memory": "64Gi"}, "limits": {"rdma/hca": "1"}},
    "securityContext": {"capabilities": {"add": ["IPC_LOCK"]}},
    "strategy": {"type": "RollingUpdate", "rollingUpdate": {"maxSurge": 0, "maxUnavailable": 1}},
}
"""All fields of Kubernetes that a side of the values takes."""
ALL = {
    **dict.fromkeys(SIDES, POD),
    "imagePullSecrets": [{"name": "registry"}],
    "modelCache": {"claim": "models"},
    "tokenSecret": "hugging-face",
}
PRODUCTION = FOLDER / "production.yaml"


def deployment(values: dict[str, Any], side: str) -> dict[str, Any]:
    (only,) = [
        document
        for document in rendered(copy.deepcopy(values))
        if document["kind"] == "Deployment" and document["metadata"]["name"] == f"pd-{side}"
    ]
    return dict(only["spec"])


def pod(values: dict[str, Any], side: str) -> dict[str, Any]:
    return dict(deployment(values, side)["template"])


def container(values: dict[str, Any], side: str) -> dict[str, Any]:
    (only,) = pod(values, side)["spec"]["containers"]
    return dict(only)


def variables(values: dict[str, Any], side: str) -> dict[str, Any]:
    env = container(values, side)["env"]
    assert len({one["name"] for one in env}) == len(env)
    return {one["name"]: one.get("value", one.get("valueFrom")) for one in env}


def kubernetes_fields(kind: str) -> set[str]:
    """The fields of a kind, by Kubernetes' own schema."""
    package = pytest.importorskip(
        "kubernetes_validate", reason="kubernetes-validate is not installed"
    )
    version = f"v{package.latest_version()}-local-strict"
    folder = Path(package.__file__).parent / "kubernetes-json-schema" / version
    (file,) = [
        *folder.glob(f"{kind.lower()}-v1.json"),
        *folder.glob(f"{kind.lower()}-apps-v1.json"),
    ]
    return set(json.loads(file.read_text())["properties"])


def test_the_values_of_this_test_are_all_that_the_schema_knows() -> None:
    """A field that is added to the schema is added to `POD`."""
    schema = json.loads((FOLDER / "chart" / "values.schema.json").read_text())
    router = set(schema["properties"]["router"]["properties"])
    assert router == {*POD, "replicas", "args"}
    engines = set(schema["definitions"]["engines"]["properties"])
    assert engines == {*router, "tensorParallelSize", "connector"}


@pytest.mark.parametrize("values", [ALL, "production"], ids=["all", "production"])
def test_manifests_with_these_values_are_valid_by_kubernetes_own_schema(values: Any) -> None:
    schemas = pytest.importorskip(
        "kubernetes_validate", reason="kubernetes-validate is not installed"
    )
    if values == "production":
        values = yaml.safe_load(PRODUCTION.read_text())
    for document in rendered(copy.deepcopy(values)):
        if document["kind"] not in ("PodMonitor", "PrometheusRule"):
            schemas.validate(document, schemas.latest_version(), strict=True)


@pytest.mark.parametrize("side", SIDES)
def test_a_pod_has_every_field_of_its_values(side: str) -> None:
    template = pod(ALL, side)
    spec, only = template["spec"], container(ALL, side)
    assert template["metadata"]["annotations"] == POD["podAnnotations"]
    assert template["metadata"]["labels"]["team"] == "serving"
    assert spec["imagePullSecrets"] == ALL["imagePullSecrets"]
    assert deployment(ALL, side)["strategy"] == POD["strategy"]
    for field in ("volumes", "env", "volumeMounts"):
        assert all(one in (only | spec)[field] for one in POD[field])
    assert only["resources"]["requests"] == POD["resources"]["requests"]
    assert only["resources"]["limits"]["rdma/hca"] == "1"
    rest = {*POD} - {"podAnnotations", "podLabels", "strategy", "volumes", "env", "volumeMounts"}
    for field in rest - {"resources"}:
        assert (only | spec)[field] == POD[field], field


@pytest.mark.parametrize("side", SIDES)
def test_services_still_find_pods_with_labels_of_their_own(side: str) -> None:
    spec = deployment(ALL, side)
    labels = spec["template"]["metadata"]["labels"]
    assert spec["selector"]["matchLabels"].items() < labels.items()


@pytest.mark.parametrize("side", ["prefill", "decode"])
def test_an_engine_keeps_its_gpus_beside_other_resources(side: str) -> None:
    limits = container({side: {**POD, "tensorParallelSize": 4}}, side)["resources"]["limits"]
    assert limits == {"nvidia.com/gpu": "4", "rdma/hca": "1"}


@pytest.mark.parametrize("side", ["prefill", "decode"])
@pytest.mark.parametrize(
    ("cache", "source"),
    [
        ({"claim": "models"}, {"persistentVolumeClaim": {"claimName": "models"}}),
        (
            {"hostPath": "/srv/models"},
            {"hostPath": {"path": "/srv/models", "type": "DirectoryOrCreate"}},
        ),
    ],
)
def test_an_engine_downloads_its_model_into_the_cache(
    side: str, cache: dict[str, str], source: dict[str, Any]
) -> None:
    values = {"modelCache": cache}
    place = variables(values, side)["HF_HOME"]
    (volume,) = [
        one["name"] for one in container(values, side)["volumeMounts"] if one["mountPath"] == place
    ]
    assert {"name": volume, **source} in pod(values, side)["spec"]["volumes"]


def test_only_engines_have_the_token() -> None:
    values = {"tokenSecret": "hugging-face"}
    reference = {"secretKeyRef": {"name": "hugging-face", "key": "token"}}
    assert variables(values, "prefill")["HF_TOKEN"] == reference
    assert variables(values, "decode")["HF_TOKEN"] == reference
    assert "env" not in container(values, "router")


def test_a_variable_or_volume_of_the_values_takes_the_place_of_the_charts() -> None:
    values = {
        "prefill": {
            "env": [{"name": "PD_CONNECTOR_HOST", "value": "10.1.0.1"}],
            "volumes": [{"name": "shm", "hostPath": {"path": "/dev/shm"}}],
        }
    }
    assert variables(values, "prefill")["PD_CONNECTOR_HOST"] == "10.1.0.1"
    assert pod(values, "prefill")["spec"]["volumes"] == values["prefill"]["volumes"]


@pytest.mark.parametrize(
    ("definition", "kind"),
    [
        ("strategy", "DeploymentStrategy"),
        ("tolerations", "Toleration"),
        ("affinity", "Affinity"),
        ("topologySpreadConstraints", "TopologySpreadConstraint"),
        ("initContainers", "Container"),
        ("volumes", "Volume"),
        ("env", "EnvVar"),
        ("envFrom", "EnvFromSource"),
        ("volumeMounts", "VolumeMount"),
        ("resources", "ResourceRequirements"),
        ("securityContext", "SecurityContext"),
    ],
)
def test_the_schema_knows_each_field_that_kubernetes_knows(definition: str, kind: str) -> None:
    schema = json.loads((FOLDER / "chart" / "values.schema.json").read_text())
    part = schema["definitions"][definition]
    assert set(part.get("items", part)["properties"]) == kubernetes_fields(kind)


@pytest.mark.parametrize("side", ["prefill", "decode"])
def test_an_engine_of_the_compose_file_downloads_its_model_into_the_hosts_cache(side: str) -> None:
    services = yaml.safe_load((FOLDER / "compose.yaml").read_text())["services"]
    assert services[side]["volumes"] == [
        "${HF_HOME:-~/.cache/huggingface}:/root/.cache/huggingface"
    ]
    assert services[side]["environment"] == ["HF_TOKEN"]
    assert "environment" not in services["router"]
