# SPDX-License-Identifier: Apache-2.0
"""The names that vLLM's flags ask for, and what comes with them."""

from __future__ import annotations

import subprocess
import sys

import pytest

import scheduler_plugins.vllm


def test_the_package_imports_neither_vllm_nor_the_scheduler() -> None:
    told = "import sys, scheduler_plugins.vllm; print([n for n in sys.modules if 'vllm' in n])"
    done = subprocess.run([sys.executable, "-c", told], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "['scheduler_plugins.vllm']"


def test_another_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="FastScheduler"):
        _ = scheduler_plugins.vllm.FastScheduler
