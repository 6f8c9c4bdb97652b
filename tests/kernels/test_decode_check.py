# SPDX-License-Identifier: Apache-2.0
"""The check of `python -m pd_bench.kernels decode`: which reference each case has, and that errors
of the size of one token or one scale are found."""

from collections.abc import Iterator
from dataclasses import replace

import decode_interpreted
import pytest
import torch

from pd_bench.kernels import decode_cases, decode_check, random_cases
from pd_kernels.attention.mla import launch_mla
from pd_kernels.attention.mla_call import MlaCall
from pd_kernels.attention.reference import reference_mla_decode, reference_paged_decode

pytestmark = pytest.mark.filterwarnings("ignore:divide by zero encountered in log2")

WIDE = [([90, 3], 64, 1, 64), ([150, 1], 128, 1, 16), ([1, 60], 24, 2, 64), ([70, 4], 16, 4, 64)]
"""Lengths, heads, queries and page of batches whose rows have more than 32 lines."""


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(decode_cases, "DEVICE", "cpu")
    monkeypatch.setattr(decode_check, "LAUNCHES", 1)
    with decode_interpreted.dots_mended():
        yield


def coded(lengths: list[int], heads: int, queries: int, page: int) -> MlaCall:
    torch.manual_seed(1)
    given = decode_cases.latent_set(lengths, heads, queries, page, coded=True)
    return MlaCall(*given, 0.05, True)


@pytest.mark.parametrize("shape", WIDE)
def test_wide_rows_of_fp8_latents_are_held_to_the_latents_that_the_kernel_multiplies(
    monkeypatch: pytest.MonkeyPatch, shape: tuple[list[int], int, int, int]
) -> None:
    """The kernel decodes them to bfloat16. Held to the exact latents, a right kernel is wrong."""
    batch = coded(*shape)
    assert not batch.words
    assert decode_check.check_latent(batch) == ""
    monkeypatch.setattr(decode_check, "as_multiplied", lambda batch: batch)
    assert decode_check.check_latent(coded(*shape)) == "lse differs"


def test_other_rows_have_the_exact_reference() -> None:
    narrow = coded([70, 3], 16, 2, 64)
    assert narrow.words
    plain = replace(narrow, cache=torch.zeros(2, 64, 576, dtype=torch.bfloat16))
    assert decode_check.as_multiplied(narrow) is narrow
    assert decode_check.as_multiplied(plain) is plain


@pytest.mark.parametrize("damage", ["token", "scale", "rounding"])
def test_a_wrong_kernel_is_found_in_wide_rows_of_fp8_latents(
    monkeypatch: pytest.MonkeyPatch, damage: str
) -> None:
    batch = coded([90, 40], 64, 1, 64)

    def wrong(given, out, lse, scratch):  # type: ignore[no-untyped-def]
        if damage == "token":
            given = replace(given, lengths=given.lengths - 1)
        elif damage == "scale":
            cache = given.cache.clone()
            cache[int(given.table[0, 0]), 5, 515] ^= 1  # an exponent's bit of one token's scale
            given = replace(given, cache=cache)
        launch_mla(given, out, lse, scratch)
        if damage == "rounding":
            out.copy_(out.to(torch.float8_e4m3fn))

    monkeypatch.setattr(decode_check, "launch_mla", wrong)
    assert decode_check.check_latent(batch)


def test_random_batches_have_what_engines_have(monkeypatch: pytest.MonkeyPatch) -> None:
    """The steps of `ci/gpu` take such batches. Here the references stand for the kernels."""
    seen: set[str] = set()

    def paged(batch, out, lse, _):  # type: ignore[no-untyped-def]
        if batch.sinks is not None:
            seen.add("sinks")
        if batch.head_scales:
            seen.add("scales by head")
        seen.update(
            {f"dims {batch.key_width} {batch.width}", "jagged"[: 9 * (batch.starts is not None)]}
        )
        reference_paged_decode(batch, out, lse)

    def latent(batch, out, lse, _):  # type: ignore[no-untyped-def]
        seen.add(f"{batch.cache.dtype}" + ", chosen" * (batch.cache.shape[1] == 1))
        reference_mla_decode(decode_check.as_multiplied(batch), out, lse)

    monkeypatch.setattr(decode_check, "LONGEST", 40)
    monkeypatch.setattr(decode_check, "launch_paged", paged)
    monkeypatch.setattr(decode_check, "launch_mla", latent)
    assert decode_check.check_decode(54, 0, ["paged_decode", "mla_decode"]) == {}
    assert seen >= {
        *("sinks", "scales by head", "jagged", "dims 512 512", "dims 192 128", "dims 64 64"),
        *("torch.uint8", "torch.bfloat16, chosen", "torch.uint8, chosen", "torch.float8_e4m3fn"),
    }


def test_only_the_kernels_that_are_asked_for_are_checked(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What is wrong elsewhere does not keep `mla-triton` from being measured."""
    for name in ("_paged", "_merge", "_mixed"):
        monkeypatch.setattr(decode_check, name, lambda _: "wrong")
    monkeypatch.setattr(decode_check, "_latent", lambda _: "")
    assert decode_check.check_decode(3, 0, ["mla_decode"]) == {}
    found = decode_check.check_decode(3, 0)
    assert {name: len(lines) for name, lines in found.items()} == {
        "paged_decode": 2,
        "merge_partials": 1,
        "mixed_attention": 1,
    }


def test_a_check_ends_when_the_gpu_takes_no_more_launches(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """After an illegal access each case would be called wrong, which none of them is."""

    def lost() -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    def case(_: object) -> str:
        tried.append(1)
        lost()
        return ""

    tried: list[int] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "synchronize", lost)
    lines = random_cases.problems([("mla_decode", 5, case)], 0)["mla_decode"]
    assert len(tried) == 1
    assert "an illegal memory access" in lines[0]
    assert lines[1] == "mla_decode: 4 cases not checked: the GPU takes no more launches"
