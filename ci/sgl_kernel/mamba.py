# SPDX-License-Identifier: Apache-2.0
"""The functions that SGLang's gated delta nets call on a CPU, in plain torch, one token after another. Exact, and slow.

A convolution's state is `[slot, channel, row]`, and has the last inputs. A matrix's state is `[slot, head, key dim,
value dim]`, as SGLang's own kernels for a CPU keep it (those for a GPU keep it the other way round). Both are written in
place. Arithmetic is float32.
"""

import itertools
from collections.abc import Iterator
from typing import Any

import torch
from torch.nn import functional


def causal_conv1d_fn_cpu(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    activation: str | None,
    conv_states: torch.Tensor,
    has_initial_state: torch.Tensor,
    cache_indices: torch.Tensor,
    query_start_loc: torch.Tensor,
    **options: Any,
) -> torch.Tensor:
    """Convolve prompts, or parts of prompts, that lie one behind the other in `x`, `[channel, token]`."""
    out = torch.empty_like(x)
    for number, first, stop in _sequences(query_start_loc):
        slot = int(cache_indices[number])
        before = conv_states[slot]
        if not bool(has_initial_state[number]):
            before = torch.zeros_like(before)
        window = torch.cat([before.to(x.dtype), x[:, first:stop]], 1)
        out[:, first:stop] = _convolved(window, weight, bias, activation)
        conv_states[slot] = window[:, -before.shape[1] :]
    return out


def causal_conv1d_update_cpu(
    x: torch.Tensor,
    conv_states: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    activation: str | None,
    conv_state_indices: torch.Tensor,
    **options: Any,
) -> torch.Tensor:
    """Convolve one token of each request, `[request, channel]`."""
    out = torch.empty_like(x)
    for number, slot in enumerate(conv_state_indices.tolist()):
        if slot < 0:  # padding
            continue
        window = torch.cat([conv_states[slot].to(x.dtype), x[number, :, None]], 1)
        out[number] = _convolved(window, weight, bias, activation)[:, 0]
        conv_states[slot] = window[:, 1:]
    return out


def chunk_gated_delta_rule_cpu(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    initial_state: torch.Tensor,
    cu_seqlens: torch.Tensor,
    head_first: bool,
    use_qk_l2norm_in_kernel: bool,
    initial_state_indices: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Prompts, or parts of prompts, one behind the other in `[1, token, head, dim]`. Returns (outputs, states, nothing)."""
    assert not head_first
    assert use_qk_l2norm_in_kernel
    out, states = torch.empty_like(v), _keys_first(initial_state, k, v)
    for number, first, stop in _sequences(cu_seqlens):
        slot = int(initial_state_indices[number])
        part = slice(first, stop)
        out[0, part] = _delta_rule(
            q[0, part], k[0, part], v[0, part], g[0, part], beta[0, part], states[slot]
        )
    return out, initial_state, torch.empty(0)


def fused_gdn_gating_cpu(
    A_log: torch.Tensor, a: torch.Tensor, b: torch.Tensor, dt_bias: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Logarithm of the decay, float32, and the strength of the update, each `[1, token, head]`."""
    decay = -A_log.float().exp() * functional.softplus(a.float() + dt_bias.float())
    return decay[None], b.float().sigmoid().to(b.dtype)[None]


def fused_sigmoid_gating_delta_rule_update_cpu(
    A_log: torch.Tensor,
    dt_bias: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    initial_state_source: torch.Tensor,
    initial_state_indices: torch.Tensor,
    cu_seqlens: torch.Tensor,
    use_qk_l2norm_in_kernel: bool,
    softplus_beta: float = 1.0,
    softplus_threshold: float = 20.0,
) -> torch.Tensor:
    """One token of each request, `[1, request, head, dim]`."""
    decay, beta = fused_gdn_gating_cpu(A_log, a, b, dt_bias)
    out, states = torch.empty_like(v), _keys_first(initial_state_source, k, v)
    for number, slot in enumerate(initial_state_indices.tolist()):
        if slot < 0:  # padding
            continue
        part = slice(number, number + 1)
        out[0, part] = _delta_rule(
            q[0, part], k[0, part], v[0, part], decay[0, part], beta[0, part], states[slot]
        )
    return out


def _keys_first(states: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """States as `[slot, head, key dim, value dim]`. SGLang's pool says `[slot, head, value dim, key dim]`, also on a CPU."""
    return states.view(*states.shape[:2], k.shape[-1], v.shape[-1])


def _sequences(starts: torch.Tensor) -> Iterator[tuple[int, int, int]]:
    bounds = starts.tolist()
    for number, (first, stop) in enumerate(itertools.pairwise(bounds)):
        if stop > first:
            yield number, first, stop


def _convolved(
    window: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, activation: str | None
) -> torch.Tensor:
    kernel = weight.float()[:, None]
    offset = None if bias is None else bias.float()
    out = functional.conv1d(window.float()[None], kernel, offset, groups=len(kernel))[0]
    return functional.silu(out) if activation in ("silu", "swish") else out


def _delta_rule(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    decay: torch.Tensor,
    beta: torch.Tensor,
    state: torch.Tensor,
) -> torch.Tensor:
    """Tokens of one sequence, `[token, head, dim]`. `state` is `[head, key dim, value dim]`, and is written at the end."""
    share = v.shape[1] // k.shape[1]  # heads of V for one of Q and K
    q = functional.normalize(q.float(), dim=-1, eps=1e-6).repeat_interleave(share, 1)
    k = functional.normalize(k.float(), dim=-1, eps=1e-6).repeat_interleave(share, 1)
    v, factors, beta = v.float(), decay.float().exp(), beta.float()
    matrix, scale = state.float().transpose(1, 2), q.shape[-1] ** -0.5
    out = torch.empty_like(v)
    for token in range(len(v)):
        matrix = matrix * factors[token][:, None, None]
        seen = torch.einsum("hvk,hk->hv", matrix, k[token])
        change = (v[token] - seen) * beta[token][:, None]
        matrix = matrix + change[:, :, None] * k[token][:, None]
        out[token] = torch.einsum("hvk,hk->hv", matrix, q[token]) * scale
    state.copy_(matrix.transpose(1, 2))
    return out


LIBRARY = torch.library.Library("sgl_kernel", "FRAGMENT")
"""SGLang calls these as `torch.ops.sgl_kernel.*`."""
LIBRARY.define(
    "fused_gdn_gating_cpu(Tensor A_log, Tensor a, Tensor b, Tensor dt_bias) -> (Tensor, Tensor)"
)
LIBRARY.define(
    "fused_sigmoid_gating_delta_rule_update_cpu(Tensor A_log, Tensor dt_bias, Tensor q, Tensor k, Tensor v, Tensor a, "
    "Tensor b, Tensor(a!) initial_state_source, Tensor initial_state_indices, Tensor cu_seqlens, "
    "bool use_qk_l2norm_in_kernel, float softplus_beta=1.0, float softplus_threshold=20.0) -> Tensor"
)
for function in (fused_gdn_gating_cpu, fused_sigmoid_gating_delta_rule_update_cpu):
    LIBRARY.impl(function.__name__, function, "CPU")
