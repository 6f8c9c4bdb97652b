# SPDX-License-Identifier: Apache-2.0
"""Engines of different versions and model runners of vLLM hand over to each other, in both directions."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace

import pytest
from harness import (
    assert_same_logprobs,
    two_step,
)
from pairs import EnginePool, Pair, Setup, Side
from recipes import NEW, NEWEST, OLDER, VLLM, Recipe, Vllm
from test_handoff import prompt_of
from told import told_at_once
from tools import TOLERANCE, delta, probe

from pd_connector.tools.launch import VllmEngine
from pd_connector.vllm.connector import PDConnector

V2 = "Using V2 Model Runner"


@dataclass(frozen=True)
class MixedSetup(Setup):
    """Both engines in both roles, the prefill engine with another vLLM."""

    other: Vllm = "0.31"

    def recipe(self, side: Side) -> Recipe:
        if side == "decode":
            return super().recipe(side)
        alone = self.other == "0.31"  # it has not all modules that forks import first
        changed = replace(self, vllm=self.other, forked=not alone, worker_apart=alone)
        return Setup.recipe(changed, side)


@pytest.fixture
def mixed(engines: EnginePool, request: pytest.FixtureRequest) -> Pair:
    if request.param == "0.31" and not OLDER.is_dir():
        pytest.skip(f"no vLLM 0.31 in {OLDER.name} of the environment: run ci/setup-tests")
    return engines.pair(MixedSetup(both=True, vllm=NEW, other=request.param))


def served(engine: VllmEngine) -> tuple[str, bool, bool]:
    """Its version, and whether it has Model Runner V2, and schedules steps ahead, as on a GPU."""
    version = json.loads(engine.client.get("/version"))["version"]
    release = ".".join(version.split(".")[:2])
    return (
        release,
        V2 in engine.log_path.read_text(),
        str(probe(engine, "schedules_ahead")) == "True",
    )


@pytest.mark.parametrize("mixed", [name for name in VLLM if name != NEW], indirect=True)
def test_unlike_versions_and_runners_hand_over_both_ways(mixed: Pair, reference) -> None:
    assert served(mixed.d) == (NEW, True, True)
    second = (other := mixed.setup.other) in ("0.32", "0.33")
    assert served(mixed.p) == (other.split()[0], second, second)
    prompt = prompt_of(700, start=60)
    for pair in (mixed, mixed.turned()):
        with delta(pair.d, "pd_connector:received_transfers_total") as received:
            answers = [two_step(pair.p, pair.d, prompt), told_at_once(pair, prompt)]
        assert received.amount == 2
        for answer in answers:
            assert_same_logprobs(answer, reference(prompt), TOLERANCE)
    mixed.assert_idle()


@pytest.mark.skipif(not NEWEST.is_dir(), reason="no vLLM 0.33: read .venv/vllm-0.33.log")
def test_hooks_of_vllm_0_33_are_known_here() -> None:
    """`tests/vllm` runs with 0.32 only."""
    base = NEWEST / "vllm" / "distributed" / "kv_transfer" / "kv_connector" / "v1" / "base.py"
    text = base.read_text()
    for name in ("supports_sleep_mode", "unregister_kv_caches", "restore_kv_caches"):
        assert f"def {name}(" in text
        assert name in vars(PDConnector)
