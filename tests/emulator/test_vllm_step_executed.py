# SPDX-License-Identifier: Apache-2.0
"""Steps of vLLM with our attention backends on a GPU, without one."""

import pytest
from executed import executed

pytest.importorskip("vllm")

SMALL = (
    *("vllm, decodes", "vllm, mla", "vllm, mla, 40 heads"),
    *("vllm, controls", "vllm, controls, fp8"),
)
"""Decodes twice: the second step launches what the first has left (`direct_launch`). Controls: a step is right, and
each guard that is undone is found. `python -m tests.emulator` executes all."""


def test_steps_give_attention_in_float32_and_no_guard_is_missed() -> None:
    assert executed(*SMALL) == dict.fromkeys(SMALL, "")
