# SPDX-License-Identifier: Apache-2.0
"""Decode steps of SGLang with our backends on a GPU, without one: the kernels that are compiled for sm_90a."""

import importlib
import shutil
import sys
from pathlib import Path

import pytest

pytest.importorskip("sglang.srt")
pytest.importorskip("triton")
if shutil.which("cc") is None:
    pytest.skip("the emulator needs a C compiler", allow_module_level=True)

sys.path.append(str(Path(__file__).parents[1] / "emulator"))
executed = importlib.import_module("executed").executed

SMALL = (
    *("sglang, mla", "sglang, graphs", "sglang, verify, tree"),
    *(
        "sglang, verify, mla, 8 drafts, fp8",
        "sglang, verify, tree, window",
        "sglang, graphs, tree, mla",
    ),
)
"""A graph is wrong without a step's tables, and right with them. `python -m tests.emulator sglang` executes all."""


def test_steps_give_attention_in_float32() -> None:
    assert executed(*SMALL) == dict.fromkeys(SMALL, "")
