# SPDX-License-Identifier: Apache-2.0
"""Warns when an engine starts if layers use another backend although ours was selected.

Some models give their layers a backend (`attn_backend=`), or have layers with one of their own:
openPangu and Hunyuan V4 with sinks, MiMo-V2 without FlashAttention 3 and 4. vLLM then does not use the
selected one, and does not say so.
"""

import functools
import re
from collections.abc import Iterable
from typing import Any

from vllm.logger import init_logger
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.model_executor.layers.mamba.abstract import MambaBase
from vllm.v1.kv_cache_interface import get_kv_cache_spec_kind
from vllm.v1.worker.worker_base import WorkerWrapperBase

from pd_kernels.vllm.mla_members import MLA_MEMBERS

logger = init_logger("vllm.pd_kernels")

_WATCHED = "_pd_kernels_watched"


def watch() -> None:
    """Warn whenever a worker of this process has loaded its models and gets its KV cache. Harmless
    to repeat."""
    plain = WorkerWrapperBase.initialize_from_config
    if hasattr(plain, _WATCHED):
        return

    @functools.wraps(plain)
    def initialize_from_config(self: Any, *args: Any, **options: Any) -> Any:
        warn(self.vllm_config)
        return plain(self, *args, **options)

    setattr(initialize_from_config, _WATCHED, True)
    WorkerWrapperBase.initialize_from_config = initialize_from_config


def warn(vllm_config: Any) -> None:
    """Log a warning for each backend that is not ours and has layers for which ours was selected."""
    for (selected, backend, mla), names in _elsewhere(vllm_config).items():
        why = f"{vllm_config.model_config.architecture} chooses their backend itself"
        if backend.startswith("TRITON_ATTN_DIFFKV"):
            why += (
                ", and ours is in the place of FLASH_ATTN_DIFFKV, which needs FlashAttention 3 or 4"
            )
        elif backend == "FLASH_ATTN_DIFFKV (FlashAttentionDiffKVBackend)":
            why += (
                ", and ours is in the place of FLASH_ATTN_DIFFKV only where all layers have CUSTOM"
            )
        if vllm_config.speculative_config is not None:
            why += " (or they are the draft model's: --speculative-config has an attention_backend of its own)"
        if mla and selected == "CUSTOM":
            why = "CUSTOM is not for MLA, which has PD_KERNELS_MLA"
        logger.warning_once(
            "%s was selected, but layers use %s: %s. pd_kernels does not decode them, because %s.",
            *(selected, backend, _compressed(names), why),
        )


def _elsewhere(vllm_config: Any) -> dict[tuple[str, str, bool], list[str]]:
    """The names of the layers for which our backend was selected and which use another, by what was selected, what
    they use, and whether they are MLA."""
    options = vllm_config.attention_config
    of_kind = getattr(options, "backend_per_kind", None) or {}
    elsewhere: dict[tuple[str, str, bool], list[str]] = {}
    if not any(_is_ours(each) for each in (options.backend, *of_kind.values())):
        return elsewhere
    for name, layer in vllm_config.compilation_config.static_forward_context.items():
        if not _attends(layer) or (spec := layer.get_kv_cache_spec(vllm_config)) is None:
            continue
        kind = get_kv_cache_spec_kind(spec).value
        selected = of_kind.get(kind, options.backend)
        backend = layer.get_attn_backend()
        if _is_ours(selected) and not any(_by_us(each.__module__) for each in backend.__mro__):
            # A model's own class can have the name of vLLM's.
            used = f"{backend.get_name()} ({backend.__name__})"
            elsewhere.setdefault((selected.name, used, "mla" in kind), []).append(name)
    return elsewhere


def _attends(layer: Any) -> bool:
    """Whether a layer computes attention: not a recurrent state, or a cache that another layer reads."""
    if not isinstance(layer, AttentionLayerBase) or isinstance(layer, MambaBase):
        return False
    return any(hasattr(layer, name) for name in ("impl", "num_heads", "n_heads"))


def _is_ours(selected: Any) -> bool:
    """Whether we have registered the class for a member of vLLM's enumeration of backends."""
    if selected is None or selected.name not in ("CUSTOM", *MLA_MEMBERS):
        return False  # some other members have no path
    return _by_us(selected.get_path())


def _by_us(path: str) -> bool:
    return path.startswith("pd_kernels.")


def _compressed(names: Iterable[str]) -> str:
    """Names with their numbers listed once: `model.layers.N.attn (N = 0, 1)`."""
    numbers: dict[str, list[str]] = {}
    for name in names:
        numbers.setdefault(re.sub(r"\d+", "N", name), []).append(".".join(re.findall(r"\d+", name)))
    return "; ".join(
        f"{name} (N = {', '.join(values)})" if any(values) else name
        for name, values in numbers.items()
    )
