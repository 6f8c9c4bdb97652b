# SPDX-License-Identifier: Apache-2.0
"""One row of the doctor's report."""

from dataclasses import dataclass
from enum import StrEnum


class Status(StrEnum):
    """Severity. `warn` works but may not be what was meant; `fail` does not work."""

    OK = "ok"
    WARN = "warn"
    FAIL = "fail"


@dataclass(frozen=True)
class Finding:
    """The result of one check, with advice."""

    area: str
    """Heading above the row: software, additions, transports, network, limits, or a peer's URL."""
    name: str
    status: Status
    found: str
    advice: str = ""
    """Advice; empty if there is nothing to do."""
