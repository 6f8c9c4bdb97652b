# SPDX-License-Identifier: Apache-2.0
"""Models with recurrent states between engines that differ: pipeline stages, orders of a convolution, page sizes, cache
modes, versions and model runners of vLLM. With each, states that are harmed on their way, which must be seen.

It takes minutes, so it runs when asked for: `PD_STATES=all`, or a word that the names of the setups contain."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from harness import (
    Answer,
    Prompt,
    completion,
    fresh_salt,
    largest_difference,
    prefill_step,
    two_step,
)
from pairs import Pair, Setup, Side
from recipes import NEWEST, OLDER, Recipe, Vllm, frozen
from test_handoff import prompt_of
from test_states import (
    ARGS,
    TOLERANCES,
    TWO_RANKS,
    assert_same,
    kind,
    kind_of,
    prompt_and_answer,
    received,
)
from tiny_models import build
from told import told_at_once
from tools import delta, probe_all
from torch import cpu

WANTED = os.environ.get("PD_STATES", "")
TWO_STAGES = ["--pipeline-parallel-size", "2"]
DIMS_FIRST = {"VLLM_SSM_CONV_STATE_LAYOUT": "DS"}
SETUPS: Mapping[str, Mapping[str, Any]] = {
    **{kind: {} for kind in ARGS},
    "delta net, two stages": {"prefill_args": TWO_STAGES, "build": "delta net in stages"},
    "mamba2, two stages": {"prefill_args": TWO_STAGES},
    "mamba2, two stages to two ranks": {"prefill_args": TWO_STAGES, "decode_args": TWO_RANKS},
    "delta net, dims first": {"decode_env": DIMS_FIRST},
    "mamba2, dims first, two ranks": {"prefill_args": TWO_RANKS, "decode_env": DIMS_FIRST},
    "short conv, other pages": {"decode_args": ["--block-size", "128"]},
    "delta net, none to align": {"prefill_args": ["--no-enable-prefix-caching"]},
    "short conv from 0.31": {"other": "0.31"},
    "delta net from 0.31": {"other": "0.31"},
    "short conv from 0.33": {"other": "0.33"},
    "delta net from 0.33": {"other": "0.33"},
    "mamba2 from 0.33": {"other": "0.33"},
    "short conv from V2": {"other": "0.32"},
}


@dataclass(frozen=True)
class UnlikeSetup(Setup):
    """Both engines in both roles; the prefill engine may have another vLLM, the decode engine another environment."""

    other: Vllm = "0.32 V1"
    decode_env: tuple[tuple[str, str], ...] = ()

    def recipe(self, side: Side) -> Recipe:
        alone = side == "prefill" and self.other == "0.31"
        changed = replace(self, forked=not alone, worker_apart=alone)
        if side == "prefill":
            return Setup.recipe(replace(changed, vllm=self.other), side)
        recipe = Setup.recipe(changed, side)
        return recipe._replace(env=frozen(dict(recipe.env), dict(self.decode_env)))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


@pytest.fixture(scope="module")
def setup(request: pytest.FixtureRequest, folder: Path) -> Setup:
    name = request.param
    if not WANTED or (WANTED != "all" and WANTED not in name):
        pytest.skip("takes minutes: PD_STATES=all runs it, or a part of the name of its setup")
    unlike = dict(SETUPS[name])
    other, env = unlike.pop("other", "0.32 V1"), unlike.pop("decode_env", {})
    for version, place in (("0.31", OLDER), ("0.33", NEWEST)):
        if other == version and not place.is_dir():
            pytest.skip(f"no vLLM {version}: run ci/setup-tests")
    if other == "0.31" and kind_of(name) == "short conv" and cpu._is_avx512_bf16_supported():
        pytest.skip(
            "vLLM 0.31's CPU build packs convolutions of width 4 only, and ends with LFM2's"
        )
    built = unlike.pop("build", kind_of(name))
    path = folder / built.replace(" ", "_") / kind_of(name).replace(" ", "_")
    if not path.exists():
        build(built, path)
    base = Setup.of(model=path, both=True, vllm="0.32 V1", args=ARGS[kind_of(name)], **unlike)
    return UnlikeSetup(**vars(base), other=other, decode_env=tuple(env.items()))


@pytest.fixture
def pair(pair: Pair) -> Pair:
    """The running pair."""
    for engine, args in (
        (pair.p, pair.setup.prefill_args),
        (pair.d, pair.setup.decode_args),
    ):
        if TWO_STAGES[0] in args:
            probe_all(engine, "prepare_stage")
    return pair


each_setup = pytest.mark.parametrize("setup", SETUPS, indirect=True)


def rounds(pair: Pair) -> bool:
    """Whether one engine alone differs from itself there."""
    return kind(pair) == "delta net" or pair.setup.other != "0.32 V1"


@each_setup
def test_pairs_answer_as_one_engine(pair: Pair) -> None:
    """Prompts of two tokens, of a page and one more or less, and of several pages."""
    turned = pair.turned()
    for tokens in (2, 31, 32, 33, 129, 1055, 1056, 1057, 2200):
        for way, ask in ((pair, in_two_steps), (turned, in_two_steps), (turned, told_at_once)):
            prompt, wanted = prompt_and_answer(way.p, tokens)
            answer = handed_over(pair, way.d, partial(ask, way, prompt))
            assert_same(pair, answer, wanted, rounded=rounds(pair))


WANTED_BYTES = {  # two layers of either kind
    "short conv": (2 * 2 * 2 * 32 * 4, 2 * 2 * 128 * 4),
    "delta net": (2 * 2 * 2 * 32 * 2, 2 * (3 * 1024 * 2 + 4 * 128 * 128 * 4)),
    "mamba2": (2 * 2 * 2 * 32 * 4, 2 * (3 * 384 * 4 + 8 * 32 * 32 * 4)),
}
"""Bytes of a token's K and V, and of the states of a request."""


