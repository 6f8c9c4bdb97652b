# SPDX-License-Identifier: Apache-2.0
"""Additions of other packages (docs/extending.md), and whether they load."""

from pd_connector.tools.cli.checks.facts import Facts
from pd_connector.tools.cli.checks.finding import Finding, Status

AREA = "additions"


def check(facts: Facts) -> list[Finding]:
    """All findings of this area; none if no other package adds anything."""
    return [
        Finding(
            AREA,
            f"{addition.kind} {addition.name}",
            Status.OK if addition.trial.works else Status.FAIL,
            addition.source if addition.trial.works else addition.trial.detail,
            "" if addition.trial.works else f"repair or uninstall {addition.source}",
        )
        for addition in facts.software.additions
    ]
