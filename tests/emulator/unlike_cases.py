# SPDX-License-Identifier: Apache-2.0
"""Steps of MiMo-V2's attention on a GPU: values of another head size than keys, sinks, windows. Its layers choose their
backend themselves, and find ours under the name of vLLM's where the engine selects CUSTOM."""

import contextlib
import functools
import importlib
import os
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from control_cases import Damage, controls
from graph_cases import replayed
from torch_device import gpu
from transfer_cases import Case
from vllm_cases import BESIDE_PROMPTS, MIXED, VERIFIED, PagedDoor, step
from vllm_door import for_cuda


class MimoDoor(PagedDoor):
    """A layer of MiMo-V2's model, made by vLLM's class."""

    dim, width = 192, 128
    ours = "PagedFlashDiffKvImpl"

    def __init__(self, cache_dtype: str = "auto", window: int | None = None, **engine: Any) -> None:
        super().__init__(cache_dtype, window, **engine)
        if window is not None:  # as in the model: layers with a window have sinks
            self.sinks = torch.linspace(-1.0, 4.0, self.shape.heads)
            self.module.impl.sinks.data = self.sinks.to(self.shape.dtype).to("cuda:0")

    def shaped(self, **given: Any) -> Any:
        return _shape()(**given)


@functools.cache
def _shape() -> Any:
    layers: Any = importlib.import_module("backend_layers")

    class MimoShape(layers.Shape):  # type: ignore[misc]
        def attention(self, config: Any) -> Any:
            _alone()
            model: Any = importlib.import_module("vllm.model_executor.models.mimo_v2")
            made = model.MiMoV2Attention(
                *(64, self.heads, self.kv_heads, self.dim, MimoDoor.width),
                sliding_window_size=self.window or -1,
                add_swa_attention_sink_bias=self.window is not None,
                cache_config=config.cache_config,
                prefix=layers.NAME.removesuffix(".attn"),
            )
            return made.attn

    return MimoShape


@functools.cache
def _alone() -> None:
    """One rank of one, which linear layers want."""
    ranks: Any = importlib.import_module("vllm.distributed.parallel_state")
    rendezvous = Path(tempfile.mkdtemp()) / "rendezvous"
    ranks.init_distributed_environment(1, 0, f"file://{rendezvous}", 0, "gloo")
    ranks.initialize_model_parallel(1, 1)


def _within_keys(batch: Any) -> contextlib.AbstractContextManager[Any]:
    """Values are read from 64 elements before their place on. Layers keep views of their cache, so not `pages` is changed."""
    impl: Any = importlib.import_module("pd_kernels.vllm.paged_diffkv").PagedFlashDiffKvImpl
    read = impl._read

    def shifted(self: Any, query: torch.Tensor, cache: torch.Tensor, dtype: Any) -> Any:
        query, keys, _ = read(self, query, cache, dtype)
        first = MimoDoor.dim - 64
        return query, keys, cache.transpose(1, 2)[..., first : first + MimoDoor.width]

    return mock.patch.object(impl, "_read", shifted)


def _no_sinks(batch: Any) -> contextlib.AbstractContextManager[Any]:
    backend: Any = importlib.import_module("pd_kernels.vllm.paged_backend")
    attend = backend.paged_decode

    def without(*given: Any, sinks: Any, **named: Any) -> Any:
        return attend(*given, **named)

    return mock.patch.object(backend, "paged_decode", without)


DAMAGES: dict[str, Damage] = {
    "values that begin within keys": _within_keys,
    "no sinks": _no_sinks,
}


def chosen() -> None:
    """MiMo-V2's layers use vLLM's own class where CUSTOM is not selected for all of them. What neither the layer nor the
    engine may have is refused when the layer is made."""
    with gpu():
        for_cuda()
        registry: Any = importlib.import_module("vllm.v1.attention.backends.registry")
        config: Any = importlib.import_module("vllm.config")
        names = registry.AttentionBackendEnum
        ours = [
            _class_for(config, names, backend, of_kind).__module__.startswith("pd_kernels.")
            for backend, of_kind in (
                (names.CUSTOM, None),
                (names.CUSTOM, {"full_attention": names.CUSTOM}),
                (names.CUSTOM, {"sliding_window": names.FLASH_ATTN}),
                (names.FLASH_ATTN_DIFFKV, None),
                (None, {"full_attention": names.CUSTOM}),
                (None, None),
            )
        ]
        assert ours == [True, True, False, False, False, False], ours
        with mock.patch.object(MimoDoor, "width", 100):
            assert "values of head size 100" in _refused()
        scheme = mock.Mock(kv_cache_scheme={"strategy": "attn_head"})
        unlike: Any = importlib.import_module("pd_kernels.vllm.paged_diffkv")
        assert "scales of each KV head" in unlike._refusals(128, scheme)[0]
        with mock.patch.dict(os.environ, VLLM_BATCH_INVARIANT="1"):
            assert "batch invarian" in _refused()


def _refused() -> str:
    try:
        MimoDoor()
    except (NotImplementedError, ValueError) as error:
        return str(error)
    return ""


def _class_for(config: Any, names: Any, backend: Any, of_kind: dict[str, Any] | None) -> type:
    options = SimpleNamespace(backend=backend, backend_per_kind=of_kind)
    engine = SimpleNamespace(attention_config=options)
    with mock.patch.object(config, "get_current_vllm_config_or_none", return_value=engine):
        found: type = names.FLASH_ATTN_DIFFKV.get_class()
        return found


UNLIKE: dict[str, Case] = {
    f"vllm, mimo, {name}": functools.partial(step, make=MimoDoor, **given)
    for name, given in {
        "decodes": {"steps": 2},
        "fp8": {"cache_dtype": "fp8"},
        "window and sinks": {"window": 40, "steps": 2},
        "verified, window and sinks": {"requests": VERIFIED, "verified": 4, "window": 40},
        "beside prompts": {"requests": BESIDE_PROMPTS},
        "beside prompts, window and sinks": {"requests": BESIDE_PROMPTS, "window": 24},
        "mixed steps": MIXED,
        "mixed steps, window and sinks": {**MIXED, "window": 24},
    }.items()
} | {
    "vllm, graphs, mimo": functools.partial(replayed, functools.partial(MimoDoor, window=40)),
    "vllm, controls, mimo": functools.partial(
        controls, functools.partial(MimoDoor, window=40), DAMAGES
    ),
    "vllm, mimo, chosen": chosen,
}
