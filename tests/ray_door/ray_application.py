# SPDX-License-Identifier: Apache-2.0
"""The Serve application of the tests with real replicas: engines that differ in their pages, our scheduler on
the decode side, our router among prefill replicas."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest import mock

from ray.serve.deployment import Application
from ray_watched import WithControl

from pd_connector.ray import app, build_pd_app

ROOT = Path(__file__).parents[2]
MODEL = ROOT / "pd_connector" / "tools" / "demo" / "model"
PREFILL, DECODE = "Prefill:demo", "Decode:demo"


def application() -> Application:
    """One replica on each side; prefill replicas on one node, the rest on the other."""
    with mock.patch.object(app, "DecodeServer", WithControl):
        return build_pd_app(
            {
                "prefill_config": side("prefill", block_size=32),
                "decode_config": side(
                    "decode",
                    block_size=64,
                    scheduler_cls="scheduler_plugins.vllm.PrefixAwareScheduler",
                ),
                "ingress_deployment_config": {
                    "num_replicas": 1,
                    "graceful_shutdown_wait_loop_s": 0.2,
                    "ray_actor_options": {"resources": {"decode": 1}},
                },
            }
        )


def side(node: str, **engine_kwargs: Any) -> dict[str, Any]:
    """An `LLMConfig` whose replicas run on the node that has this resource."""
    return {
        "model_loading_config": {"model_id": "demo", "model_source": str(MODEL)},
        "accelerator_config": {"kind": "cpu"},
        "callback_config": {"callback_class": "ray_watched:QuickStart"},
        "engine_kwargs": {
            "dtype": "float32",
            "max_model_len": 4096,
            "enforce_eager": True,
            "max_num_batched_tokens": 256,
            "kv_cache_memory_bytes": 256 << 20,  # what is larger takes longer to make
            # The lease of a killed decode replica's KV lasts this long; a shorter one speeds up tests that stop decode
            # engines.
            "kv_transfer_config": {"kv_connector_extra_config": {"lease_s": 12.0, "slots": 4}},
            **engine_kwargs,
        },
        "placement_group_config": {"bundles": [{"CPU": 0.5, node: 1}]},
        "deployment_config": {
            "num_replicas": 1,
            "request_router_config": {
                "request_router_class": "ray_watched:WatchedRouter",
                "request_router_kwargs": {"policy": "cache_aware"},
            },
            "ray_actor_options": {"num_cpus": 0},
            "health_check_period_s": 1,
            "graceful_shutdown_wait_loop_s": 0.2,
        },
    }
