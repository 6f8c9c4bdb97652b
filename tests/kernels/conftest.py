# SPDX-License-Identifier: Apache-2.0
"""Kernels run in Triton's interpreter here, which needs no GPU; where it is wrong it is corrected.

Without Triton nothing of this folder is collected.
"""

import importlib
import importlib.util
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import pytest

if importlib.util.find_spec("triton") is None:
    collect_ignore_glob = ["*.py"]
else:
    # Whether a kernel is interpreted is decided where it is defined, Triton's own functions
    # included: one that other tests have imported is imported once more. What this process starts
    # must not inherit the setting.
    for _name in [name for name in sys.modules if name.split(".")[0] == "triton"]:
        if not _name.startswith("triton._C"):
            del sys.modules[_name]
    _before = os.environ.get("TRITON_INTERPRET")
    os.environ["TRITON_INTERPRET"] = "1"
    try:
        for _part in ("transfer", "attention"):
            importlib.import_module(f"pd_kernels.{_part}")
        # What Triton itself imports at the first launch.
        importlib.import_module("triton.experimental.gluon")
    finally:
        del os.environ["TRITON_INTERPRET"]
        if _before is not None:
            os.environ["TRITON_INTERPRET"] = _before

    sys.path.append(str(Path(__file__).parent))  # of the modules that these tests share
    from kernel_traps import mended, problem

    @pytest.fixture(scope="session")
    def interpreter_problem() -> str:
        return problem()

    @pytest.fixture(autouse=True)
    def _mended_interpreter(
        request: pytest.FixtureRequest, interpreter_problem: str
    ) -> Iterator[None]:
        if interpreter_problem and not request.path.stem.endswith("_aot"):
            pytest.fail(interpreter_problem, pytrace=False)
        with mended():
            yield

    @pytest.fixture(scope="module")
    def registered_backends() -> Iterator[None]:
        """Our attention backends are vLLM's while the tests of a module run; MLA as vLLM chooses."""
        from vllm.v1.attention.backends import registry

        from pd_kernels.vllm import plugin

        with mock.patch.dict(os.environ), mock.patch.dict(registry._ATTN_OVERRIDES):
            os.environ.pop(plugin.MLA_VARIABLE, None)
            plugin.register()
            yield
