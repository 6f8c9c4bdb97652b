# SPDX-License-Identifier: Apache-2.0
"""A proxy that is set up wrongly does not fill the engine's log."""

import pytest

pytest.importorskip("vllm")

from pd_connector.errors import Cause
from pd_connector.telemetry import Telemetry
from pd_connector.vllm.handoff.ignored import PAUSE_S, IgnoredParams


def test_each_request_is_counted_and_each_cause_is_logged_once_a_minute(
    caplog: pytest.LogCaptureFixture,
) -> None:
    now, telemetry = [0.0], Telemetry()
    ignored = IgnoredParams(telemetry, lambda: now[0])
    for number in range(500):
        ignored.note(f"a{number}", Cause.UNTRUSTED_ADDRESS, "no seal")
        ignored.note(f"b{number}", Cause.ROLE, "wrong side")
    first, second = (record.getMessage() for record in caplog.records)
    assert "request a0: kv_transfer_params ignored (untrusted_address): no seal" in first
    assert "request b0: kv_transfer_params ignored (role): wrong side" in second
    now[0] += PAUSE_S
    ignored.note("c", Cause.ROLE, "wrong side")
    assert "(and 499 more since the last such line)" in caplog.records[-1].getMessage()
    snapshot = telemetry.take()
    assert snapshot is not None
    assert sorted(snapshot.counts.values()) == [500, 501]
