# SPDX-License-Identifier: Apache-2.0
"""Docstrings' examples, as tests."""

import doctest
import importlib


def check_examples(module: str, least: int) -> None:
    """Run the examples of a module; at least `least` of its docstrings must have examples."""
    imported = importlib.import_module(module)
    assert doctest.testmod(imported).failed == 0
    found = [test for test in doctest.DocTestFinder().find(imported) if test.examples]
    assert len(found) >= least
