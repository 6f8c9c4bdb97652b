# SPDX-License-Identifier: Apache-2.0
"""Steps of vLLM with `--attention-backend CUSTOM` on a GPU, without one."""

import pytest
from executed import executed

pytest.importorskip("vllm")

SMALL = ("vllm, decodes", "vllm, fp8")
"""Decodes twice: the second step launches what the first has left (`direct_launch`). `python -m tests.emulator`
executes all."""


def test_steps_give_attention_in_float32() -> None:
    assert executed(*SMALL) == dict.fromkeys(SMALL, "")
