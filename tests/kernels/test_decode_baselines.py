# SPDX-License-Identifier: Apache-2.0
"""What decode kernels are measured against is asked for the same, and does not lose by our
fault."""

import functools
import importlib.util
import inspect
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import decode_interpreted
import pytest
import torch
import torch._dynamo
from decode_batches import error

from pd_bench.kernels import decode, decode_baselines, decode_cases, vllm_baselines
from pd_kernels.attention import document
from pd_kernels.attention.paged_call import FP8

pytestmark = pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
TINY = decode_cases.Heads(4, 2, 64)


@pytest.fixture(autouse=True)
def _here(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(decode_cases, "DEVICE", "cpu")
    with decode_interpreted.dots_mended():
        yield


def test_flex_attention_is_asked_for_the_same() -> None:
    """The comparison is fair: called as here, the baseline computes what the kernel computes."""
    given = decode_cases.paged_set([200, 3, 129], TINY, 128, torch.bfloat16)
    (ours,), _ = decode.paged_calls([given])
    (theirs,) = decode_baselines.flex_attention_calls([given], compiled=False)
    assert error(theirs().transpose(1, 2).float(), ours().float()) < 0.01


def test_flex_attention_is_given_the_same_mask() -> None:
    given = decode_cases.paged_set([200, 3, 700], TINY, 128, torch.bfloat16)
    ids = (torch.arange(700) // 150).int().repeat(3, 1)
    (ours,), _ = decode.paged_calls([given], document(ids))
    (theirs,) = decode_baselines.flex_attention_calls([given], compiled=False, documents=ids)
    assert error(theirs().transpose(1, 2).float(), ours().float()) < 0.01
    (plain,), _ = decode.paged_calls([given])
    assert error(plain().float(), ours().float()) > 0.1


def test_flex_attention_is_compiled_for_each_batch_and_never_falls_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """torch compiles a function for a limited number of shapes, and then runs it uncompiled."""
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="eager"))
    batches = [
        [decode_cases.paged_set([length, 3], TINY, 128, torch.bfloat16) for _ in range(2)]
        for length in (200, 700)
    ]
    with torch._dynamo.config.patch(recompile_limit=1):
        for sets in batches:
            for call in decode_baselines.flex_attention_calls(sets):
                call()
        short, _, long = decode_baselines.flex_attention_calls([*batches[0], batches[1][0]])
        short()
        with pytest.raises(torch._dynamo.exc.FailOnRecompileLimitHit):
            long()
    torch._dynamo.reset()


class Asked:
    """Stands in for a function: keeps what it is given, if the function takes that."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.signature = inspect.signature(function)
        self.given: dict[str, Any] = {}

    def __call__(self, *args: Any, **kwargs: Any) -> str:
        self.given = dict(self.signature.bind(*args, **kwargs).arguments)
        return "planned"


def flash_interface(monkeypatch: pytest.MonkeyPatch) -> Any:
    """vLLM's functions in Python, without their package, which needs the extensions for CUDA."""
    path = Path(pytest.importorskip("vllm").__file__).parent / "vllm_flash_attn"
    name = "vllm.vllm_flash_attn.flash_attn_interface"
    spec = importlib.util.spec_from_file_location(name, path / "flash_attn_interface.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setitem(sys.modules, name, module)
    return module


@pytest.mark.parametrize("cache", [torch.bfloat16, FP8])
def test_flash_attention_3_is_asked_as_its_signature_says(
    cache: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    flash = flash_interface(monkeypatch)
    given = decode_cases.paged_set([200, 3], TINY, 16, cache)
    with pytest.raises(RuntimeError, match=r"FA3|_vllm_fa3_C|CUDA"):  # this is a CPU
        vllm_baselines.flash_attention_calls([given])
    attend, plan = Asked(flash.flash_attn_varlen_func), Asked(flash.get_scheduler_metadata)
    monkeypatch.setattr(flash, "is_fa_version_supported", lambda version: version == 3)
    monkeypatch.setattr(flash, "flash_attn_varlen_func", attend)
    monkeypatch.setattr(flash, "get_scheduler_metadata", plan)
    (call,) = vllm_baselines.flash_attention_calls([given])
    call()
    told = attend.given
    assert (told["q"].dtype, told["k"].dtype, told["fa_version"]) == (cache, cache, 3)
    assert told["q"].shape == (2, 4, 64)
    assert (told["k_descale"] is not None) == (cache == FP8)
    assert told["scheduler_metadata"] == "planned"
    assert (plan.given["max_seqlen_k"], plan.given["page_size"]) == (200, 16)


@pytest.mark.parametrize("cache", [torch.bfloat16, FP8])
def test_the_triton_kernel_of_vllm_is_asked_as_its_signature_says(
    cache: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = pytest.importorskip("vllm.v1.attention.ops.triton_unified_attention")
    attend = Asked(module.unified_attention)
    monkeypatch.setattr(module, "unified_attention", attend)
    given = decode_cases.paged_set([200, 3], TINY, 16, cache)
    (call,) = vllm_baselines.triton_attention_calls([given])
    call()
    told = attend.given
    assert told["kv_quant_mode"].name == ("FP8_PER_TENSOR" if cache == FP8 else "NONE")
    assert told["softmax_segm_output"].shape == (64, 4, 16, 64)
    assert torch.equal(told["seqused_k"], given.lengths)


def test_xqa_gets_pages_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[dict[str, Any]] = []
    module = SimpleNamespace(xqa_batch_decode_with_kv_cache=lambda **given: asked.append(given))
    monkeypatch.setitem(sys.modules, "flashinfer", SimpleNamespace())
    monkeypatch.setitem(sys.modules, "flashinfer.decode", module)
    given = decode_cases.paged_set([200, 3], TINY, 16, FP8)
    (call,) = decode_baselines.xqa_calls([given])
    call()
    (told,) = asked
    assert told["query"].shape == (2, 4, 64)
    assert [each.shape[1:] for each in told["kv_cache"]] == [(16, 2, 64)] * 2
    assert not told["workspace_buffer"].any(), "its semaphores begin with zero"


@pytest.mark.parametrize("legacy", [False, True])
def test_flash_mla_is_told_which_of_its_kernels_if_it_has_two(
    monkeypatch: pytest.MonkeyPatch, legacy: bool
) -> None:
    given: list[dict[str, Any]] = []

    def attend(q, cache, table, lengths, dim, meta, *, softmax_scale, causal):  # type: ignore[no-untyped-def]
        given.append({})

    def of_two(q, cache, table, lengths, dim, meta, *, softmax_scale, causal, use_legacy):  # type: ignore[no-untyped-def]
        given.append({"use_legacy": use_legacy})

    module = SimpleNamespace(
        get_mla_metadata=lambda: (None, None), flash_mla_with_kvcache=of_two if legacy else attend
    )
    monkeypatch.setitem(sys.modules, "flash_mla", module)
    (call,) = decode_baselines.flash_mla_calls([decode_cases.latent_set([3], 16, 1)], 0.1)
    call()
    assert given == [{"use_legacy": True} if legacy else {}]
