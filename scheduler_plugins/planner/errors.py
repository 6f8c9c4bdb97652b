# SPDX-License-Identifier: Apache-2.0
"""What keeps a plan from being made."""


class PlanError(ValueError):
    """Input that cannot be planned with; the message says what was found, what is wanted, and what to do."""
