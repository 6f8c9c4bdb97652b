# SPDX-License-Identifier: Apache-2.0
"""What every codec keeps of a plane, for every pair of caches. Errors: test_codec_error.py."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.codecs import WAYS, computed

from pd_connector.codec import CODECS, DTYPES, Elements, Part, elements
from pd_connector.codec.elements import torch_dtype

BF16, F16, F32, FP8 = (Elements(name) for name in DTYPES)
FLOATS = (BF16, F16, F32)
SIGNED = {1: torch.int8, 2: torch.int16, 4: torch.int32}
CODES = torch.arange(256, dtype=torch.int32).to(torch.uint8).view(torch.float8_e4m3fn)

shapes = st.tuples(
    st.integers(1, 3), st.sampled_from([1, 7, 128, 129, 300]), st.sampled_from([32, 64, 128, 576])
)
scales = st.sampled_from([2.0**-9, 0.013, 1.0, 3.7])
stores = st.builds(
    lambda dtype, scale: Elements(dtype, scale if dtype == "fp8_e4m3" else 1.0),
    st.sampled_from(list(DTYPES)),
    scales,
)
parts = st.sampled_from(list(Part))


@pytest.fixture(autouse=True, scope="module", params=WAYS)
def way(request: pytest.FixtureRequest) -> Iterator[None]:
    with computed(request.param):
        yield


layouts = st.sampled_from(["dense", "token first", "dim first", "every other token"])


def plane(
    shape: tuple[int, int, int], source: Elements, seed: int = 0, layout: str = "dense"
) -> torch.Tensor:
    """Random elements `[head, token, dim]` of several magnitudes, a zero among them."""
    chance = torch.Generator().manual_seed(seed)
    values = torch.randn(shape, generator=chance) * 2.0 ** torch.randint(
        -4, 5, (shape[0], 1, shape[2]), generator=chance
    )
    values[0, 0, 0] = 0.0
    x = values.clamp(-400, 400).to(torch_dtype(source))
    if layout == "token first":
        return x.transpose(0, 1).contiguous().transpose(0, 1)
    if layout == "dim first":
        return x.transpose(1, 2).contiguous().transpose(1, 2)
    if layout == "every other token":
        wide = torch.empty(shape[0], 2 * shape[1], shape[2], dtype=x.dtype)
        wide.view(torch.uint8).fill_(0x55)
        wide[:, ::2].copy_(x)
        return wide[:, ::2]
    return x


def encode(
    name: str, part: Part, x: torch.Tensor, source: Elements, destination: Elements
) -> torch.Tensor:
    """The coded plane, at an odd address, from memory that was not zero before."""
    nbytes = CODECS[name].coding.coded_bytes(part, tuple(x.shape), source)
    memory = torch.full((nbytes + 2,), 0xA5, dtype=torch.uint8)
    before = x.clone()
    CODECS[name].encode(part, x, source, destination, memory[1:-1])
    assert same_bits(x, before), "the source was written"
    assert memory[0] == memory[-1] == 0xA5, "a byte beside the coded plane was written"
    return memory[1:-1]


def carried(
    name: str, part: Part, x: torch.Tensor, source: Elements, destination: Elements
) -> torch.Tensor:
    """`x` after the wire, as the destination stores it."""
    data = encode(name, part, x, source, destination)
    back = CODECS[name].decode(part, data, tuple(x.shape), source, destination)
    assert back.shape == x.shape
    assert back.dtype == torch_dtype(destination)
    assert back.is_contiguous()
    return back


def same_bits(one: torch.Tensor, two: torch.Tensor) -> bool:
    bits = SIGNED[one.element_size()]
    return one.dtype == two.dtype and torch.equal(
        one.contiguous().view(bits), two.contiguous().view(bits)
    )


def nearest_code(value: float) -> int:
    """The FP8 code of a finite value, by search: nearest, ties to even, ±448 beyond the range."""
    magnitudes = CODES[:127].double().tolist()
    best = min(range(127), key=lambda code: (abs(magnitudes[code] - abs(value)), code & 1))
    return best | (0x80 if math.copysign(1.0, value) < 0 else 0)


@given(shape=shapes, source=stores, destination=stores, part=parts, layout=layouts)
@settings(max_examples=60, deadline=None)
def test_every_codec_carries_every_plane_between_all_pairs_of_caches(
    shape: tuple[int, int, int], source: Elements, destination: Elements, part: Part, layout: str
):
    x = plane(shape, source, seed=sum(shape), layout=layout)
    value = x.float() * source.scale
    for name in CODECS:
        if name == "int8" and source.is_fp8:
            continue
        back = carried(name, part, x, source, destination).float() * destination.scale
        limit = 448 * destination.scale if destination.is_fp8 else math.inf
        wanted = value.clamp(-limit, limit)
        # Rounding to bfloat16, to INT8 before anything saturates, to FP8 on the wire or at the end.
        coarse = name == "fp8_e4m3" or destination.is_fp8
        allowed = (0.07 if coarse else 0.004) * wanted.abs().max()
        if name == "int8":
            allowed += 0.005 * value.abs().max()
        if destination.is_fp8:  # its smallest step, where all values are small beside its scale
            allowed += 2.0**-10 * destination.scale
        assert (back - wanted).abs().max() <= allowed, name


@given(shape=shapes, source=stores, destination=stores, part=parts, layout=layouts)
@settings(max_examples=40, deadline=None)
def test_strides_and_tables_change_no_bit(
    shape: tuple[int, int, int], source: Elements, destination: Elements, part: Part, layout: str
):
    dense, strided = plane(shape, source), plane(shape, source, layout=layout)
    for name in CODECS:
        if name == "int8" and source.is_fp8:
            continue
        data = encode(name, part, dense, source, destination)
        assert torch.equal(encode(name, part, strided, source, destination), data), name
        back = CODECS[name].decode(part, data, shape, source, destination)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(elements, "is_fast", lambda x: False)
            assert torch.equal(encode(name, part, strided, source, destination), data), name
            plain = CODECS[name].decode(part, data, shape, source, destination)
        assert same_bits(back, plain), name


@pytest.mark.parametrize("name", CODECS)
def test_sizes_follow_from_the_shape_and_padding_is_zero(name: str):
    shape, source = (3, 200, 32), BF16
    for part in Part:
        scale_bytes = {
            "raw": 0,
            "fp8_e4m3": 4 * 3 * 2,
            "int8": 2 * 3 * (2 * 32 if part is Part.KEY else 200),
        }[name]
        start = -(-scale_bytes // 16) * 16
        wanted = start + 3 * 200 * 32 * (2 if name == "raw" else 1)
        assert CODECS[name].coding.coded_bytes(part, shape, source) == wanted
        data = encode(name, part, plane(shape, source), source, source)
        assert not data[scale_bytes:start].any()


@pytest.mark.parametrize("source", [*FLOATS, FP8], ids=lambda e: e.dtype)
def test_raw_is_the_sources_own_bytes(source: Elements):
    x = plane((2, 5, 32), source, layout="token first")
    data = encode("raw", Part.KEY, x, source, BF16)
    assert data.numpy().tobytes() == x.contiguous().view(torch.uint8).numpy().tobytes()
    assert same_bits(carried("raw", Part.KEY, x, source, source), x)


@pytest.mark.parametrize("name", ["raw", "fp8_e4m3"])
@pytest.mark.parametrize("scale", [1.0, 0.013])
def test_all_codes_of_an_fp8_cache_survive_the_wire_to_a_cache_of_the_same_scale(
    name: str, scale: float
):
    store = Elements("fp8_e4m3", scale)
    x = CODES.view(1, 8, 32)
    assert same_bits(carried(name, Part.VALUE, x, store, store), x)


@pytest.mark.parametrize("name", ["raw", "fp8_e4m3"])
@pytest.mark.parametrize("ratio", [0.125, 4.0])
def test_fp8_to_another_fp8_scale_is_exact_for_powers_of_two_within_the_range(
    name: str, ratio: float
):
    source, destination = Elements("fp8_e4m3", 0.3 * ratio), Elements("fp8_e4m3", 0.3)
    x = CODES.view(1, 8, 32)
    back = carried(name, Part.KEY, x, source, destination).float()
    wanted = x.float() * ratio
    normal = (wanted.abs() <= 448) & (wanted.abs() >= 2.0**-6)
    assert torch.equal(back[normal], wanted[normal])
    assert torch.equal(back.isnan(), x.float().isnan())
    assert (back[wanted.abs() > 448].abs() == 448).all(), "what is too large saturates"


def test_fp8_to_a_scale_that_is_no_power_of_two_apart_is_the_nearest_code():
    source, destination = Elements("fp8_e4m3", 1.0), Elements("fp8_e4m3", 0.75)
    back = carried("raw", Part.KEY, CODES.view(1, 8, 32), source, destination)
    ratio = torch.tensor(1 / 0.75, dtype=torch.float32)
    for code, found in enumerate(back.view(torch.uint8).flatten().tolist()):
        if code & 0x7F != 0x7F:
            assert found == nearest_code(float(CODES[code].float() * ratio)), code
    assert not same_bits(back, CODES.view(1, 8, 32))


@pytest.mark.parametrize("source", FLOATS, ids=lambda e: e.dtype)
@pytest.mark.parametrize("scale", [1.0, 0.25, 0.013])
def test_an_fp8_cache_gets_the_nearest_codes_and_the_same_from_raw_and_fp8(
    source: Elements, scale: float
):
    destination = Elements("fp8_e4m3", scale)
    edges = torch.cat([CODES[:127].float(), (CODES[:126].float() + CODES[1:127].float()) / 2])
    values = torch.cat([edges, -edges, edges * 1.01, edges * 0.99, torch.tensor([1e4, -1e4])])
    x = torch.nn.functional.pad(values * scale, (0, 1024 - len(values))).view(1, 32, 32)
    x = x.to(torch_dtype(source))
    direct = carried("fp8_e4m3", Part.VALUE, x, source, destination)
    assert same_bits(direct, carried("raw", Part.VALUE, x, source, destination))
    quotients = (x.float() / torch.tensor(scale)).flatten().tolist()
    assert direct.view(torch.uint8).flatten().tolist() == [nearest_code(q) for q in quotients]


@pytest.mark.parametrize("source", FLOATS, ids=lambda e: e.dtype)
@pytest.mark.parametrize("power", [-12, 0, 5])
def test_what_fp8_can_hold_comes_back_from_the_fp8_wire_bit_for_bit(source: Elements, power: int):
    codes = CODES[(CODES.float().abs() >= 2.0**-5)][:192].float()
    x = (codes * 2.0**power).to(torch_dtype(source)).view(2, 3, 32)
    assert same_bits(carried("fp8_e4m3", Part.KEY, x, source, source), x)
    again = carried("fp8_e4m3", Part.KEY, x, source, FP8)
    if power == 0:
        assert same_bits(carried("fp8_e4m3", Part.KEY, again, FP8, source), x)


def test_the_wires_fp8_scale_is_the_smallest_power_of_two_that_fits():
    largest = [448.0, 449.0, 1.0, 2.0**-140, 0.0, 3e38]
    x = torch.zeros(len(largest), 4, 32)
    x[:, 1, 3] = -torch.tensor(largest)
    data = encode("fp8_e4m3", Part.KEY, x, F32, F32)
    found = data[: 4 * len(largest)].clone().view(torch.float32).tolist()
    assert found == [1.0, 2.0, 2.0**-8, 2.0**-126, 1.0, 2.0**120]


@pytest.mark.parametrize("source", FLOATS, ids=lambda e: e.dtype)
def test_each_128_tokens_of_a_head_have_a_scale_of_their_own_on_the_wire(source: Elements):
    largest = torch.tensor([[448.0, 1.0, 900.0], [7.0, 2000.0, 0.0]])
    x = torch.zeros(2, 300, 32)
    for group, token in enumerate((127, 128, 299)):
        x[:, token, 31] = largest[:, group]
    data = encode("fp8_e4m3", Part.KEY, x.to(torch_dtype(source)), source, source)
    found = data[: 4 * largest.numel()].clone().view(torch.float32)
    assert found.tolist() == [1.0, 2.0**-8, 4.0, 2.0**-6, 8.0, 1.0]


@pytest.mark.parametrize("source", FLOATS, ids=lambda e: e.dtype)
def test_one_large_token_costs_others_their_precision_within_its_128_tokens_only(source: Elements):
    x = plane((2, 300, 64), BF16).clamp(-3, 3)
    x[:, 130] = 2.0**15
    x = x.to(torch_dtype(source))
    back = carried("fp8_e4m3", Part.VALUE, x, source, source).float()
    errors = (back - x.float()).abs()
    apart = torch.cat([errors[:, :128], errors[:, 256:]], 1)
    fine = torch.cat([x[:, :128], x[:, 256:]], 1).float().abs()
    assert (apart <= fine * 2.0**-4 + 2.0**-16).all()
    assert errors[:, 131:256].max() > 2.0**-5, "its own group is coarse, or this shows nothing"


@given(shape=shapes, source=st.sampled_from(FLOATS), part=parts, seed=st.integers(0, 99))
@settings(max_examples=40, deadline=None)
def test_int8_is_off_by_half_a_code_at_most_and_never_clips(
    shape: tuple[int, int, int], source: Elements, part: Part, seed: int
):
    x = plane(shape, source, seed)
    back = carried("int8", part, x, source, F32)
    groups = x.float().split(128, 1) if part is Part.KEY else [x.float()]
    largest = [
        g.abs().amax(1 if part is Part.KEY else 2, keepdim=True).expand_as(g) for g in groups
    ]
    # A scale is 1/127 of the largest, at most 1/128 more for rounding it up to bfloat16.
    half_a_code = torch.cat(largest, 1) / 127 * (1 + 1 / 128) / 2
    assert ((back - x.float()).abs() <= half_a_code * 1.0001).all()


def test_ints_under_a_power_of_two_scale_come_back_from_int8_bit_for_bit():
    x = torch.randint(-127, 128, (2, 260, 32), generator=torch.Generator().manual_seed(0))
    x[:, ::128, :], x[:, :, 0] = 127, -127
    for source, part in itertools.product(FLOATS, Part):
        exact = (x * 2.0**-5).to(torch_dtype(source))
        assert same_bits(carried("int8", part, exact, source, source), exact)


def test_int8_to_a_float_cache_rounds_code_times_scale_once():
    x = plane((1, 300, 64), F32)
    product = carried("int8", Part.KEY, x, F32, F32)
    for destination in (BF16, F16):
        back = carried("int8", Part.KEY, x, F32, destination)
        assert same_bits(back, product.to(torch_dtype(destination)))


@pytest.mark.parametrize("source", FLOATS, ids=lambda e: e.dtype)
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("destination", [BF16, F16, F32, FP8], ids=lambda e: e.dtype)
def test_what_is_not_finite_never_becomes_finite(
    source: Elements, bad: float, destination: Elements
):
    x = plane((2, 140, 32), source)
    x[1, 130, 5] = bad
    for name, part in itertools.product(CODECS, Part):
        back = carried(name, part, x, source, destination).float()
        assert not back[1, 130, 5].isfinite(), name
        assert back[0].isfinite().all(), f"{name}: another head is spoilt"
        spoilt = (~back.isfinite()).sum()
        group = 1 if name != "int8" else 12 if part is Part.KEY else 32
        assert spoilt == group, f"{name}: more than the group that shares a scale is spoilt"


@pytest.mark.parametrize("name", CODECS)
@pytest.mark.parametrize("tiny", [0.0, 2.0**-133])
def test_blocks_of_zeros_and_of_subnormals_stay_finite_and_small(name: str, tiny: float):
    x = torch.full((1, 130, 32), tiny, dtype=torch.bfloat16)
    for part in Part:
        assert carried(name, part, x, BF16, BF16).abs().max() <= tiny


@pytest.mark.parametrize("power", [-126, -20, -9, 0, 7, 120])
def test_every_bfloat16_is_divided_by_its_heads_power_as_in_float32(power: int) -> None:
    every = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    fits = every[every.isfinite() & (every.double().abs() <= 448 * 2.0**power)]
    # The largest decides the scale: more than 224 times it needs this one.
    x = torch.full((2, len(fits)), 255 * 2.0**power, dtype=torch.bfloat16)
    x[0] = fits
    x = x[None]
    codec = CODECS["fp8_e4m3"]
    out = torch.zeros(codec.coding.coded_bytes(Part.KEY, tuple(x.shape), BF16), dtype=torch.uint8)
    codec.encode(Part.KEY, x, BF16, BF16, out)
    wanted = (x.float() / 2.0**power).to(torch.float8_e4m3fn)
    codes = out[-x.numel() :].view(torch.float8_e4m3fn).view(x.shape)
    assert torch.equal(codes.view(torch.uint8), wanted.view(torch.uint8))


@pytest.mark.parametrize("dim", [1, 7, 64, 65])
@pytest.mark.parametrize("offset", [0, 1])
def test_codes_are_looked_up_in_pairs_where_they_pair_up(dim: int, offset: int) -> None:
    chosen = torch.randint(
        0, 256, (300 * dim + offset,), generator=torch.Generator().manual_seed(1)
    )
    codes = chosen.to(torch.uint8)[offset:].view(torch.float8_e4m3fn).view(300, dim)
    source, out = Elements("fp8_e4m3", 0.375), torch.empty((300, dim), dtype=torch.bfloat16)
    elements.convert(codes, source, BF16, out)
    wanted = (codes.float() * 0.375).to(torch.bfloat16)
    assert torch.equal(out.view(torch.int16), wanted.view(torch.int16))
