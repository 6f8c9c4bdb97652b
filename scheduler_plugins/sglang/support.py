# SPDX-License-Identifier: Apache-2.0
"""The settings of SGLang that this scheduler does not support. They are refused by name when the engine starts."""

from __future__ import annotations

from typing import Any

from pd_connector.errors import ConfigError

POLICY = "pd_scheduler"
"""Our name for SGLang's `--schedule-policy`."""

_ALONE = {
    "pp_size": "--pipeline-parallel-size",
    "attn_dp_size": "--enable-dp-attention: ranks",
    "attn_cp_size": "--attn-cp-size",
}


def check_supported(scheduler: Any, parallel: Any, disaggregation: Any) -> None:
    """Raises ConfigError if SGLang has settings with which this scheduler cannot order requests.

    Args:
        scheduler: SGLang's, initialised up to its schedule policy.
        parallel: its parallel context.
        disaggregation: its disaggregation settings.
    """
    for name, option in _ALONE.items():
        if (found := getattr(parallel, name, 1)) != 1:
            raise ConfigError(
                _refusal(
                    f"{option} {found}", "its ranks do not schedule in the same step, use --tp"
                )
            )
    if disaggregation.disaggregation_mode == "decode":
        raise ConfigError(
            _refusal("--disaggregation-mode decode", "prompts are computed on the prefill engine")
        )
    if scheduler.dllm_config is not None:
        raise ConfigError(
            _refusal("a diffusion model (--dllm-algorithm)", "it has no prefill to order")
        )
    if disaggregation.enable_pdmux:
        raise ConfigError(_refusal("--enable-pdmux", "it does not take SGLang's prefill adder"))


def check_routes(tokenizer_workers: int, *, routes: bool) -> None:
    """Raises ConfigError if classes come from headers, but none of our code sees the headers."""
    if routes and tokenizer_workers > 1:
        raise ConfigError(
            _refusal(
                f"--tokenizer-worker-num {tokenizer_workers} with request_router.routes",
                "SGLang loads no plug-in in such workers, so they do not know the classes; use 1, or let "
                "clients name their class in custom_params",
            )
        )


def _refusal(found: str, why: str) -> str:
    return f"{found}: not supported with --schedule-policy {POLICY}; {why}"
