# SPDX-License-Identifier: Apache-2.0
"""Checks of the agent's books while it runs, for tests and for the hunt for a leak."""

import os
from collections.abc import Mapping
from typing import Protocol

CHECK_VARIABLE = "PD_CONNECTOR_CHECK"
"""With `1` the agent checks its books after every turn of its loop, and fails on a mismatch."""


class HasIntegrity(Protocol):
    """A part of the agent whose books can be checked."""

    def check_integrity(self) -> None:
        """Raise if a slot is not in exactly one place, or counts disagree."""


def checks_wanted(environment: Mapping[str, str] = os.environ) -> bool:
    """Whether PD_CONNECTOR_CHECK=1 asks for checks in a live engine."""
    return environment.get(CHECK_VARIABLE) == "1"
