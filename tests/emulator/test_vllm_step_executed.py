# SPDX-License-Identifier: Apache-2.0
"""Steps of vLLM with our attention backends on a GPU, without one."""

import pytest
from executed import executed

pytest.importorskip("vllm")

SMALL = (
    *("vllm, mla, 40 heads", "vllm, graphs", "vllm, graphs, mla"),
    *("vllm, mla, beside prompts", "vllm, controls", "vllm, controls, fp8 by head"),
    *("vllm, beside prompts, fp8 by head", "vllm, mixed steps, fp8 by head"),
    *("vllm, sparse mla", "vllm, sparse mla, in pieces", "vllm, sparse mla, another choice"),
    *("vllm, sparse mla, two choices of two layers", "vllm, mla, fp8"),
    *("vllm, graphs, sparse mla, one choice of two layers", "vllm, graphs, mla, one scale"),
    *("launches, paged, 8 requests", "launches, mla, 40 heads"),
    *("vllm, mla, ragged, other tokens", "vllm, mla, one scale, another scale"),
    *("vllm, controls, beside prompts", "vllm, graphs, controls"),
    *("vllm, mimo, chosen", "vllm, mimo, fp8", "vllm, mimo, beside prompts, window and sinks"),
    *("vllm, mimo, mixed steps, window and sinks", "vllm, graphs, mimo", "vllm, controls, mimo"),
)
"""Controls: a step is right, and each guard that is undone is found. `python -m tests.emulator` executes all."""


def test_steps_give_attention_in_float32_and_no_guard_is_missed() -> None:
    assert executed(*SMALL) == dict.fromkeys(SMALL, "")
