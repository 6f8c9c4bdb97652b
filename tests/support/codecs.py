# SPDX-License-Identifier: Apache-2.0
"""Codecs as torch computes them, and as their compiled loops do."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest

from pd_connector.codec import COMPILER

WAYS = ["by torch", "by numba"]


@contextlib.contextmanager
def computed(way: str) -> Iterator[None]:
    """Codecs compute in this way; skips the test where it is not to be had."""
    if way == "by numba":
        pytest.importorskip("numba")
        assert COMPILER.wait(), "the loops do not compile: see the log"
    with COMPILER.off() if way == "by torch" else contextlib.nullcontext():
        yield
