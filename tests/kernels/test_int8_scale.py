# SPDX-License-Identifier: Apache-2.0
"""The scale of `int8` has one value, whichever language computes it: torch, numba's loops, or a kernel in Triton."""

import numpy as np
import pytest
import torch
import triton.language as tl
from triton.runtime.interpreter import InterpretedFunction

from pd_connector.codec import COMPILER
from pd_connector.codec.compiled import loops_for
from pd_connector.kv.coding import Elements
from pd_kernels.int8_scale import int8_scales
from pd_kernels.payload import INT8_MAX, SMALLEST_SCALE
from pd_kernels.transfer import numerics

EVERY = np.arange(1 << 15, dtype=np.uint16)
"""The bits of every magnitude of bfloat16: zero, subnormal, normal, infinity, and all NaN."""


@InterpretedFunction  # type: ignore[untyped-decorator]
def _scales(bits, found, COUNT: tl.constexpr):
    at = tl.arange(0, COUNT)
    scale = numerics.int8_scale(tl.load(bits + at))
    tl.store(found + at, numerics.upper_half(scale))


def by_torch(bits: np.ndarray) -> np.ndarray:
    magnitudes = torch.from_numpy(bits.astype(np.int32)).view(torch.float32)
    return (int8_scales(magnitudes).view(torch.int32) >> 16).numpy().astype(np.uint16)


def by_triton(bits: np.ndarray) -> np.ndarray:
    found = torch.empty(len(bits), dtype=torch.int16)
    _scales[(1,)](torch.from_numpy(bits.astype(np.int32)), found, COUNT=len(bits))
    return found.numpy().view(np.uint16)


def by_numba() -> np.ndarray:
    """Each magnitude is a token of V with one element."""
    assert COMPILER.wait()
    loops = loops_for(torch.empty(1, 1, 1, dtype=torch.bfloat16), Elements("bfloat16"))
    assert loops is not None
    scales = np.empty((1, len(EVERY)), np.uint16)
    codes = np.empty((1, len(EVERY), 1), np.uint8)
    loops.int8_encode_values(EVERY[None, :, None], scales, codes)
    return scales[0]


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, of infinities and NaN
def test_all_languages_have_the_same_scale_of_every_magnitude_bit_by_bit() -> None:
    wanted = by_torch(EVERY.astype(np.uint32) << 16)
    assert np.array_equal(by_numba(), wanted)
    assert np.array_equal(by_triton(EVERY.astype(np.uint32) << 16), wanted)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_magnitudes_between_those_of_bfloat16_have_the_same_scale_in_a_kernel() -> None:
    """Elements of float16, float32 and scaled FP8 have them; numba's loops take bfloat16 only."""
    bits = np.random.default_rng(3).integers(0, 1 << 31, 1 << 14, dtype=np.uint32)
    assert np.array_equal(by_triton(bits), by_torch(bits))


def test_the_scale_is_what_the_format_promises() -> None:
    magnitudes = torch.tensor([0.0, 127.0, 1.0, 2.0**-140, torch.inf, torch.nan])
    one, exact, up, least, *undefined = int8_scales(magnitudes)
    assert (one, exact, least) == (1.0, 1.0, SMALLEST_SCALE)
    assert up.bfloat16().float() == up
    assert 1 / INT8_MAX <= up < 1.01 / INT8_MAX
    assert {int(bits) for bits in torch.stack(undefined).view(torch.int32)} == {0x7FC00000}
