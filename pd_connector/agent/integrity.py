# SPDX-License-Identifier: Apache-2.0
"""Checks of the agent's slots and counts while it runs, for tests and to find leaks."""

import os
from collections.abc import Mapping
from typing import Protocol

CHECK_VARIABLE = "PD_CONNECTOR_CHECK"
"""With `1` the agent checks its slots and counts after every turn of its loop, and fails if they disagree."""


class HasIntegrity(Protocol):
    """A part of the agent with a check."""

    def check_integrity(self) -> None:
        """Raise if a slot is not in exactly one place, or counts disagree."""


def checks_wanted(environment: Mapping[str, str] = os.environ) -> bool:
    """Whether PD_CONNECTOR_CHECK=1 turns on integrity checks in a live engine."""
    return environment.get(CHECK_VARIABLE) == "1"
