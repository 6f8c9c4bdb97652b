# SPDX-License-Identifier: Apache-2.0
"""MLA layers that decode with mla_decode compute what vLLM's do, on the same cache."""

import dataclasses
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

pytest.importorskip("vllm")

from latent_layers import LATENT, ROPE, LatentShape
from vllm.platforms import current_platform
from vllm.platforms.interface import DeviceCapability
from vllm.v1.attention.backend import AttentionCGSupport, CommonAttentionMetadata
from vllm.v1.attention.backends import registry
from vllm.v1.attention.backends.mla.cpu_mla import CPUMLAImpl
from vllm.v1.attention.backends.registry import AttentionBackendEnum
from vllm.v1.attention.selector import _cached_get_attn_backend

from pd_kernels.attention import mla_call
from pd_kernels.vllm import mla_backend, plugin
from pd_kernels.vllm.mla_backend import MlaBuilder
from pd_kernels.vllm.mla_cpu import CpuMlaImpl
from pd_kernels.vllm.mla_cuda import MlaImplCuda

SHAPE = LatentShape()
HEADS, PAGE, PAGES = SHAPE.heads, SHAPE.page, 40
LENGTHS = (70, 1, 33, 32, 200)
TOLERANCE = 1e-5

pytestmark = pytest.mark.skipif(not current_platform.is_cpu(), reason="vLLM's CPU build is wanted")


@pytest.fixture(autouse=True)
def _registry() -> Iterator[None]:
    """Without the plugin, and without what was selected before."""
    with mock.patch.dict(registry._ATTN_OVERRIDES, clear=True), mock.patch.dict(os.environ):
        os.environ.pop(plugin.MLA_VARIABLE, None)
        _cached_get_attn_backend.cache_clear()
        yield
        _cached_get_attn_backend.cache_clear()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return SHAPE.save(tmp_path_factory.mktemp("latent"))


def made(model: Path) -> tuple[Any, Any]:
    """An MLA layer as vLLM makes it, and its builder. With AMX, vLLM has another backend."""
    return SHAPE.layer(model, "CPU_MLA")


