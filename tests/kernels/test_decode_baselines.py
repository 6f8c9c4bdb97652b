# SPDX-License-Identifier: Apache-2.0
"""What decode kernels are measured against is asked for the same, and does not lose by our
fault."""

import functools
import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import decode_interpreted
import pytest
import torch
import torch._dynamo
from decode_batches import error

from pd_kernels.attention import document
from pd_kernels.bench import decode, decode_baselines, decode_cases

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
