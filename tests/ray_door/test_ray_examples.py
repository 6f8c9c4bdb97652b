# SPDX-License-Identifier: Apache-2.0
"""The examples' configs are what Ray takes. KubeRay's own schema is not shipped with Ray."""

from pathlib import Path

import pytest
import yaml
from ray.llm._internal.serve.core.configs.llm_config import LLMConfig
from ray.serve.schema import ServeDeploySchema

from pd_connector.ray.app import _with_connector

EXAMPLES = Path(__file__).parents[2] / "examples" / "ray_serve"


def serve_config(name):
    found = yaml.safe_load((EXAMPLES / name).read_text())
    return yaml.safe_load(found["spec"]["serveConfigV2"]) if "spec" in found else found


@pytest.mark.parametrize("name", ["two_gpu_nodes.yaml", "kuberay.yaml"])
def test_a_serve_config_is_one(name):
    (application,) = ServeDeploySchema.model_validate(serve_config(name)).applications
    assert application.import_path == "pd_connector.ray:build_pd_app"
    for side, role in (("prefill_config", "kv_producer"), ("decode_config", "kv_consumer")):
        config = LLMConfig.model_validate(application.args[side])
        made = _with_connector(side, config, role).engine_kwargs["kv_transfer_config"]
        assert (made["kv_connector"], made["kv_role"]) == ("PDConnector", role)


def test_every_node_of_the_manifest_gets_the_key():
    manifest = yaml.safe_load((EXAMPLES / "kuberay.yaml").read_text())
    cluster = manifest["spec"]["rayClusterConfig"]
    groups = [cluster["headGroupSpec"], *cluster["workerGroupSpecs"]]
    for group in groups:
        (container,) = group["template"]["spec"]["containers"]
        assert container["env"][0]["name"] == "PD_CONNECTOR_KEY"
