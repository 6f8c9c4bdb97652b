# SPDX-License-Identifier: Apache-2.0
"""Waiting for what another thread or process does."""

import time
from collections.abc import Callable
from typing import Any


def until(condition: Callable[[], Any], what: str = "", timeout_s: float = 30.0) -> Any:
    """Wait until `condition()` is true; returns what it returned."""
    deadline = time.monotonic() + timeout_s
    while not (found := condition()):
        assert time.monotonic() < deadline, f"not within {timeout_s} s: {what or condition}"
        time.sleep(0.005)
    return found
