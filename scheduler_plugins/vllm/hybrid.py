# SPDX-License-Identifier: Apache-2.0
"""Hybrid prefilling (PrefillOnly, section 4): linear layers in chunks, attention whole.

When a long prompt is prefilled in one step, most memory does not go to its KV. It goes to the tensors of the MLPs
between their two projections. MLPs work row by row, so they can process the prompt in chunks of tokens, and write the
outputs into one tensor. Attention still sees the whole prompt at once.

The plug-in is opt-in: `PD_HYBRID_PREFILL_CHUNK=2048` in the engine's environment. It changes no model
code: it wraps `forward` of the MLP modules once a model is loaded.

Each MLP allocates its output. vLLM's loop over the layers holds a layer's output while the next layer runs. So at least
two buffers are needed, and the allocator returns the same two. The paper writes over the input, but that is wrong if
other modules read the input (shared experts).
"""

from __future__ import annotations

import functools
import inspect
import logging
import os
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    from torch import nn

VARIABLE = "PD_HYBRID_PREFILL_CHUNK"
"""Tokens in a chunk."""
_WRAPPED = "_pd_hybrid_prefill"

logger = logging.getLogger("vllm.pd_hybrid_prefill")


class HybridError(ValueError):
    """Hybrid prefilling is set and not possible. The message says why and what to do."""


def register() -> None:
    """Entry point of `vllm.general_plugins`: does nothing unless the variable is set.

    Raises:
        HybridError: the variable is not a number of tokens.
    """
    chunk_tokens = chunk_from(os.environ.get(VARIABLE))
    if chunk_tokens is None:
        return
    from vllm.model_executor.model_loader.base_loader import BaseModelLoader

    plain = BaseModelLoader.load_model
    if hasattr(plain, _WRAPPED):
        return

    @functools.wraps(plain)
    def load_model(self: Any, vllm_config: Any, *args: Any, **kwargs: Any) -> Any:
        check_eager(vllm_config.compilation_config)
        model = plain(self, vllm_config, *args, **kwargs)
        count = install(model, chunk_tokens)
        logger.info("hybrid prefilling: %d MLPs in chunks of %d tokens", count, chunk_tokens)
        return model

    setattr(load_model, _WRAPPED, True)
    BaseModelLoader.load_model = load_model


def chunk_from(text: str | None) -> int | None:
    """Tokens in a chunk; None: off. Raises HybridError for anything but a number above 0."""
    if not text:
        return None
    if not text.isdecimal() or int(text) < 1:
        raise HybridError(f"{VARIABLE} {text!r}: must be a number of tokens above 0, as 2048")
    return int(text)


def check_eager(compilation_config: Any) -> None:
    """Raises HybridError if the model is compiled or captured. A compiled graph contains the MLPs, and would ignore the
    wrappers or unroll their loop for every length."""
    mode, graphs = compilation_config.mode, compilation_config.cudagraph_mode
    # Both are enumerations whose value 0 means none.
    if mode or (graphs is not None and getattr(graphs, "value", graphs)):
        raise HybridError(
            f"{VARIABLE} is set, and the model is to be compiled or captured (mode {mode}, "
            f"cudagraph_mode {graphs}): start vLLM with --enforce-eager, or unset it"
        )


def install(model: nn.Module, chunk_tokens: int) -> int:
    """Make all MLPs of a model work in chunks of at most `chunk_tokens` tokens.

    Returns:
        The number of MLPs.

    Raises:
        HybridError: the model has no MLP.
    """
    modules = list(mlps(model))
    if not modules:
        raise HybridError(
            f"{VARIABLE} is set, and {type(model).__name__} has no MLP that could be recognised "
            "(one projection up, one back down, no attention between): unset it"
        )
    for module in modules:
        if not hasattr(module.forward, _WRAPPED):
            # A module's own attribute takes precedence over its class's method.
            module.forward = _in_chunks(module.forward, chunk_tokens)
    return len(modules)


def mlps(model: nn.Module) -> Iterator[nn.Module]:
    """Modules that take one tensor, project it up, and project it back down to its size."""
    for module in model.modules():
        if _is_mlp(module):
            yield module


def _is_mlp(module: nn.Module) -> bool:
    linears = [sizes for child in module.children() if (sizes := _sizes(child))]
    if len(linears) < 2 or not _takes_one(module.forward):
        return False
    # A module with more parts below its projections (attention, experts) may mix rows.
    if any(list(child.children()) for child in module.children() if not _sizes(child)):
        return False
    if any(_mixes_rows(child) for child in module.children()):
        return False
    *ups, down = linears
    hidden, inner = down[1], down[0]
    widths = {out for _, out in ups}
    return all(into == hidden for into, _ in ups) and bool(widths & {inner, 2 * inner})


def _sizes(module: nn.Module) -> tuple[int, int] | None:
    """Input and output sizes of a linear layer of vLLM or torch. For vLLM they are the whole sizes, not per rank."""
    for names in (("input_size", "output_size"), ("in_features", "out_features")):
        into, out = (getattr(module, name, None) for name in names)
        if isinstance(into, int) and isinstance(out, int):
            return into, out
    return None


def _mixes_rows(module: nn.Module) -> bool:
    """Whether a module's output for a token can depend on other tokens. True for modules that keep KV or a state."""
    return any(hasattr(module, name) for name in ("kv_cache", "attn_backend", "kv_cache_dtype"))


def _takes_one(forward: Callable[..., Any]) -> bool:
    parameters = inspect.signature(forward).parameters.values()
    needed = [
        parameter
        for parameter in parameters
        if parameter.default is parameter.empty
        and parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
    ]
    return len(needed) == 1


def _in_chunks(
    forward: Callable[..., torch.Tensor], chunk_tokens: int
) -> Callable[..., torch.Tensor]:
    @functools.wraps(forward)
    def chunked(x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        if x.dim() != 2 or len(x) <= chunk_tokens or args or kwargs:
            return forward(x, *args, **kwargs)
        first = forward(x[:chunk_tokens])
        out = first.new_empty((len(x), *first.shape[1:]))
        out[:chunk_tokens] = first
        del first
        for begin in range(chunk_tokens, len(x), chunk_tokens):
            part = slice(begin, begin + chunk_tokens)
            out[part] = forward(x[part])
        return out

    setattr(chunked, _WRAPPED, True)
    return chunked
