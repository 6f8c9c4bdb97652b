# SPDX-License-Identifier: Apache-2.0
"""Anybody who reaches a control port can have sessions refused, and cannot fill the log with it."""

from __future__ import annotations

import pytest

from pd_connector.agent.producing.producer_side import EVERY_S, MOST_LINES, Refusals
from pd_connector.errors import Cause
from pd_connector.telemetry import Telemetry


def test_a_flood_of_one_cause_is_counted_and_does_not_hide_another(
    caplog: pytest.LogCaptureFixture,
) -> None:
    telemetry = Telemetry()
    refusals = Refusals(telemetry)
    for n in range(1000):
        refusals.refused(Cause.MALFORMED_MESSAGE, f"garbage {n}", 10.0)
    refusals.refused(Cause.MODEL, "another model", 10.0)
    assert len(caplog.messages) == MOST_LINES + 1
    assert caplog.messages[-1] == "session refused (model): another model"
    refusals.refused(Cause.MALFORMED_MESSAGE, "garbage", 10.0 + EVERY_S)
    assert caplog.messages[-2:] == [
        f"sessions refused (malformed_message): {1000 - MOST_LINES} more of them",
        "session refused (malformed_message): garbage",
    ]
    taken = telemetry.take()
    assert taken is not None
    assert {labels: n for (_, labels), n in taken.counts.items()} == {
        (("cause", "malformed_message"),): 1001,
        (("cause", "model"),): 1,
    }


def test_what_a_stranger_sends_is_one_line(caplog: pytest.LogCaptureFixture) -> None:
    Refusals(Telemetry()).refused(Cause.MODEL, "a\nb\u2028c\x85d\x1b[2Je", 0.0)
    assert caplog.messages == [r"session refused (model): a\u000ab\u2028c\u0085d\u001b[2Je"]
