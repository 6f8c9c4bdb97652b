# SPDX-License-Identifier: Apache-2.0
"""Prefill and decode replicas in Ray Serve on one machine without a GPU: `python one_machine.py`.

Starts Ray, two replicas with the small model that ships with pd-connector, asks them, and prints where the
prompts were computed and what moved. `--stay` serves until Ctrl-C.
"""

import argparse
import json
import os
import time
import urllib.request
from pathlib import Path

import pd_connector

MODEL = Path(pd_connector.__file__).parent / "tools" / "demo" / "model"
PORT = 8000
FIRST_PROMPT = "import asyncio\n\n\nasync def main() -> None:\n    " * 20
WANTED = ("early_chunks", "received_bytes", "received_transfers", "serve_requests")


def side(**engine_kwargs: object) -> dict[str, object]:
    """One side's `LLMConfig`: its replicas, and arguments of their engines."""
    return {
        "model_loading_config": {"model_id": "demo", "model_source": str(MODEL)},
        "accelerator_config": {"kind": "cpu"},
        "engine_kwargs": {
            "enforce_eager": True,
            "max_model_len": 4096,
            "max_num_batched_tokens": 256,
            "kv_transfer_config": {"kv_connector_extra_config": {"codec": "int8"}},
            **engine_kwargs,
        },
        "deployment_config": {"num_replicas": 1},
    }


def ask(prompt: str) -> str:
    """A completion of 16 tokens."""
    body = {"model": "demo", "prompt": prompt, "max_tokens": 16, "temperature": 0}
    request = urllib.request.Request(
        f"http://127.0.0.1:{PORT}/v1/completions",
        json.dumps(body).encode(),
        {"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=120) as answer:
        return str(json.load(answer)["choices"][0]["text"])


def print_metrics(port: int) -> None:
    """What the engines and the decode replica have counted, on Ray's own endpoint."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
        lines = answer.read().decode().splitlines()
    for line in lines:
        name, _, value = line.rpartition(" ")
        if any(name.startswith(f"ray_pd_connector_{one}_total") for one in WANTED):
            outcome = name.partition('outcome="')[2].partition('"')[0]
            if float(value):
                print(f"  {name.partition('{')[0]} {outcome} {float(value):.0f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--stay", action="store_true", help="serve until Ctrl-C")
    stay = parser.parse_args().stay
    # Without these each engine would pin all cores and take half of the memory, and outlive a replica that
    # is killed.
    os.environ |= {
        "OMP_NUM_THREADS": "1",
        "RAY_kill_child_processes_on_worker_exit_with_raylet_subreaper": "true",
        "RAY_USAGE_STATS_ENABLED": "0",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    }
    import ray
    from ray import serve

    from pd_connector.ray import build_pd_app

    ray.init(num_cpus=8, include_dashboard=False, log_to_driver=False)
    try:
        print("starting a prefill and a decode replica: about a minute")
        serve.start(http_options={"port": PORT})
        app = build_pd_app(
            {
                "prefill_config": side(block_size=32),
                "decode_config": side(block_size=64),  # engines may differ
                "ingress_deployment_config": {"num_replicas": 1},
            }
        )
        serve.run(app)
        for number in range(4):
            print(f"answer {number}: {ask(FIRST_PROMPT + str(number))!r}")
        time.sleep(12)  # Ray exports metrics every ten seconds
        print_metrics(ray.nodes()[0]["MetricsExportPort"])
        while stay:
            time.sleep(1)
    except KeyboardInterrupt:
        pass
    finally:
        serve.shutdown()
        ray.shutdown()


if __name__ == "__main__":
    main()
