# SPDX-License-Identifier: Apache-2.0
"""The engine's steps: counted by the engine's thread, read by the agent's."""

import time


class EngineSteps:
    """The number of steps that the engine has begun, and the time of the last.

    Args:
        late_revokes: the engine can overwrite pages while it prepares a step, and revoke them only when the step
            begins. Chunks that were gathered in the preceding step are uncertain then.
    """

    def __init__(self, *, late_revokes: bool = False) -> None:
        self.late_revokes = late_revokes
        self.count = 0
        self.handled = 0
        """Written by the agent's thread: it has handled the commands of all steps before this one."""
        self._began = time.monotonic()

    def begin(self) -> None:
        """The engine begins a step."""
        self.count += 1
        self._began = time.monotonic()

    def age_s(self) -> float:
        """How long ago the last step began, in seconds."""
        return time.monotonic() - self._began
