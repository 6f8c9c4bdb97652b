# SPDX-License-Identifier: Apache-2.0
"""One row of what the doctor says."""

from dataclasses import dataclass
from enum import StrEnum


class Status(StrEnum):
    """How bad it is. `warn` works but may not be what was meant; `fail` does not work."""

    OK = "ok"
    WARN = "warn"
    FAIL = "fail"


@dataclass(frozen=True)
class Finding:
    """What one check found, and what to do about it."""

    area: str
    """Heading the row stands under: software, additions, transports, network, limits, or a peer's URL."""
    name: str
    status: Status
    found: str
    advice: str = ""
    """Empty where nothing is to be done."""
