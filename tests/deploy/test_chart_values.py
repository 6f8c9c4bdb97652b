# SPDX-License-Identifier: Apache-2.0
"""Wrong values of the chart are told by Helm, before anything is applied."""

import json
from typing import Any

import pytest
from support.charts import FOLDER, rendered

from pd_connector.config import Config

WRONG: list[tuple[dict[str, Any], str]] = [
    ({"prefil": {"replicas": 1}}, "additional properties 'prefil' not allowed"),
    ({"prefill": {"tensorParallel": 2}}, "additional properties 'tensorParallel' not allowed"),
    ({"prefill": {"tensorParallelSize": 0}}, "got 0, want 1"),
    ({"decode": {"tensorParallelSize": "two"}}, "got string, want integer"),
    ({"prefill": {"args": "--block-size=64"}}, "got string, want array"),
    ({"keySecret": ""}, "'/keySecret': minLength"),
    ({"ports": {"control": 70000}}, "maximum: got 70,000, want 65,535"),
    ({"networkPolicy": False}, "got boolean, want object"),
    ({"prefill": {"connector": {"data_port": 7300}}}, "set ports.data"),
    (
        {"prefill": {"args": ["--kv-transfer-config={}"]}},
        "the chart sets --kv-transfer-config={} itself",
    ),
    ({"decode": {"args": ["--tensor-parallel-size", "2"]}}, "decode.tensorParallelSize"),
    ({"router": {"args": ["--port=9000"]}}, "router.args: the chart sets --port=9000 itself"),
    ({"ports": {"data": 7101}, "prefill": {"tensorParallelSize": 2}}, "set them further apart"),
    ({"ports": {"control": 65535}, "prefill": {"tensorParallelSize": 2}}, "a port above 65535"),
    ({"prefill": {"toleration": []}}, "additional properties 'toleration' not allowed"),
    ({"decode": {"volumes": [{"name": "x", "persistentVolumeClam": {}}]}}, "/decode/volumes/0"),
    ({"decode": {"volumes": [{"hostPath": {"path": "/x"}}]}}, "missing property 'name'"),
    ({"router": {"resources": {"limts": {}}}}, "additional properties 'limts' not allowed"),
    ({"prefill": {"affinity": {"nodeAfinity": {}}}}, "properties 'nodeAfinity' not allowed"),
    ({"prefill": {"env": [{"name": "A", "valueFrm": {}}]}}, "properties 'valueFrm' not allowed"),
    ({"prefill": {"env": [{"name": "A", "value": 1}]}}, "/prefill/env/0/value': got number"),
    ({"prefill": {"initContainers": [{"name": "a", "img": "b"}]}}, "/prefill/initContainers/0"),
    ({"prefill": {"securityContext": {"capabilites": {}}}}, "/prefill/securityContext"),
    (
        {"router": {"volumeMounts": [{"name": "certs", "mountPath": "/certs"}]}},
        "no volume has the name certs: add it to router.volumes",
    ),
    ({"decode": {"podLabels": {"app.kubernetes.io/name": "x"}}}, "the chart finds its pods by"),
    ({"imagePullSecrets": ["registry"]}, "/imagePullSecrets/0': got string, want object"),
    ({"modelCache": {"claim": "a", "hostPath": "/b"}}, "claim a and hostPath /b: leave one out"),
    ({"modelCache": {"path": "/b"}}, "additional properties 'path' not allowed"),
    ({"modelCache": {"hostPath": "models"}}, "'models' does not match pattern"),
    ({"autoscaling": {"tokenSecret": "x"}}, "additional properties 'tokenSecret' not allowed"),
    ({"decode": {"connector": {"codc": "int8"}}}, "additional properties 'codc' not allowed"),
    ({"prefill": {"connector": {"key": "PW"}}}, "put the key into the secret pd-connector-key"),
    ({"autoscaling": {"decode": {"minReplicas": 9}}}, "minReplicas 9 is above maxReplicas 4"),
]


@pytest.mark.parametrize(("values", "told"), WRONG, ids=[told for _, told in WRONG])
def test_a_wrong_value_is_told_by_name(values: dict[str, Any], told: str) -> None:
    with pytest.raises(Exception, match="pd-connector") as refused:
        rendered(values)
    assert told in str(refused.value)
    assert "PW" not in str(refused.value)


def test_the_schema_has_the_connectors_keys() -> None:
    schema = json.loads((FOLDER / "chart" / "values.schema.json").read_text())
    connector = schema["definitions"]["engines"]["properties"]["connector"]["properties"]
    assert set(connector) == set(Config.__struct_fields__)


@pytest.mark.parametrize(
    "values",
    [
        {"ports": {"control": 7102, "data": 7100}, "prefill": {"tensorParallelSize": 2}},
        {"decode": {"connector": {"data_port": 7300}}},
        {"prefill": {"args": ["--port-name=x", "--block-size=64"]}},
        {"global": {"anything": 1}},
    ],
)
def test_values_that_look_alike_and_are_right_are_taken(values: dict[str, Any]) -> None:
    assert rendered(values)