@each_setup
def test_no_more_bytes_pass_than_are_wanted(pair: Pair) -> None:
    of_token, of_states = WANTED_BYTES[kind(pair)]
    for tokens in (300, 3500):
        prompt = prompt_of(tokens, 30)
        for way in (pair, pair.turned()):
            with delta(way.d, "pd_connector:received_bytes_total") as received:
                two_step(way.p, way.d, prompt, 2)
            ratio = received.amount / ((tokens - 1) * of_token + of_states)
            print(f"{tokens} tokens to the {way.d.name} engine: {ratio:.4f} of what is wanted")
            assert 1 <= ratio <= 1.01


def in_two_steps(pair: Pair, prompt: Prompt) -> Answer:
    return two_step(pair.p, pair.d, prompt)


def handed_over(pair: Pair, engine: Any, ask: Any) -> Any:
    """See `received`; an engine may have two stages."""
    args = pair.setup.prefill_args if engine is pair.p else pair.setup.decode_args
    return received(
        pair, engine, ask, ranks=2 if {*TWO_RANKS[:1], *TWO_STAGES[:1]} & {*args} else 1
    )


@each_setup
@pytest.mark.parametrize("where", ["P", "D", "P and D"])
def test_prefixes_of_either_side(pair: Pair, where: str) -> None:
    if kind(pair) == "mamba2":
        pytest.skip("vLLM's CPU path of Mamba2 has no prefix cache")
    salt, alone = fresh_salt(), fresh_salt()
    beginning = prompt_and_answer(pair.p, 1200)[0]
    for engine, name in ((pair.p, "P"), (pair.d, "D")):
        if name in where:
            completion(engine, beginning, 1, cache_salt=salt)
    if "P" in where:
        completion(pair.p, beginning, 1, cache_salt=alone)
    prompt, wanted = prompt_and_answer(pair.p, 2300, cache_salt=alone)
    answer = two_step(pair.p, pair.d, prompt, cache_salt=salt)
    assert_same(pair, answer, wanted, rounded=True)


HARMS: Mapping[str, Sequence[str]] = {
    "zeroed": tuple(ARGS),
    "of a token more": tuple(ARGS),
    "another request's": tuple(ARGS),
    "B and C swapped": ("mamba2",),
    "a part missing": tuple(ARGS),
}


@each_setup
@pytest.mark.parametrize("harm", HARMS)
def test_a_harmed_state_is_another_answer(pair: Pair, harm: str) -> None:
    """The negative controls. The bytes pass as they are then, so only the answer can show it; the default audit compares
    states as well."""
    if kind(pair) not in HARMS[harm]:
        pytest.skip("this kind of state has no B and C")
    prompt, wanted = prompt_and_answer(pair.p, 700)
    whole = completion(pair.p, prompt, 1)
    longer = [*prompt, int(whole.tokens[0].removeprefix("token_id:"))]
    others = {"of a token more": longer, "another request's": prompt_of(len(prompt), 500)}
    salt, salt_of_other = fresh_salt(), fresh_salt()
    if other := others.get(harm):
        theirs = prefill_step(pair.p, other, cache_salt=salt_of_other)
    params = prefill_step(pair.p, prompt, cache_salt=salt)
    for mine, of_other in zip(
        state_pages(params), state_pages(theirs) if other else state_pages(params), strict=True
    ):
        probe_all(pair.p, "harm_states", harm, mine, of_other)
    answer = completion(pair.d, prompt, cache_salt=salt, kv_transfer_params=params)
    if other:
        completion(pair.d, other, 1, cache_salt=salt_of_other, kv_transfer_params=theirs)
    assert largest_difference(answer, wanted) > 10 * TOLERANCES[kind(pair)]


def state_pages(params: Mapping[str, Any]) -> list[int]:
    """The page of each table of states: a table of states lists pages that are not kept (0), or one page only."""
    tables = sorted(params["remote_block_ids"], key=lambda table: (0 not in table, len(table)))
    return [tables[0][-1]]
