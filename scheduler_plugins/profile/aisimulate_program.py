# SPDX-License-Identifier: Apache-2.0
"""Run by the Python that has AISimulate: step times of an engine, from JSON on standard input to JSON on standard output.

In: `{"model", "system", "tp", "steps": [[tokens, cached, batch, context], ...]}`. Out: `{"version", "seconds": [...]}`.
It imports nothing of ours: that Python may not have it.
"""

import json
import sys
from importlib.metadata import version


def main() -> None:
    """Answer one question."""
    request = json.load(sys.stdin)
    from aisimulate_core.sdk import (  # type: ignore[import-not-found, unused-ignore]
        ForwardPassPerfModelConfig,
        RustForwardPassPerfModel,
    )

    model = RustForwardPassPerfModel.best_available(
        ForwardPassPerfModelConfig(
            model=request["model"],
            system=request["system"],
            backend="vllm",
            worker_type="aggregated",
            tp=request["tp"],
            estimation_mode="auto",
            fallback_policy="deny",
        )
    )
    seconds = [
        model.estimate_forward_pass_time_ms(
            {
                "scheduled_requests": {
                    "num_prefill_requests": int(tokens > 0),
                    "sum_prefill_tokens": tokens,
                    "sum_prefill_kv_tokens": cached,
                    "num_decode_requests": batch,
                    "sum_decode_kv_tokens": context,
                }
            }
        )
        / 1e3
        for tokens, cached, batch, context in request["steps"]
    ]
    json.dump({"version": version("aisimulate"), "seconds": seconds}, sys.stdout)


if __name__ == "__main__":
    main()
