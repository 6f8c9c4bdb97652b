# SPDX-License-Identifier: Apache-2.0
"""Gated delta nets of vLLM on a CPU in float32: loaded by `--worker-extension-cls`. vLLM's own kernels for a CPU take
bfloat16 alone, and what they round hides what a handoff could do wrong.

The functions are those that SGLang's engines of the tests have (ci/sgl_kernel), so both engines compute alike. The matrix of
a state is `[value dim][key dim]` here, as vLLM's other kernels keep it. SGLang's for a CPU keep it the other way round.
"""

import importlib.util
from pathlib import Path
from typing import Any

import torch
from probe import Probe
from vllm.forward_context import get_forward_context
from vllm.model_executor.layers.mamba.ops.cpu import gdn_attention
from vllm.utils.torch_utils import LayerNameType, _resolve_layer_name

_KERNELS = Path(__file__).parents[2] / "ci" / "sgl_kernel" / "mamba.py"


class ExactDeltaNets(Probe):
    """A worker whose delta nets are computed in float32, one token after another."""


def _kernels() -> Any:
    """The functions. Their folder is not on the path: vLLM would take it for SGLang's package."""
    spec = importlib.util.spec_from_file_location("exact_kernels", _KERNELS)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _compute(
    mixed_qkv: torch.Tensor,
    b: torch.Tensor,
    a: torch.Tensor,
    core_attn_out: torch.Tensor,
    layer_name: LayerNameType,
) -> None:
    """One layer, for all requests of a step. Stands in for vLLM's function of the same arguments."""
    context = get_forward_context()
    layer = context.no_compile_layers[_resolve_layer_name(layer_name)]
    if context.attn_metadata is None:
        return
    step = context.attn_metadata[layer.prefix]
    convolution, matrices = layer.kv_cache
    starts, pages = step.non_spec_query_start_loc, step.non_spec_state_indices_tensor
    tokens = step.num_actual_tokens
    continued = step.has_initial_state if step.num_prefills else torch.ones(len(pages)).bool()
    for page, begun in zip(pages.tolist(), continued.tolist(), strict=True):
        if not begun:
            matrices[page].zero_()
    convolved = _KERNEL.causal_conv1d_fn_cpu(
        mixed_qkv[:tokens].transpose(0, 1),
        layer.conv1d.weight.flatten(1),
        layer.conv1d.bias,
        layer.activation,
        convolution.transpose(1, 2),
        continued,
        pages,
        starts,
    )
    query, key, value = layer.rearrange_mixed_qkv(convolved.transpose(0, 1))
    decay, beta = _KERNEL.fused_gdn_gating_cpu(layer.A_log, a[:tokens], b[:tokens], layer.dt_bias)
    out, _, _ = _KERNEL.chunk_gated_delta_rule_cpu(
        query, key, value, decay, beta, matrices.transpose(2, 3), starts, False, True, pages
    )
    core_attn_out[:tokens] = out[0]


_KERNEL = _kernels()
gdn_attention.cpu_gdn_attention_core = _compute
