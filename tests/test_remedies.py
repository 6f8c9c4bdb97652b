# SPDX-License-Identifier: Apache-2.0
"""What is advised where no KV arrives."""

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
    assert "window 900" in outage.found, "all of them are told"


def test_without_any_other_cause_the_table_is_named() -> None:
    assert {Cause.WINDOW, Cause.ABORTED} <= HARMLESS
    lines = [line for line in METRICS.splitlines() if "auth" not in line and "stalled" not in line]
    outage = outage_in("\n".join(lines))
    assert outage is not None
    assert "docs/configuration.md" in outage.advice


def test_an_engine_at_which_kv_arrives_has_no_outage() -> None:
    assert outage_in(METRICS.replace("} 1.0", "} 0.0")) is None


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
