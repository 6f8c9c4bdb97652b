# SPDX-License-Identifier: Apache-2.0
"""The cases that our backends refuse when the engine starts, by name."""

from collections.abc import Sequence
from typing import Any

import torch

NAME = "pd_kernels"
"""Our name for SGLang's `--decode-attention-backend`."""
_OPTIONS = {
    "speculative_algorithm": "--speculative-algorithm",
    "enable_unified_memory": "--enable-unified-memory",
    "enable_hisparse": "--enable-hisparse",
    "enable_two_batch_overlap": "--enable-two-batch-overlap",
    "enable_pdmux": "--enable-pdmux",
    "enable_lean_attention": "--enable-lean-attention",
    "enable_deterministic_inference": "--enable-deterministic-inference",
    "enable_kv_cache_sharding": "--enable-kv-cache-sharding",
}
"""SGLang's arguments that change the place of KV, or the part that decodes."""


def engine_refusals(server_args: Any, prefill: str) -> list[str]:
    """The reasons why our kernels cannot decode in an engine.

    Args:
        server_args: SGLang's server arguments.
        prefill: name of the backend that computes prompts.
    """
    options = [option for name, option in _OPTIONS.items() if getattr(server_args, name, None)]
    if getattr(server_args, "dcp_size", 1) != 1:
        options.append(f"--dcp-size {server_args.dcp_size}")
    if prefill == NAME:
        options.append(
            f"--attention-backend {NAME} (prompts need a backend of SGLang's: name ours with "
            "--decode-attention-backend alone)"
        )
    return options


def layer_refusals(
    layer: Any, head_dims: Sequence[int], dtype: torch.dtype, dtypes: Sequence[torch.dtype]
) -> list[str]:
    """The reasons why our kernels cannot decode a layer with keys and values.

    Args:
        layer: SGLang's `RadixAttention`.
        head_dims: head sizes that have a kernel; empty: all.
        dtype: the model's dtype.
        dtypes: dtypes that have a kernel; empty: all.
    """
    reasons = []
    dims = dict.fromkeys((layer.qk_head_dim, layer.v_head_dim))
    reasons += [
        f"head size {dim}: must be one of {list(head_dims)}"
        for dim in dims
        if head_dims and dim not in head_dims
    ]
    if dtypes and dtype not in dtypes:
        reasons.append(f"dtype {dtype}: must be one of {list(dtypes)}")
    if layer.is_cross_attention or layer.attn_type.value != "decoder":
        reasons.append(f"attention of type {layer.attn_type.value}: only decoders")
    if layer.logit_cap and layer.logit_capping_method != "tanh":
        reasons.append(f"soft cap by {layer.logit_capping_method}: only tanh")
    if layer.xai_temperature_len > 0:
        reasons.append("a temperature that grows with the length (xai_temperature_len)")
    return reasons


def refuse(reasons: Sequence[str]) -> None:
    """Raise NotImplementedError with the reasons, if there are any."""
    if reasons:
        raise NotImplementedError(
            f"--decode-attention-backend {NAME} does not support: {'; '.join(dict.fromkeys(reasons))}. "
            "Leave it out"
        )
