# SPDX-License-Identifier: Apache-2.0
"""Engines of different vLLM versions hand over to each other, in both directions."""

from __future__ import annotations

import json

import pytest
from harness import (
    assert_same_logprobs,
    two_step,
)
from pairs import EnginePool, Pair, Setup, Side
from pools import OLDER
from recipes import COMPILE_NOTHING, PROBE_ENVIRONMENT, Recipe, frozen
from test_handoff import prompt_of
from tools import TOLERANCE, delta


class MixedSetup(Setup):
    """Both engines in both roles, the prefill engine with the older vLLM."""

    def recipe(self, side: Side) -> Recipe:
        usual = Setup.of(both=True).recipe(side)
        older = {"PYTHONPATH": str(OLDER)}
        if side == "decode":
            return usual
        return usual._replace(env=frozen(PROBE_ENVIRONMENT, COMPILE_NOTHING, older), forked=False)


@pytest.fixture
def mixed(engines: EnginePool) -> Pair:
    if not OLDER.is_dir():
        pytest.skip(f"no vLLM 0.31 in {OLDER.name} of the environment: run ci/setup")
    return engines.pair(MixedSetup())


def test_versions_0_31_and_0_32_hand_over_both_ways(mixed: Pair, reference) -> None:
    assert json.loads(mixed.p.client.get("/version"))["version"].startswith("0.31")
    assert json.loads(mixed.d.client.get("/version"))["version"].startswith("0.32")
    prompt = prompt_of(700, start=60)
    for prefill, decode in ((mixed.p, mixed.d), (mixed.d, mixed.p)):
        with delta(decode, "pd_connector:received_transfers_total") as received:
            answer = two_step(prefill, decode, prompt)
        assert received.amount == 1
        assert_same_logprobs(answer, reference(prompt), TOLERANCE)
    mixed.assert_idle()
