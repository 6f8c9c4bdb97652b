# SPDX-License-Identifier: Apache-2.0
"""What is advised where no KV arrives."""

import pytest

from pd_connector.errors import Cause
from pd_connector.remedies import HARMLESS, handoffs_in, outage_in, remedy

METRICS = """
pd_connector:failing_ranks{engine="0"} 1.0
pd_connector:failed_transfers_total{engine="0",cause="window"} 900.0
pd_connector:failed_transfers_total{engine="0",cause="aborted"} 800.0
pd_connector:failed_transfers_total{engine="0",cause="authentication"} 40.0
pd_connector:failed_transfers_total{engine="0",cause="stalled"} 3.0
"""


def test_causes_that_say_nothing_of_an_outage_do_not_decide_what_is_advised() -> None:
    """An engine that has served for weeks has counted many of them."""
    outage = outage_in(METRICS)
    assert outage is not None
    assert outage.advice == remedy(Cause.AUTHENTICATION)
    assert "window 900" in outage.finding, "all of them are told"


def test_without_any_other_cause_the_table_is_named() -> None:
    assert {Cause.WINDOW, Cause.ABORTED} <= HARMLESS
    lines = [line for line in METRICS.splitlines() if "auth" not in line and "stalled" not in line]
    outage = outage_in("\n".join(lines))
    assert outage is not None
    assert "docs/configuration.md" in outage.advice


def test_an_engine_at_which_kv_arrives_has_no_outage() -> None:
    assert outage_in(METRICS.replace("} 1.0", "} 0.0")) is None


SILENT = """
pd_connector:failing_ranks{engine="0"} 0.0
pd_connector:unmoved_prompts_total{engine="0",cause="no_params"} 12.0
pd_connector:unmoved_prompts_total{engine="1",cause="no_params"} 2.0
pd_connector:ignored_params_total{engine="0",cause="malformed_params"} 3.0
pd_connector:handoffs_total{engine="0",cause="malformed_params"} 3.0
pd_connector:sent_chunks_total{engine="0"} 0.0
"""


def test_an_engine_that_no_proxy_asks_for_kv_is_told_apart_from_a_healthy_one() -> None:
    outage = outage_in(SILENT)
    assert outage is not None
    assert "no_params 14, malformed_params 3" in outage.finding
    assert "sends no kv_transfer_params" in outage.advice


def test_the_most_frequent_cause_decides_what_is_advised() -> None:
    outage = outage_in(SILENT.replace("} 3.0", "} 300.0"))
    assert outage is not None
    assert outage.advice == remedy(Cause.MALFORMED_PARAMS)


@pytest.mark.parametrize(
    "sample",
    [
        'handoffs_total{cause="handed_over"} 1.0',
        'handoffs_total{cause="audited"} 1.0',
        'handoffs_total{engine="1",cause="malformed_params"} 1.0',  # one that was followed, and failed
        'releases_total{cause="delivered"} 1.0',
        "outgoing_transfers{} 1.0",
    ],
)
def test_an_engine_that_was_asked_once_is_not_silent(sample: str) -> None:
    """Short prompts, and those that a router keeps where they are, carry no parameters."""
    assert outage_in(f"{SILENT}pd_connector:{sample}\n") is None


def test_an_engine_without_prompts_is_not_silent() -> None:
    assert outage_in("") is None
    assert outage_in('pd_connector:unmoved_prompts_total{cause="no_params"} 0.0') is None


def test_handoffs_are_summed_over_an_engines_ranks() -> None:
    metrics = (
        METRICS
        + """
pd_connector:handoffs_total{cause="handed_over",engine="0"} 5.0
pd_connector:handoffs_total{cause="handed_over",engine="1"} 2.0
pd_connector:handoffs_total{cause="stalled",engine="0"} 1.0
pd_connector:handoffs_created{cause="stalled",engine="0"} 1.7e+09
"""
    )
    assert handoffs_in(metrics) == {"handed_over": 7, "stalled": 1}