def common(queries: int = 1) -> CommonAttentionMetadata:
    pages = torch.randperm(PAGES, generator=torch.Generator().manual_seed(5)).int()
    table = torch.zeros(len(LENGTHS), -(-max(LENGTHS) // PAGE), dtype=torch.int32)
    for row, length in enumerate(LENGTHS):
        used = -(-length // PAGE)
        table[row, :used], pages = pages[:used], pages[used:]
    starts = torch.arange(len(LENGTHS) + 1, dtype=torch.int32) * queries
    return CommonAttentionMetadata(
        query_start_loc=starts,
        query_start_loc_cpu=starts,
        seq_lens=torch.tensor(LENGTHS, dtype=torch.int32),
        num_reqs=len(LENGTHS),
        num_actual_tokens=len(LENGTHS) * queries,
        max_query_len=queries,
        max_seq_len=max(LENGTHS),
        block_table_tensor=table,
        slot_mapping=torch.zeros(len(LENGTHS) * queries, dtype=torch.int64),
    )


def decoded(layer: Any, builder: Any, batch: CommonAttentionMetadata, seed: int) -> torch.Tensor:
    """`[token, heads, 512]` of random queries over a random cache."""
    chance = torch.Generator().manual_seed(seed)
    cache = torch.randn(PAGES, PAGE, LATENT + ROPE, generator=chance)
    query = torch.randn(batch.num_actual_tokens, HEADS, LATENT + ROPE, generator=chance)
    metadata = builder.build(0, batch)
    split = (query[..., :LATENT], query[..., LATENT:])
    out, _ = layer.impl.forward_mqa(split, cache, metadata, layer)
    return out


def test_decodes_are_those_of_the_stock_backend(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    theirs = made(model)
    assert type(theirs[0].impl) is CPUMLAImpl
    monkeypatch.setenv(plugin.MLA_VARIABLE, "CPU_MLA")
    plugin.register()
    _cached_get_attn_backend.cache_clear()
    ours = made(model)
    assert type(ours[0].impl) is CpuMlaImpl
    wanted = decoded(*theirs, common(), 7)
    with mock.patch.object(mla_backend, "mla_decode", wraps=mla_backend.mla_decode) as decode:
        found = decoded(*ours, common(), 7)
    assert decode.call_count == 1
    torch.testing.assert_close(found, wanted, atol=TOLERANCE, rtol=0)
    # The negative control: another page.
    other = common()
    other.block_table_tensor[0] = other.block_table_tensor[0].roll(1)
    moved = decoded(*ours, other, 7) - wanted
    assert float(moved[0].abs().max()) > 1000 * TOLERANCE


def test_several_tokens_are_verified_as_if_they_came_one_by_one(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(plugin.MLA_VARIABLE, "CPU_MLA")
    plugin.register()
    layer, builder = made(model)
    builder.reorder_batch_threshold = 3
    batch = common(queries=3)
    batch.seq_lens = batch.seq_lens.clamp(min=3)
    chance = torch.Generator().manual_seed(7)
    cache = torch.randn(PAGES, PAGE, LATENT + ROPE, generator=chance)
    query = torch.randn(batch.num_actual_tokens, HEADS, LATENT + ROPE, generator=chance)
    together, _ = layer.impl.forward_mqa(query, cache, builder.build(0, batch), layer)
    for place in range(3):
        one = common()
        one.seq_lens = batch.seq_lens - 2 + place
        alone, _ = layer.impl.forward_mqa(query[place::3], cache, builder.build(0, one), layer)
        torch.testing.assert_close(together[place::3], alone, atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("counts", [(6, 1, 3, 2, 6), (1, 2, 0, 5, 0)])
def test_requests_with_unlike_numbers_of_tokens_are_one_batch_of_decodes(
    model: Path, monkeypatch: pytest.MonkeyPatch, counts: tuple[int, ...]
) -> None:
    """A drafter may propose fewer tokens for some requests. Requests without any pad a batch."""
    monkeypatch.setenv(plugin.MLA_VARIABLE, "CPU_MLA")
    plugin.register()
    layer, builder = made(model)
    builder.reorder_batch_threshold = 6
    starts = torch.tensor([0, *counts]).cumsum(0).int()
    changes = {
        "query_start_loc": starts,
        "query_start_loc_cpu": starts,
        "max_query_len": max(counts),
    }
    batch = dataclasses.replace(common(), **changes, num_actual_tokens=sum(counts))
    batch.seq_lens = batch.seq_lens.clamp(min=6)
    chance = torch.Generator().manual_seed(7)
    cache = torch.randn(PAGES, PAGE, LATENT + ROPE, generator=chance)
    query = torch.randn(sum(counts), HEADS, LATENT + ROPE, generator=chance)
    metadata = builder.build(0, batch)
    assert metadata.num_decode_tokens == sum(counts)
    with mock.patch.object(mla_backend, "mla_decode", wraps=mla_backend.mla_decode) as decode:
        together, _ = layer.impl.forward_mqa(query, cache, metadata, layer)
    assert decode.call_count == 1
    for row, count in enumerate(counts):
        for place in range(count):
            one = common()
            one.seq_lens[row] = batch.seq_lens[row] - count + 1 + place
            its = query[int(starts[row]) + place].expand(len(counts), -1, -1)
            alone, _ = layer.impl.forward_mqa(its, cache, builder.build(0, one), layer)
            own = together[int(starts[row]) + place]
            torch.testing.assert_close(own, alone[row], atol=TOLERANCE, rtol=0)


DENSE: dict[str, Any] = {
    "head_size": 576,
    "dtype": torch.bfloat16,
    "kv_cache_dtype": "auto",
    "block_size": 64,
    "use_mla": True,
    "has_sink": False,
    "use_sparse": False,
    "use_mm_prefix": False,
    "use_per_head_quant_scales": False,
    "device_capability": DeviceCapability(9, 0),
    "attn_type": "decoder",
}
"""What vLLM asks a backend about on a Hopper GPU."""
SPARSE = DENSE | {"kv_cache_dtype": "fp8_ds_mla", "use_sparse": True}


def judged(backend: Any, good: dict[str, Any], refused: dict[str, dict[str, Any]]) -> None:
    """The backend takes `good`, and refuses each change of it with its reason."""
    assert backend.validate_configuration(**good) == []
    for reason, changed in refused.items():
        found = backend.validate_configuration(**good | changed)
        assert any(reason in each for each in found), found
        assert found[-1] == f"unset PD_KERNELS_MLA to have vLLM's own {backend.get_name()}"


@pytest.mark.parametrize("member", ["TRITON_MLA", "FLASHMLA", "FLASH_ATTN_MLA"])
def test_on_a_gpu_ours_stands_in_for_the_member_that_is_named(
    member: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(plugin.MLA_VARIABLE, member)
    plugin.register()
    backend = AttentionBackendEnum[member].get_class()
    assert backend.get_name() == member
    assert ".".join(backend.full_cls_name()) == AttentionBackendEnum[member].get_path()
    assert backend.get_impl_cls() is MlaImplCuda
    refused = {
        "head_size not supported": {"head_size": 320},
        "must be bfloat16 for a cache of fp8_ds_mla": {
            "kv_cache_dtype": "fp8_ds_mla",
            "dtype": torch.float16,
        },
        "cache dtype fp8_e5m2: must be that of the model (torch.bfloat16), fp8_e4m3 or": {
            "kv_cache_dtype": "fp8_e5m2"
        },
        "dtype not supported": {"dtype": torch.float32},
        "sparse not supported": {"use_sparse": True},
        "DCP not supported": {"use_dcp": True},
        "block_size not supported": {"block_size": 8},
        "PCP not supported": {"use_pcp": True},
        "query lens mismatch not supported": {"use_adaptive_verification": True},
        "cache dtype float16: must be that of the model": {"kv_cache_dtype": "float16"},
        "runs on 9.0 and 10.x": {"device_capability": DeviceCapability(8, 0)},
    }
    judged(backend, DENSE, refused)
    for kind in ("fp8", "fp8_e4m3", "fp8_ds_mla"):
        assert backend.validate_configuration(**DENSE | {"kv_cache_dtype": kind}) == []


@pytest.mark.parametrize("member", ["FLASHMLA_SPARSE", "FLASH_ATTN_MLA_SPARSE"])
def test_on_a_gpu_ours_stands_in_for_a_sparse_member(
    member: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(plugin.MLA_VARIABLE, member)
    plugin.register()
    backend = AttentionBackendEnum[member].get_class()
    assert backend.get_name() == member
    assert backend.get_impl_cls().__name__ == "SparseMlaImpl"
    alias = member == "FLASHMLA_SPARSE"  # vLLM takes fp8 for fp8_ds_mla there
    refused = {
        "head_size not supported": {"head_size": 512},
        "model dtype torch.float16: must be bfloat16": {"dtype": torch.float16},
        "kv_cache_dtype not supported": {"kv_cache_dtype": "nvfp4_ds_mla"},
        "non-sparse not supported": {"use_sparse": False},
        "DCP not supported": {"use_dcp": True},
        "PCP not supported": {"use_pcp": True},
        "runs on 9.0 and 10.x": {"device_capability": DeviceCapability(8, 0)},
    }
    judged(backend, SPARSE, refused)
    assert (backend.validate_configuration(**SPARSE | {"kv_cache_dtype": "fp8"}) == []) == alias


def test_graphs_are_promised_for_decodes_of_one_length_only() -> None:
    assert MlaBuilder.get_cudagraph_support(None, None) is AttentionCGSupport.UNIFORM_BATCH


@pytest.mark.parametrize(("gap", "lines"), [(0, 64), (8, 16)])
def test_a_plan_is_for_the_kernel_that_the_layers_cache_takes(
    model: Path, monkeypatch: pytest.MonkeyPatch, gap: int, lines: int
) -> None:
    """With the Gluon kernel a row has 64 lines, where pages lie so that the TMA can read them."""
    monkeypatch.setenv(plugin.MLA_VARIABLE, "CPU_MLA")
    plugin.register()
    layer, builder = made(model)
    monkeypatch.setattr(mla_call, "on_hopper", lambda _: True)
    monkeypatch.setattr(mla_call, "GLUON_LINES", 0)  # the model has 16 lines
    page = 64 * (LATENT + ROPE)
    layer.bind_kv_cache(
        torch.zeros(3, page + gap).as_strided(
            (3, 1, 64, LATENT + ROPE), (page + gap, page, LATENT + ROPE, 1)
        )
    )
    assert builder._plan(1).partials.shape[-2] == lines


def test_a_backend_that_ours_cannot_stand_in_for_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv(plugin.MLA_VARIABLE, "FLASHINFER_MLA")
    with pytest.raises(ValueError, match="PD_KERNELS_MLA=FLASHINFER_MLA: must be one of CPU_MLA"):
        plugin.register()


def test_more_tokens_than_the_kernel_takes_are_refused(model: Path) -> None:
    with (
        mock.patch.object(MlaBuilder, "reorder_batch_threshold", 9),
        mock.patch.dict(os.environ, {plugin.MLA_VARIABLE: "CPU_MLA"}),
    ):
        plugin.register()
        with pytest.raises(NotImplementedError, match="9 tokens are verified at a time: at most 8"):
            made(model)
