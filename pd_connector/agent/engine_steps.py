# SPDX-License-Identifier: Apache-2.0
"""Steps of the engine: counted by the engine's thread, read by the agent's."""

import time


class EngineSteps:
    """How many steps the engine has begun, and when it began the last.

    Args:
        late_revokes: the engine may overwrite pages while it prepares a step, and revoke them only
            when the step begins. What was gathered in the step before is in doubt then.
    """

    def __init__(self, *, late_revokes: bool = False) -> None:
        self.late_revokes = late_revokes
        self.count = 0
        self.told = 0
        """Written by the agent's thread: what the steps before this one took back is known to it."""
        self._began = time.monotonic()

    def begin(self) -> None:
        """The engine begins a step."""
        self.count += 1
        self._began = time.monotonic()

    def age_s(self) -> float:
        """How long ago the last step began, in seconds."""
        return time.monotonic() - self._began
