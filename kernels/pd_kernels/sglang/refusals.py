# SPDX-License-Identifier: Apache-2.0
"""The cases that our backends refuse when the engine starts, by name."""

from collections.abc import Sequence
from typing import Any

import torch

from pd_kernels.attention.decode_call import LARGE_MEMORY, LEAST_FP8

NAME = "pd_kernels"
"""Our name for SGLang's `--decode-attention-backend`."""
ALGORITHMS = ("EAGLE", "EAGLE3", "STANDALONE")
"""SGLang's kinds of speculative decoding whose drafts we verify. NEXTN is SGLang's other name of EAGLE."""
MOST_DRAFTS = 8
"""The most tokens of a request that are verified at a time: the queries that the kernels have."""
SPARSE = (
    "sparse attention (DSA: DeepSeek V3.2, GLM-5), whose kernels SGLang chooses from a list of its own, "
    "--dsa-decode-backend, that takes no other name"
)
_OPTIONS = {
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


def verify_refusals(spec: Any) -> list[str]:
    """The reasons why our kernels cannot verify drafts; `spec` are SGLang's options of speculative decoding, resolved
    (`get_spec()`)."""
    reasons = []
    if spec.speculative_algorithm not in ALGORITHMS:
        return [
            f"--speculative-algorithm {spec.speculative_algorithm}: must be one of {ALGORITHMS}"
        ]
    if spec.speculative_attention_mode != "decode":
        reasons.append(
            f"--speculative-attention-mode {spec.speculative_attention_mode} (another backend would "
            "verify all drafts: add --speculative-attention-mode decode)"
        )
    if spec.speculative_num_draft_tokens > MOST_DRAFTS:
        reasons.append(
            f"--speculative-num-draft-tokens {spec.speculative_num_draft_tokens}: must be at most "
            f"{MOST_DRAFTS}"
        )
    if spec.speculative_adaptive:
        reasons.append("--speculative-adaptive")
    if spec.enable_multi_layer_eagle:
        reasons.append("--enable-multi-layer-eagle")
    return reasons


def draft_refusals(spec: Any) -> list[str]:
    """The reasons why our kernels cannot decode a draft model; `spec` is as in `verify_refusals`."""
    if spec.speculative_eagle_topk == 1:
        return []
    topk = f"--speculative-eagle-topk {spec.speculative_eagle_topk}"
    return [
        f"drafts with {topk} (name SGLang's backend with --speculative-draft-attention-backend)"
    ]


def layer_refusals(
    layer: Any, head_dims: Sequence[int], dtype: torch.dtype, dtypes: Sequence[torch.dtype]
) -> list[str]:
    """The reasons why our kernels cannot decode a layer.

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


def sink_refusals(model: torch.nn.Module, layer_type: type) -> list[str]:
    """The reasons why `mla_decode`, which has no sinks, cannot decode a model.

    Args:
        model: SGLang's model, loaded. A module with sinks hands them to its layers with each call, so they are looked
            for among the tensors beside layers.
        layer_type: SGLang's class of layers.
    """
    names = {
        name
        for module in model.modules()
        if any(isinstance(child, layer_type) for child in module.children())
        for tensors in (module.named_parameters, module.named_buffers)
        for name, _ in tensors(recurse=False)
        if "sink" in name
    }
    return [f"attention sinks ({', '.join(sorted(names))}) with MLA"] if names else []


def gpu_refusals(device: Any, large: Sequence[str], fp8: bool) -> list[str]:
    """The reasons why the kernels cannot run on a GPU.

    Args:
        device: the GPU.
        large: what a model has that needs the shared memory of LARGE_MEMORY.
        fp8: whether the cache is FP8.
    """
    capability = torch.cuda.get_device_capability(device)
    number = ".".join(map(str, capability))
    reasons = []
    if capability[0] not in LARGE_MEMORY:
        reasons += [
            f"{each} on compute capability {number}: runs on 9.0 and 10.x, whose shared memory is large enough"
            for each in large
        ]
    if fp8 and capability < LEAST_FP8:
        least = ".".join(map(str, LEAST_FP8))
        reasons.append(
            f"an FP8 cache on compute capability {number}: needs {least} (--kv-cache-dtype auto)"
        )
    return reasons


def refuse(reasons: Sequence[str]) -> None:
    """Raise NotImplementedError with the reasons, if there are any."""
    if reasons:
        raise NotImplementedError(
            f"--decode-attention-backend {NAME} does not support: {'; '.join(dict.fromkeys(reasons))}. "
            "Leave it out"
        )
