# SPDX-License-Identifier: Apache-2.0
"""Every variant of a kernel that a switch can choose has been executed."""

import ast
from dataclasses import fields
from pathlib import Path

from executed import executed

from pd_kernels.tuning import Tuning

SMALL = ("mla, 16 heads", "mla, 16 heads, column_merge off", "gluon")
"""Those without vLLM; test_vllm_step_executed.py has others, `python -m tests.emulator` all."""


def told() -> dict[tuple[str, bool], tuple[str, str]]:
    """`SWITCHES` of cases.py. Importing it would install the emulator's driver here."""
    tree = ast.parse(Path(__file__).with_name("cases.py").read_text())
    for each in tree.body:
        if isinstance(each, ast.Assign) and ast.unparse(each.targets[0]) == "SWITCHES":
            found: dict[tuple[str, bool], tuple[str, str]] = ast.literal_eval(each.value)
            return found
    raise AssertionError("cases.py has no SWITCHES")


def test_each_setting_of_a_switch_has_a_case() -> None:
    wanted = {(field.name, value) for field in fields(Tuning) for value in (True, False)}
    assert set(told()) == wanted


def test_the_cases_that_tests_execute_are_those_of_switches() -> None:
    assert set(SMALL) <= {case for case, _ in told().values()}


def test_their_kernels_are_right_and_ran_under_that_setting() -> None:
    assert executed(*SMALL) == dict.fromkeys(SMALL, "")
