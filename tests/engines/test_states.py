# SPDX-License-Identifier: Apache-2.0
"""Models with recurrent states: short convolutions (LFM2), gated delta nets (Qwen3-Next), Mamba2 (Nemotron-H)."""

from __future__ import annotations

from collections.abc import Callable
from math import inf
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
    wait_until,
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
"""How far apart logprobs of a pair and of one engine may be."""
ROUNDED = 0.15, 8
"""The same for bfloat16 on one and on two ranks, which sum in another order, but for one token; and tokens after which texts
may differ."""
SETUPS: dict[str, dict[str, Any]] = {
    "short conv": {},
    "short conv without a prefix cache here": {"decode_args": NO_CACHE},
    "delta net": {},
    "delta net, two ranks": {"prefill_args": TWO_RANKS},
    "mamba2": {},
    "mamba2, two ranks": {"prefill_args": TWO_RANKS},
}
"""Not short convolutions on two ranks: on a CPU, vLLM's own answers with two differ from those with one by up to 0.3."""


AUDITED = "delta net, audited"
SHORTER = 300
"""Tokens of a prompt that is shorter than a page, so it has no state to compare."""


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
    told = SETUPS.get(request.param, {"audit": "first"})
    return Setup.of(
        model=path,
        both=True,
        vllm="0.32 V1",
        args=ARGS[kind],
        **told,
    )


def only(*names: str) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("setup", names, indirect=True)


def kind(pair: Pair) -> str:
    return Path(pair.setup.model).name.replace("_", " ")


def prompt_and_answer(
    engine: Any, tokens: int, start: int = 30, **extra: Any
) -> tuple[list[int], Answer]:
    """A prompt, and what this engine alone answers, which computes the prompt's last token by itself: that token is the
    first one of its answer to the rest.

    It is the prefill engine. vLLM's short convolutions on a CPU depend on where a prompt is cut into steps.
    """
    prompt = prompt_of(tokens - 1, start)
    whole = completion(engine, prompt, 33, **extra)
    last = int(whole.tokens[0].removeprefix("token_id:"))
    rest = Answer(whole.tokens[1:], whole.logprobs[1:], whole.top[1:], "", {})
    return [*prompt, last], rest


def assert_same(pair: Pair, answer: Answer, wanted: Answer, *, rounded: bool = False) -> None:
    """The tokens of a pair's answer and their logprobs are those of one engine."""
    if not rounded and (kind(pair) != "delta net" or not pair.setup.prefill_args):
        assert_same_logprobs(answer, wanted, TOLERANCES[kind(pair)])
        return
    tolerance, count = ROUNDED
    off = []
    for place in range(count):
        found, likely = answer.tokens[place], answer.top[place]
        other, alike = wanted.tokens[place], wanted.top[place]
        apart = max((abs(likely[t] - alike[t]) for t in likely.keys() & alike.keys()), default=inf)
        if apart > tolerance:
            off.append(f"token {place}: {apart} apart, found {likely}, wanted {alike}")
        if found != other:
            # Near-equal tokens may change places. What follows has another context.
            gap = alike[other] - alike.get(found, -inf)
            assert gap <= 2 * tolerance, f"{found} for {other} at {place}, wanted {alike}"
            break
    # A rounded token can take another expert. That is over with the next token, which must be seen; another state is not.
    allowed = 1 if place > 1 else 0
    assert len(off) <= allowed, "\n".join(off)


def received(
    pair: Pair, engine: Any, ask: Callable[[], Answer], ranks: int | None = None
) -> Answer:
    """The answer to a request whose states and KV all ranks of this engine have received."""
    if ranks is None:
        ranks = 2 if engine is pair.p and TWO_RANKS[0] in pair.setup.prefill_args else 1
    with delta(engine, "pd_connector:received_transfers_total") as transfers:
        answer = ask()
    assert transfers.amount == ranks
    return answer


@only(*SETUPS)
@pytest.mark.parametrize("tokens", [2, 65, 129, 700])
def test_the_answer_is_that_of_one_engine(pair: Pair, tokens: int) -> None:
    prompt, wanted = prompt_and_answer(pair.p, tokens)
    for ask in (lambda: two_step(pair.p, pair.d, prompt), lambda: told_at_once(pair, prompt)):
        assert_same(pair, received(pair, pair.d, ask), wanted)
    prompt, wanted = prompt_and_answer(pair.d, tokens)
    answer = received(pair, pair.p, lambda: two_step(pair.d, pair.p, prompt))
    assert_same(pair, answer, wanted)


@only("short conv", "delta net", "mamba2")
@pytest.mark.parametrize("harm", ["zero_states", "negate_kv"])
def test_without_the_state_or_without_the_kv_it_is_another_answer(pair: Pair, harm: str) -> None:
    """The negative control: the logprobs depend on either."""
    prompt, wanted = prompt_and_answer(pair.p, 700)
    salt = fresh_salt()
    params = prefill_step(pair.p, prompt, cache_salt=salt)
    # A table of states lists pages that are not kept (0), or one page only.
    states, attention = sorted(
        params["remote_block_ids"], key=lambda table: (0 not in table, len(table))
    )
    for page in states[-1:] if harm == "zero_states" else attention:
        probe_all(pair.p, harm, page)
    answer = completion(pair.d, prompt, cache_salt=salt, kv_transfer_params=params)
    assert largest_difference(answer, wanted) > 10 * TOLERANCES[kind(pair)]


@only("short conv", "delta net")
@pytest.mark.parametrize("where", ["P", "D", "P and D"])
def test_prefixes_that_either_side_has_change_nothing(pair: Pair, where: str) -> None:
    alone, salt = fresh_salt(), fresh_salt()
    beginning = prompt_of(600, 30)
    for engine, name in ((pair.p, "P"), (pair.d, "D")):
        if name in where:
            completion(engine, beginning, 1, cache_salt=salt)
    if "P" in where:  # what one engine finds there, too
        completion(pair.p, beginning, 1, cache_salt=alone)
    prompt, wanted = prompt_and_answer(pair.p, 700, cache_salt=alone)
    answer = received(pair, pair.d, lambda: two_step(pair.p, pair.d, prompt, cache_salt=salt))
    # One engine alone differs by 0.07 between a prompt with and without a cached beginning: short convolutions are computed
    # differently then. Here the beginning is from one engine, and what follows from the other.
    assert_same(pair, answer, wanted, rounded=kind(pair) == "short conv" and where == "D")


@only(AUDITED)
def test_a_producer_passes_by_its_states_too(pair: Pair) -> None:
    """The default: the router's test prompt is long enough for a state, computed on both sides, and compared."""
    with delta(pair.d, "pd_connector:audits_total", cause="passed") as audits:
        assert pair.router.running
        wait_until(lambda: audits.so_far() == 1, "the audit has passed")
    prompt, wanted = prompt_and_answer(pair.p, SHORTER)
    answer = received(pair, pair.d, lambda: two_step(pair.p, pair.d, prompt))
    assert_same_logprobs(answer, wanted, TOLERANCES[kind(pair)])
    log = pair.d.log_path.read_text()
    assert "audit of engine" in log
