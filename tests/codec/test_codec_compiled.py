# SPDX-License-Identifier: Apache-2.0
"""The codecs' compiled loops give what torch's operations give, byte by byte."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.codecs import computed

from pd_connector.codec import CODECS, COMPILER, Elements, Part
from pd_connector.codec.compiled import loops_for

pytest.importorskip("numba")

BF16 = Elements("bfloat16")
# Bits of zeros, subnormals, infinities and NaNs, and of what is next to them, of either sign.
SPECIAL = [0x0000, 0x0001, 0x007F, 0x0080, 0x7F7F, 0x7F80, 0x7F81, 0x7FC0, 0x7FFF]

names = st.sampled_from(["int8", "fp8_e4m3"])
parts = st.sampled_from(list(Part))
shapes = st.tuples(
    st.integers(1, 3), st.sampled_from([1, 7, 127, 128, 129, 300]), st.sampled_from([2, 33, 64])
)


def plane(shape: tuple[int, int, int], seed: int, kind: str) -> torch.Tensor:
    chance = torch.Generator().manual_seed(seed)
    bits = torch.randint(-(2**15), 2**15, shape, generator=chance, dtype=torch.int16)
    if kind == "any bits":
        return bits.view(torch.bfloat16)
    finite = bits & 0x7F7F | bits & -0x8000
    if kind == "any finite numbers":
        return finite.view(torch.bfloat16)
    x = (torch.randn(shape, generator=chance) * 2.0 ** (seed % 9 - 4)).to(torch.bfloat16)
    if kind == "a few special":
        where = torch.rand(shape, generator=chance) < 0.01
        special = torch.tensor(SPECIAL + [s - 0x8000 for s in SPECIAL], dtype=torch.int16)
        chosen = special[torch.randint(len(special), shape, generator=chance)]
        x = torch.where(where, chosen.view(torch.bfloat16), x)
    if kind == "zeros among them":
        x[:, :, 0] = 0
        x[:, -1] = -0.0
    return x


def coded(way: str, name: str, part: Part, x: torch.Tensor) -> torch.Tensor:
    """At an odd address."""
    memory = torch.full(
        (CODECS[name].coding.coded_bytes(part, tuple(x.shape), BF16) + 1,), 0xA5
    ).byte()
    with computed(way):
        CODECS[name].encode(part, x, BF16, BF16, memory[1:])
    return memory[1:]


@given(
    names,
    parts,
    shapes,
    st.integers(0, 10**6),
    st.sampled_from(
        ["ordinary", "any bits", "any finite numbers", "a few special", "zeros among them"]
    ),
)
@settings(max_examples=300)
def test_coded_planes_are_the_same(
    name: str, part: Part, shape: tuple[int, int, int], seed: int, kind: str
) -> None:
    x = plane(shape, seed, kind)
    one, other = coded("by numba", name, part, x), coded("by torch", name, part, x)
    if name == "int8":  # a NaN may have any payload
        codes = x.numel()
        scales = [data[:-codes].clone().view(torch.bfloat16).float() for data in (one, other)]
        torch.testing.assert_close(*scales, rtol=0, atol=0, equal_nan=True)
        one, other = one[-codes:], other[-codes:]
    assert torch.equal(one, other)


@given(names, parts, shapes, st.integers(0, 10**6))
@settings(max_examples=200)
def test_blocks_decoded_from_any_bytes_are_the_same(
    name: str, part: Part, shape: tuple[int, int, int], seed: int
) -> None:
    chance = torch.Generator().manual_seed(seed)
    nbytes = CODECS[name].coding.coded_bytes(part, shape, BF16)
    data = torch.randint(0, 256, (nbytes + 1,), generator=chance).byte()[1:]
    found = []
    for way in ("by numba", "by torch"):
        with computed(way):
            found.append(CODECS[name].decode(part, data, shape, BF16, BF16))
    one, other = found
    assert torch.equal(one.isnan(), other.isnan())
    same = one.view(torch.int16) == other.view(torch.int16)
    assert (same | one.isnan()).all()


@pytest.mark.parametrize("name", ["int8", "fp8_e4m3"])
def test_loops_that_round_otherwise_are_noticed(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    x = plane((2, 130, 64), 1, "ordinary")
    assert COMPILER.wait()
    loops = loops_for(x, BF16)
    loop = "int8_encode_keys" if name == "int8" else "fp8_encode"
    right = getattr(loops, loop)

    def wrong(x, scales, codes):
        right(x, scales, codes)
        codes[1, 129, 63] ^= 1

    monkeypatch.setattr(loops, loop, wrong)
    assert not torch.equal(
        coded("by numba", name, Part.KEY, x), coded("by torch", name, Part.KEY, x)
    )


@pytest.mark.parametrize(
    ("x", "elements"),
    [
        (torch.zeros(2, 8, 16, dtype=torch.float16), Elements("float16")),
        (torch.zeros(2, 8, 16), Elements("float32")),
        (torch.zeros(2, 8, 32, dtype=torch.bfloat16)[..., ::2], BF16),
        (torch.zeros(2, 8, 16, dtype=torch.bfloat16, device="meta"), BF16),
    ],
    ids=["float16", "float32", "strided", "on another device"],
)
def test_what_the_loops_do_not_take_is_left_to_torch(x: torch.Tensor, elements: Elements) -> None:
    assert COMPILER.wait()
    assert loops_for(x, elements) is None
    assert loops_for(torch.zeros(2, 8, 16, dtype=torch.bfloat16), BF16) is not None


@pytest.mark.parametrize(
    "prelude",
    ["import sys; sys.modules['numba'] = None", "import os; os.environ['NUMBA_DISABLE_JIT'] = '1'"],
    ids=["not installed", "switched off"],
)
def test_without_numba_torch_computes(prelude: str) -> None:
    code = f"{prelude}; from pd_connector.codec import COMPILER; print(COMPILER.wait())"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "False"
