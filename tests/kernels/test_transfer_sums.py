# SPDX-License-Identifier: Apache-2.0
"""Sums that kernels form in any order give pd_connector's checksum."""

import os
import random
from unittest import mock

import pytest
import torch
import triton
import triton.language as tl
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_caches import sloppy

from pd_kernels.checksum import checksum_of
from pd_kernels.transfer import finish, new_sums, payload_sums
from pd_kernels.transfer.sums import add_section, launch_payload_sums, reference_payload_sums


def digest_of(sums: torch.Tensor, payload: torch.Tensor) -> bytes:
    return finish(sums, payload.numel())


def wanted(payload: torch.Tensor) -> bytes:
    return checksum_of(memoryview(payload.numpy().tobytes()))


@given(st.integers(1, 100_000), st.integers(0, 99))
@settings(max_examples=40)
def test_the_reference_of_any_length(nbytes: int, seed: int) -> None:
    payload = sloppy(seed, nbytes)
    sums = new_sums(nbytes, payload.device)
    payload_sums(payload, sums)
    assert digest_of(sums, payload) == wanted(payload)
    assert torch.equal(sums, reference_payload_sums(payload))


@pytest.mark.parametrize("nbytes", [16, 2_048, 2_064, 16_384, 50_000])
def test_the_kernel(nbytes: int) -> None:
    payload = sloppy(3, nbytes)
    sums = new_sums(nbytes, payload.device)
    launch_payload_sums(payload, sums)
    assert digest_of(sums, payload) == wanted(payload)


with mock.patch.dict(os.environ, TRITON_INTERPRET="1"):

    @triton.jit  # type: ignore[untyped-decorator]
    def _sum_tile(slot, sums, first, sections):  # type: ignore[no-untyped-def]
        add_section(sums, slot, first, sections, 1024, tl.program_id(0))


@pytest.mark.parametrize("first", [0, 1, 64, 127, 128, 200])
def test_a_tile_may_begin_anywhere_in_a_row(first: int) -> None:
    """A row of the payload is 128 sections. A tile that begins with a row takes a shorter way."""
    payload = sloppy(6, 16 * (first + 900))
    sums = new_sums(payload.numel(), payload.device)
    _sum_tile[(1,)](payload, sums, first, 900, num_warps=4)
    payload[: 16 * first] = 0
    assert digest_of(sums, payload) == wanted(payload)


def test_damage_is_seen() -> None:
    """A word that changes, words that change places, a byte at the end."""
    payload = sloppy(4, 20_000)
    right = wanted(payload)
    chance = random.Random(5)
    for _ in range(20):
        damaged = payload.clone()
        damaged[chance.randrange(20_000)] ^= 1 << chance.randrange(8)
        assert digest_of(reference_payload_sums(damaged), damaged) != right
        words = payload.clone().view(torch.int64)
        one, two = chance.sample(range(2_500), 2)
        words[[one, two]] = words[[two, one]]
        swapped = words.view(torch.uint8)
        assert digest_of(reference_payload_sums(swapped), swapped) != right


def test_sums_of_another_length_are_refused() -> None:
    payload = sloppy(4, 5_000)
    with pytest.raises(ValueError, match="too few for 5000 bytes"):
        payload_sums(payload, new_sums(2_000, payload.device))
    with pytest.raises(ValueError, match="5000 bytes have"):
        finish(new_sums(9_000, payload.device), 5_000)
