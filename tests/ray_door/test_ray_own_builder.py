# SPDX-License-Identifier: Apache-2.0
"""Ray's own prefill/decode configurations with our connector's name in them; without a cluster. Requests through Ray's server were tried by hand
(docs/ray.md)."""

from types import SimpleNamespace

import pytest
import ray
import yaml
from ray._common.utils import import_attr
from ray.llm._internal.serve.core.configs.llm_config import LLMConfig
from ray.llm._internal.serve.engines.vllm.kv_transfer.factory import KVConnectorBackendFactory
from ray.llm._internal.serve.engines.vllm.vllm_engine import VLLMEngine
from ray.llm._internal.serve.serving_patterns.prefill_decode.pd_server import (
    PDDecodeServer,
    PDPrefillServer,
)
from ray.serve.schema import ReplicaRank, ServeDeploySchema

from pd_connector.ray import PDConnectorBackend, build_pd_app, register

# The shape of the configuration in Ray's guide to prefill/decode disaggregation.
GUIDE = """
applications:
  - args:
      prefill_config:
        model_loading_config: {model_id: m}
        engine_kwargs:
          kv_transfer_config: {kv_connector: NAME, kv_role: kv_producer, engine_id: engine1}
        deployment_config:
          autoscaling_config: {min_replicas: 2, max_replicas: 4}
      decode_config:
        model_loading_config: {model_id: m}
        engine_kwargs:
          kv_transfer_config: {kv_connector: NAME, kv_role: kv_consumer, engine_id: engine2}
        deployment_config:
          autoscaling_config: {min_replicas: 6, max_replicas: 10}
    import_path: IMPORT_PATH
    name: pd
    route_prefix: "/"
"""


@pytest.fixture(scope="module", autouse=True)
def ray_for_this_file():
    """Ray keeps the registry of connectors, and starts by itself where it is asked for it. The tests that follow start
    clusters of their own."""
    ray.init(address="local", num_cpus=1, include_dashboard=False)
    yield
    ray.shutdown()


@pytest.fixture
def registered():
    register()
    register()  # harmless
    yield
    KVConnectorBackendFactory.unregister_backend("PDConnector")


def servers(import_path, name="PDConnector"):
    """Classes of the deployments that a config makes, by the deployments' names."""
    text = GUIDE.replace("IMPORT_PATH", import_path).replace("NAME", name)
    (application,) = ServeDeploySchema.model_validate(yaml.safe_load(text)).applications
    made = import_attr(application.import_path)(application.args)
    (decode,) = made._bound_deployment.init_kwargs["llm_deployments"].values()
    prefill = decode._bound_deployment.init_kwargs["prefill_server"]
    return {
        one._bound_deployment.name: one._bound_deployment.func_or_class for one in (prefill, decode)
    }


def test_rays_builder_takes_our_name(registered):
    assert servers("ray.serve.llm:build_pd_openai_app") == {
        "Prefill:m": PDPrefillServer,
        "Decode:m": PDDecodeServer,
    }
    assert KVConnectorBackendFactory.get_backend_class("PDConnector") is PDConnectorBackend


def test_the_same_configuration_is_one_for_ours(registered):
    for name, server in servers("pd_connector.ray:build_pd_app").items():
        assert server.__module__ == "pd_connector.ray.servers", name


def test_one_config_object_may_be_that_of_both_sides(registered):
    """Each side gets its own role, and the caller's object is as it was."""
    both = LLMConfig(model_loading_config={"model_id": "m"})
    ingress = build_pd_app({"prefill_config": both, "decode_config": both})
    (decode,) = ingress._bound_deployment.init_kwargs["llm_deployments"].values()
    prefill = decode._bound_deployment.init_kwargs["prefill_server"]
    roles = [
        side._bound_deployment.init_kwargs["llm_config"].engine_kwargs["kv_transfer_config"][
            "kv_role"
        ]
        for side in (prefill, decode)
    ]
    assert roles == ["kv_producer", "kv_consumer"]
    assert "kv_transfer_config" not in both.engine_kwargs


@pytest.mark.parametrize("engine_id", [{}, {"engine_id": "engine1"}])
def test_rays_engine_takes_our_name(registered, monkeypatch, engine_id):
    """As Ray's tests make one: in a replica that has a rank and nothing else."""
    replica = SimpleNamespace(rank=ReplicaRank(rank=0, node_rank=0, local_rank=0))
    monkeypatch.setattr("ray.serve.get_replica_context", lambda: replica)
    transfer = {"kv_connector": "PDConnector", "kv_role": "kv_both", **engine_id}
    made = [
        VLLMEngine(
            LLMConfig(
                model_loading_config={"model_id": "m"},
                engine_kwargs={"kv_transfer_config": dict(transfer)},
            )
        ).llm_config
        for _ in range(2)
    ]
    assert all(isinstance(config.kv_connector_backend, PDConnectorBackend) for config in made)
    names = {config.engine_kwargs["kv_transfer_config"]["engine_id"] for config in made}
    assert len(names) == 2


def test_without_registering_it_is_a_connector_that_ray_does_not_know():
    """The control."""
    assert KVConnectorBackendFactory.get_backend_class("PDConnector") is not PDConnectorBackend
