# SPDX-License-Identifier: Apache-2.0
"""Views of recurrent states, against vLLM's own shapes: ranks' pages are filled from the whole model's state, whose
elements are all different."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

kv = pytest.importorskip("vllm.v1.kv_cache_interface")

from vllm.model_executor.layers.mamba import mamba_utils  # noqa: E402
from vllm.model_executor.layers.mamba.mamba_utils import (  # noqa: E402
    MambaStateShapeCalculator as Shapes,
)
from vllm.v1.attention.backends.registry import MambaAttentionBackendEnum as Kinds  # noqa: E402
from vllm.v1.kv_cache_layout import KVCacheLayout  # noqa: E402

from pd_connector.errors import UnsupportedGeometryError  # noqa: E402
from pd_connector.kv.geometry import Section, Shard  # noqa: E402
from pd_connector.vllm.pages.state_tables import StateTables  # noqa: E402
from pd_connector.vllm.states import describe_states  # noqa: E402

PAGES, PAGE = 3, 2
ROWS = 3
BFLOAT, FLOAT = torch.bfloat16, torch.float32

# By kind: shapes on one rank, by the number of ranks; dtypes; units and dims of each tensor's parts in the whole model.
CASES = {
    "GDN_ATTN": (
        lambda ranks: Shapes.gated_delta_net_state_shape(ranks, 4, 8, 6, 5, ROWS + 1),
        (BFLOAT, FLOAT),
        [{"conv.q": (4, 6), "conv.k": (4, 6), "conv.v": (8, 5)}, {"ssm": (8, 5, 6)}],
    ),
    "KDA": (
        lambda ranks: Shapes.kda_state_shape(ranks, 4, 6, conv_kernel_size=ROWS + 1),
        (BFLOAT, FLOAT),
        [{"conv.q": (4, 6), "conv.k": (4, 6), "conv.v": (4, 6)}, {"ssm": (4, 6, 6)}],
    ),
    "MAMBA2": (
        lambda ranks: Shapes.mamba2_state_shape(ranks, 8 * 6, 4, 8, 6, 5, ROWS + 1),
        (BFLOAT, FLOAT),
        [{"conv.x": (8, 6), "conv.b": (4, 5), "conv.c": (4, 5)}, {"ssm": (8, 6, 5)}],
    ),
    "MAMBA2, one group": (
        lambda ranks: Shapes.mamba2_state_shape(ranks, 8 * 6, 1, 8, 6, 5, ROWS + 1),
        (BFLOAT, FLOAT),
        [{"conv.x": (8, 6), "conv.b": (1, 5), "conv.c": (1, 5)}, {"ssm": (8, 6, 5)}],
    ),
    "MAMBA1": (
        lambda ranks: Shapes.mamba1_state_shape(ranks, 16, 5, ROWS + 1),
        (BFLOAT, FLOAT),
        [{"conv.x": (16, 1)}, {"ssm": (16, 1, 5)}],
    ),
    "SHORT_CONV": (
        lambda ranks: Shapes.short_conv_state_shape(ranks, 16, ROWS + 1),
        (FLOAT,),
        [{"conv.x": (16, 1)}],
    ),
    "LINEAR": (
        lambda ranks: Shapes.linear_attention_state_shape(8, ranks, 6),
        (FLOAT,),
        [{"ssm": (8, 6, 6)}],
    ),
}
BACKENDS = {"KDA": "GDN_ATTN", "MAMBA2, one group": "MAMBA2"}


@pytest.fixture(params=["SD", "DS"])
def layout(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("VLLM_SSM_CONV_STATE_LAYOUT", request.param)
    mamba_utils.get_conv_state_layout.cache_clear()
    monkeypatch.setattr(mamba_utils, "is_conv_state_dim_first", lambda: request.param == "DS")
    return str(request.param)


def spec_of(kind: str, ranks: int = 1, **changes: object) -> kv.MambaSpec:
    shapes, dtypes, _ = CASES[kind]
    backend = Kinds[BACKENDS.get(kind, kind)]
    told = {"shapes": tuple(shapes(ranks)), "dtypes": dtypes, "mamba_type": backend}
    return kv.MambaSpec(**{"block_size": 64, "page_size_padded": 1 << 14, **told, **changes})


def pages_of(spec: kv.MambaSpec) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """A cache as vLLM registers it, and its tensors as the layer sees them."""
    size = PAGES * spec.page_size_bytes
    placed = kv.KVCacheTensor(size, ["layers.0.mixer"], size, spec.page_size_bytes)
    memory = torch.zeros(size, dtype=torch.int8)
    (view,) = kv.create_kv_cache_views(memory, spec, PAGES, KVCacheLayout.LBHNC, placed)
    flat, first, tensors = view.squeeze(dim=(1, 2)), 0, []
    for shape, dtype in zip(spec.shapes, spec.dtypes, strict=True):
        stop = first + torch.Size(shape).numel() * dtype.itemsize
        tensors.append(flat[:, first:stop].view(dtype).view(-1, *shape))
        first = stop
    return view, tensors


def module_of(kind: str, ranks: int) -> SimpleNamespace:
    return SimpleNamespace(norm=SimpleNamespace(n_groups=1 if "one" in kind else 4))


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("kind", CASES)
def test_each_rank_shows_its_units_of_the_whole_state(kind: str, ranks: int, layout: str) -> None:
    parts = CASES[kind][2]
    counted = iter(range(1, 1 << 20))
    whole = {
        name: torch.tensor([next(counted) % 251 for _ in range(extent[0] * extent[-1] * rows)])
        .reshape(extent[0], rows, extent[-1])
        .float()
        for part in parts
        for name, extent in part.items()
        for rows in [extent[1] if len(extent) == 3 else ROWS]
    }
    for rank in range(ranks):
        shard = Shard(0, 1, rank, ranks)
        spec = spec_of(kind, ranks)
        cache, tensors = pages_of(spec)
        for part, tensor in zip(parts, tensors, strict=True):
            own = [whole[name][list(shard.heads(whole[name].shape[0]))] for name in part]
            if any(name.startswith("conv") for name in part):
                # [unit, row, dim] as channels in a row, part behind part
                state = torch.cat([one.permute(0, 2, 1).reshape(-1, ROWS) for one in own])
                tensor[PAGE] = (state if layout == "DS" else state.T).to(tensor.dtype)
            else:
                tensor[PAGE] = own[0].reshape(tensor.shape[1:]).to(tensor.dtype)
        sections, found = describe_states(
            "layers.0.mixer", spec, cache, module_of(kind, ranks), ranks
        )
        assert [section.name for section in sections] == list(whole)
        for section, view in zip(sections, found.sections, strict=True):
            wanted = whole[section.name]
            assert (section.units, section.rows, section.dim) == tuple(wanted.shape)
            own = wanted[list(shard.heads(section.units))]
            assert torch.equal(view[PAGE].float(), own)
            assert not view[PAGE - 1].any()
            view[PAGE - 1].copy_(own)  # a view, not a copy
        assert all(torch.equal(tensor[PAGE - 1], tensor[PAGE]) for tensor in tensors)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_matrices_of_vllms_cpu_kernel_are_shown_as_those_of_others(
    layout: str, dtype: torch.dtype
) -> None:
    """It keeps `[key dim][value dim]`, where the spec and all other engines have `[value dim][key dim]`. A model in float16
    takes the Triton kernels, which keep what the spec has."""

    def forward_cpu() -> None:
        pass

    spec = spec_of("GDN_ATTN")
    heads, value_dim, key_dim = spec.shapes[1]
    cache, (_, matrices) = pages_of(spec)
    counted = torch.arange(float(heads * value_dim * key_dim)) % 251
    matrices[PAGE] = counted.view(matrices.shape[1:])
    module = SimpleNamespace(_forward_method=forward_cpu, model_config=SimpleNamespace(dtype=dtype))
    sections, states = describe_states("layers.0.mixer", spec, cache, module, 1)
    assert (sections[-1].units, sections[-1].rows, sections[-1].dim) == (heads, value_dim, key_dim)
    in_spec = counted.view(heads, value_dim, key_dim)
    if dtype == torch.bfloat16:
        in_spec = counted.view(heads, key_dim, value_dim).transpose(1, 2)
    assert torch.equal(states.sections[-1][PAGE].float(), in_spec)


def test_vllms_cpu_kernel_keeps_keys_first() -> None:
    """After one token a matrix is half the product of its normalised key and its value."""
    from vllm import _custom_ops as ops

    if not hasattr(torch.ops._C, "fused_sigmoid_gating_delta_rule_update_cpu"):
        pytest.skip("this build of vLLM has no kernel of delta nets for a CPU")
    key, value, query = (torch.randn(1, 1, 1, 128).bfloat16() for _ in range(3))
    zero, matrices = torch.zeros(1, 1).bfloat16(), torch.zeros(2, 1, 128, 128)
    ops.fused_sigmoid_gating_delta_rule_update_cpu(
        A_log=torch.zeros(1),
        dt_bias=zero[0],
        q=query,
        k=key,
        v=value,
        a=zero,
        b=zero,
        initial_state_source=matrices,
        initial_state_indices=torch.tensor([1], dtype=torch.int32),
        cu_seqlens=torch.tensor([0, 1], dtype=torch.int32),
        use_qk_l2norm_in_kernel=True,
    )
    normal = torch.nn.functional.normalize(key.float().flatten(), dim=0)
    product = normal[:, None] * value.float().flatten() / 2
    assert torch.allclose(matrices[1, 0], product, atol=1e-5)
    assert not torch.allclose(matrices[1, 0], product.T, atol=0.1)


def test_what_every_rank_holds_whole_is_one_unit(layout: str) -> None:
    spec = spec_of("SHORT_CONV", tp_replicated=True)
    cache, (tensor,) = pages_of(spec)
    sections, states = describe_states("layers.0.ple", spec, cache, None, 4)
    assert sections == (Section("conv.x", 1, ROWS, 16, "float32"),)
    tensor[PAGE] = torch.arange(3.0 * 16).view(tensor.shape[1:])
    state = tensor[PAGE].T if layout == "DS" else tensor[PAGE]
    assert torch.equal(states.sections[0][PAGE, 0], state)


@pytest.mark.parametrize("kind", ["GDN_ATTN", "MAMBA2", "SHORT_CONV", "MAMBA1"])
def test_rows_for_speculation_are_the_last_of_a_convolution(kind: str, layout: str) -> None:
    """As many as the layer itself has added; Mamba1 has none."""
    spec = spec_of(kind, num_speculative_blocks=1)
    module = module_of(kind, 1)
    assert (
        describe_states("layers.0.mixer", spec, pages_of(spec)[0], module, 1)[1].scratch_rows == 0
    )
    module.num_spec = 1
    assert (
        describe_states("layers.0.mixer", spec, pages_of(spec)[0], module, 1)[1].scratch_rows == 1
    )


def test_other_kinds_and_records_of_recomputation_are_refused_by_name() -> None:
    custom = SimpleNamespace(mamba_type=SimpleNamespace(name="CUSTOM"), shapes=())
    with pytest.raises(UnsupportedGeometryError, match=r"layers\.0\.mixer is of kind CUSTOM"):
        describe_states("layers.0.mixer", custom, torch.zeros(1), None, 1)
    spec = spec_of("MAMBA2")
    longer = spec_of("MAMBA2", shapes=(*spec.shapes, (8, 16)), dtypes=(*spec.dtypes, FLOAT))
    with pytest.raises(UnsupportedGeometryError, match=r"has 3 tensors, wanted 2.*--use-replayssm"):
        describe_states("layers.0.mixer", longer, pages_of(longer)[0], None, 1)


def test_channels_that_are_no_whole_heads_are_refused_with_both_numbers() -> None:
    for kind in ("GDN_ATTN", "MAMBA2"):
        spec = spec_of(kind)
        (rows, channels), state = spec.shapes
        odd = spec_of(kind, shapes=((rows, channels + 2), state))
        with pytest.raises(UnsupportedGeometryError, match=f"has {channels + 2} channels"):
            describe_states("layers.0.mixer", odd, pages_of(odd)[0], None, 1)


@pytest.mark.parametrize("mode", ["align", "none"])
def test_the_page_of_a_state_is_found_by_its_position(mode: str) -> None:
    full = kv.FullAttentionSpec(block_size=64, num_kv_heads=1, head_size=8, dtype=FLOAT)
    tables = StateTables.of([full, spec_of("LINEAR", mamba_cache_mode=mode)])
    assert tables
    assert not StateTables.of([full])
    pages = [7, 8, 9], [0, 4, 5] if mode == "align" else [4, 5, 6]  # scratch pages behind it
    for position in (65, 127, 128):
        assert tables.only(pages, position)[1] == [4]
    assert tables.only(pages) == ([7, 8, 9], [])
