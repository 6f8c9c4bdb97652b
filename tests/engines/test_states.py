# SPDX-License-Identifier: Apache-2.0
"""Models with recurrent states: short convolutions (LFM2), gated delta nets (Qwen3-Next), Mamba2 (Nemotron-H)."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
from harness import (
    Answer,
    assert_same_logprobs,
    completion,
    fresh_salt,
    largest_difference,
    prefill_step,
    two_step,
)
from pairs import Pair, Setup
from test_handoff import prompt_of
from tiny_models import build
from told import told_at_once
from tools import delta, probe_all

BFLOAT = ["--dtype", "bfloat16"]  # vLLM's CPU kernels of delta nets take nothing else
NO_CACHE = ["--no-enable-prefix-caching"]  # vLLM's CPU path of Mamba2 needs it
TWO_RANKS = ["--tensor-parallel-size", "2"]
ARGS: dict[str, list[str]] = {"short conv": [], "delta net": BFLOAT, "mamba2": NO_CACHE}
TOLERANCES = {"short conv": 1e-4, "delta net": 0.04, "mamba2": 1e-3}
"""Logprobs that one engine has and a pair has, at the most. In bfloat16 two ranks sum in another order."""
SETUPS: dict[str, dict[str, Any]] = {
    "short conv": {},
    "short conv without a prefix cache here": {"decode_args": NO_CACHE},
    "short conv, two ranks": {"prefill_args": TWO_RANKS},
    "delta net": {},
    "delta net, two ranks": {"prefill_args": TWO_RANKS},
    "mamba2": {},
    "mamba2, two ranks": {"prefill_args": TWO_RANKS},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


def kind_of(name: str) -> str:
    return next(kind for kind in ARGS if name.startswith(kind))


@pytest.fixture(scope="module")
def setup(request: pytest.FixtureRequest, folder: Path) -> Setup:
    kind = kind_of(request.param)
    path = folder / kind.replace(" ", "_")
    if not path.exists():
        build(kind, path)
    told = SETUPS[request.param]
    return Setup.of(
        model=path,
        both=True,
        vllm="0.32 V1",
        args=ARGS[kind],
        reference_args=ARGS[kind],
        **told,
    )


def only(*names: str) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("setup", names, indirect=True)


def kind(pair: Pair) -> str:
    return Path(pair.setup.model).name.replace("_", " ")


def prompt_and_answer(reference: Any, tokens: int, start: int = 30) -> tuple[list[int], Answer]:
    """A prompt, and what one engine answers that computes the prompt's last token alone: that token is the first one
    of its answer to the rest."""
    prompt = prompt_of(tokens - 1, start)
    whole = reference(prompt, 33)
    last = int(whole.tokens[0].removeprefix("token_id:"))
    rest = Answer(whole.tokens[1:], whole.logprobs[1:], whole.top[1:], "", {})
    return [*prompt, last], rest


@only(*SETUPS)
@pytest.mark.parametrize("tokens", [2, 65, 128, 129, 700, 1300])
def test_the_answer_is_that_of_one_engine(pair: Pair, reference: Any, tokens: int) -> None:
    prompt, wanted = prompt_and_answer(reference, tokens)
    ranks = 1
    turned = pair.turned()
    for first, second, ask in (
        (pair.p, pair.d, lambda: two_step(pair.p, pair.d, prompt)),
        (pair.p, pair.d, lambda: told_at_once(pair, prompt)),
        (pair.d, pair.p, lambda: two_step(turned.p, turned.d, prompt)),
    ):
        with delta(second, "pd_connector:received_transfers_total") as received:
            answer = ask()
        ranks = 2 if first is pair.d and TWO_RANKS[0] in pair.setup.prefill_args else 1
        assert received.amount == ranks
        print(kind(pair), tokens, largest_difference(answer, wanted))
        assert_same_logprobs(answer, wanted, TOLERANCES[kind(pair)])


@only("short conv", "delta net", "mamba2")
@pytest.mark.parametrize("harm", ["zero_states", "negate_kv"])
def test_without_the_state_or_without_the_kv_it_is_another_answer(
    pair: Pair, reference: Any, harm: str
) -> None:
    """The negative control: the logprobs depend on either."""
    prompt, wanted = prompt_and_answer(reference, 700)
    salt = fresh_salt()
    params = prefill_step(pair.p, prompt, cache_salt=salt)
    states, attention = sorted(
        params["remote_block_ids"], key=lambda table: (0 in table, -len(table))
    )[::-1]
    for page in states[-1:] if harm == "zero_states" else attention:
        probe_all(pair.p, harm, page)
    answer = completion(pair.d, prompt, cache_salt=salt, kv_transfer_params=params)
    assert largest_difference(answer, wanted) > 10 * TOLERANCES[kind(pair)]


@only("short conv", "delta net")
def test_prefixes_that_either_side_has_change_nothing(pair: Pair, reference: Any) -> None:
    prompt, wanted = prompt_and_answer(reference, 700)
    for salt in ("on P", "on D", "on both"):
        for engine, name in ((pair.p, "P"), (pair.d, "D")):
            if name in salt or salt == "on both":
                completion(engine, prompt[:600], 1, cache_salt=salt)
        with delta(pair.d, "pd_connector:received_transfers_total") as received:
            answer = two_step(pair.p, pair.d, prompt, cache_salt=salt)
        assert received.amount == 1
        assert math.isfinite(largest_difference(answer, wanted))
        assert_same_logprobs(answer, wanted, TOLERANCES[kind(pair)])
