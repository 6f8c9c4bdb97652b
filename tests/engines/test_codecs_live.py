# SPDX-License-Identifier: Apache-2.0
"""Caches of unlike dtypes, and codecs that lose something: how much, element for element.

Answers are compared with those of the decode engine when it computes the prompt itself: the same
cache dtype, and no handoff. Both are scored on the same tokens.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from caches import Cached, LayerKV, both_sides, unlike
from harness import (
    Prompt,
    completion,
    fresh_salt,
    prefill_step,
    two_step,
)
from pairs import (
    Pair,
    Setup,
)
from test_handoff import PAGE, prompt_of
from told import told_at_once
from tools import delta, probe_all

from pd_connector.tools.launch import VllmEngine

BFLOAT16 = ("--dtype", "bfloat16")
FP8_CACHE = ("--kv-cache-dtype", "fp8")

TO_AND_FROM_FP8 = Setup.of(args=BFLOAT16, decode_args=FP8_CACHE, both=True)
FP8 = Setup.of(args=(*BFLOAT16, *FP8_CACHE), decode_args=("--block-size", str(2 * PAGE)), both=True)
INT8_CODEC = Setup.of(args=BFLOAT16, codec="int8")
FP8_CODEC = Setup.of(codec="fp8_e4m3")

# Largest distance of the logprobs of 32 tokens from those of one engine, over the prompts here.
BOUNDS = {
    "bfloat16 to fp8": 0.5,
    "fp8 to bfloat16": 0.5,
    "fp8 to fp8": 0.5,
    "int8": 0.5,
    "fp8_e4m3": 0.5,
}

PROMPTS = {"short": prompt_of(60, start=3), "long": prompt_of(22 * PAGE + 7, start=500)}


def distance(engine: VllmEngine, prompt: Prompt, tokens: tuple[str, ...], found: tuple) -> float:
    """How far `found` is from what the engine says of these tokens on its own."""
    numbers = [int(token.removeprefix("token_id:")) for token in tokens]
    own = completion(engine, [*prompt, *numbers], 1, echo=True)
    scored = own.logprobs[len(prompt) : len(prompt) + len(numbers)]
    assert own.tokens[len(prompt) : len(prompt) + len(numbers)] == tokens
    return max(abs(a - b) for a, b in zip(found, scored, strict=True))


def assert_near_one_engine(pair: Pair, bound: float) -> None:
    """Answers are within the bound, however they were asked for; with a damaged page they are not."""
    for prompt in PROMPTS.values():
        for ask in (lambda p: two_step(pair.p, pair.d, p), lambda p: told_at_once(pair, p)):
            with delta(pair.d, "pd_connector:received_transfers_total") as received:
                answer = ask(prompt)
            assert received.amount == 1
            assert distance(pair.d, prompt, answer.tokens, answer.logprobs) <= bound
    prompt, salt = PROMPTS["long"], fresh_salt()
    params = prefill_step(pair.p, prompt, cache_salt=salt)
    for page in params["remote_block_ids"][0][-4:-1]:
        probe_all(pair.p, "damage_page", page)
    wrong = completion(pair.d, prompt, cache_salt=salt, kv_transfer_params=params)
    assert distance(pair.d, prompt, wrong.tokens, wrong.logprobs) > bound


def assert_exactly(there: Cached, here: Cached, convert: Callable[..., torch.Tensor]) -> None:
    """`here` is `there`, each element converted."""
    expected = {
        number: LayerKV(convert(layer.key), convert(layer.value), layer.kept)
        for number, layer in there.items()
    }
    assert unlike(here, expected) == []


def saturated(values: torch.Tensor) -> torch.Tensor:
    return values.float().clamp(-448, 448).to(torch.float8_e4m3fn)


@pytest.mark.parametrize("setup", [TO_AND_FROM_FP8], indirect=True, ids=["to and from fp8"])
@pytest.mark.parametrize("prompt", PROMPTS.values(), ids=list(PROMPTS))
def test_bfloat16_becomes_fp8_as_the_cache_would_store_it(pair: Pair, prompt: Prompt) -> None:
    there, here = both_sides(pair, prompt)
    assert there[0].key.dtype is torch.bfloat16
    assert here[0].key.dtype is torch.float8_e4m3fn
    assert_exactly(there, here, saturated)


@pytest.mark.parametrize("setup", [TO_AND_FROM_FP8], indirect=True, ids=["to and from fp8"])
@pytest.mark.parametrize("prompt", PROMPTS.values(), ids=list(PROMPTS))
def test_fp8_becomes_the_bfloat16_that_it_stands_for(pair: Pair, prompt: Prompt) -> None:
    there, here = both_sides(pair.turned(), prompt)
    assert here[0].key.dtype is torch.bfloat16
    assert_exactly(there, here, lambda codes: codes.float().to(torch.bfloat16))


@pytest.mark.parametrize("setup", [TO_AND_FROM_FP8], indirect=True, ids=["to and from fp8"])
@pytest.mark.parametrize("way", ["bfloat16 to fp8", "fp8 to bfloat16"])
def test_answers_between_bfloat16_and_fp8(pair: Pair, way: str) -> None:
    assert_near_one_engine(pair if way == "bfloat16 to fp8" else pair.turned(), BOUNDS[way])


@pytest.mark.parametrize("setup", [FP8], indirect=True, ids=["fp8"])
@pytest.mark.parametrize("prompt", PROMPTS.values(), ids=list(PROMPTS))
def test_fp8_stays_what_it_is_in_pages_of_another_size(pair: Pair, prompt: Prompt) -> None:
    there, here = both_sides(pair, prompt)
    assert here[0].key.dtype is torch.float8_e4m3fn
    assert unlike(here, there) == []


@pytest.mark.parametrize("setup", [FP8], indirect=True, ids=["fp8"])
def test_answers_from_fp8_to_fp8(pair: Pair) -> None:
    assert_near_one_engine(pair, BOUNDS["fp8 to fp8"])


def errors(there: torch.Tensor, here: torch.Tensor) -> torch.Tensor:
    return (there.float() - here.float()).abs()


@pytest.mark.parametrize("setup", [INT8_CODEC], indirect=True, ids=["int8"])
@pytest.mark.parametrize("prompt", PROMPTS.values(), ids=list(PROMPTS))
def test_int8_keeps_each_element_within_half_a_step(pair: Pair, prompt: Prompt) -> None:
    """A step is the largest magnitude of the element's group / 127, up to 2^-7 more. K's groups are
    at most a channel of a head over the whole prompt, V's are a token of a head. Then the value is
    rounded to bfloat16."""
    there, here = both_sides(pair, prompt)
    for number, layer in there.items():
        for name, axis in (("key", 0), ("value", 2)):
            before, after = layer.halves[name], here[number].halves[name]
            step = before.float().abs().amax(axis, keepdim=True) / 127 * (1 + 2**-7)
            allowed = step / 2 + before.float().abs() * 2**-8 + step * 2**-8
            assert (errors(before, after) <= allowed).all()
    assert unlike(here, there) != []


@pytest.mark.parametrize("setup", [INT8_CODEC], indirect=True, ids=["int8"])
def test_int8_needs_about_half_the_bytes(pair: Pair) -> None:
    prompt = PROMPTS["long"]
    with delta(pair.d, "pd_connector:received_bytes_total") as received:
        two_step(pair.p, pair.d, prompt)
    raw = (len(prompt) - 1) * 4 * 2 * 4 * 64 * 2  # layers, K and V, heads, dims, bytes
    assert 0.5 * raw < received.amount < 0.54 * raw


@pytest.mark.parametrize("setup", [INT8_CODEC], indirect=True, ids=["int8"])
def test_answers_with_int8(pair: Pair) -> None:
    assert_near_one_engine(pair, BOUNDS["int8"])


@pytest.mark.parametrize("setup", [FP8_CODEC], indirect=True, ids=["fp8_e4m3"])
@pytest.mark.parametrize("prompt", PROMPTS.values(), ids=list(PROMPTS))
def test_fp8_e4m3_keeps_each_element_within_its_last_bit(pair: Pair, prompt: Prompt) -> None:
    """Three bits of mantissa; near zero a step is scale x 2^-9, and a scale is at most twice the
    head's largest magnitude / 448."""
    there, here = both_sides(pair, prompt)
    for number, layer in there.items():
        for name, before in layer.halves.items():
            scale = 2 * before.abs().amax((0, 2), keepdim=True) / 448
            allowed = torch.maximum(before.abs() * 2**-4, scale * 2**-10)
            assert (errors(before, here[number].halves[name]) <= allowed).all()
    assert unlike(here, there) != []


@pytest.mark.parametrize("setup", [FP8_CODEC], indirect=True, ids=["fp8_e4m3"])
def test_fp8_e4m3_needs_a_quarter_of_the_bytes_of_float32(pair: Pair) -> None:
    prompt = PROMPTS["long"]
    with delta(pair.d, "pd_connector:received_bytes_total") as received:
        two_step(pair.p, pair.d, prompt)
    raw = (len(prompt) - 1) * 4 * 2 * 4 * 64 * 4  # layers, K and V, heads, dims, bytes
    assert 0.25 * raw < received.amount < 0.26 * raw


@pytest.mark.parametrize("setup", [FP8_CODEC], indirect=True, ids=["fp8_e4m3"])
def test_answers_with_fp8_e4m3(pair: Pair) -> None:
    assert_near_one_engine(pair, BOUNDS["fp8_e4m3"])
