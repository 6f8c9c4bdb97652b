# SPDX-License-Identifier: Apache-2.0
"""An operator whose config names a codec that is not used is told why."""

import pytest
from support.agents import LONG, Ranks, ranks

__all__ = ["ranks"]


@pytest.mark.parametrize(
    ("produces", "consumes", "told"),
    [
        ("raw", "int8", True),
        ("int8", "int8", False),
        ("int8", "raw", False),
        ("raw", "auto", False),
    ],
)
def test_a_named_codec_that_is_not_used_is_told(
    ranks: Ranks, caplog: pytest.LogCaptureFixture, produces: str, consumes: str, told: bool
) -> None:
    producer = ranks(LONG | {"codec": produces}, consumes=False)
    consumer = ranks(LONG | {"codec": consumes}, produces=False)
    producer.offer("t", [1])
    consumer.load(producer.source, "t", [2])
    assert consumer.loaded("t").cause is None
    producer.freed("t")
    lines = [line for line in caplog.messages if "is not used with" in line]
    assert len(lines) == told
    assert all("permits raw: set its config key codec" in line for line in lines)
