# SPDX-License-Identifier: Apache-2.0
"""The counts that each sender of requests keeps for an engine, and tells other senders."""

from __future__ import annotations

from enum import IntEnum


class Count(IntEnum):
    """The place of each count in a list."""

    OPEN = 0
    """Open exchanges with the engine."""
    PREFILLS = 1
    QUEUED_S = 2
    """Predicted seconds of all its prompts. Elapsed time is not subtracted."""
    BUSY_SINCE_S = 3
    """Latest time at which the prompt under way began. Of several senders, the latest counts, and not the sum."""
    QUEUED_TOKENS = 4
    DECODES = 5
    CONTEXT = 6
    HEAVY = 7


NONE = (0.0,) * len(Count)
"""The counts of a sender that has sent nothing."""
