# SPDX-License-Identifier: Apache-2.0
"""Programs of this package in another Python, whose environment has the client of a far store and not this package.

Only modules that need msgspec alone run there. Nothing else of this environment is seen there: its packages could clash.
"""

import subprocess
import sys
from pathlib import Path

from pd_connector.errors import ConfigError

PACKAGE = Path(__file__).parents[2]
OPTION = "--client-python"
CHECKED = "checked:"
"""What the program of a check prints first. Another program than Python may print nothing, and end well."""
_CHECK_S = 120.0
"""Longest check of an address, in seconds."""
_BEGINS = """
import runpy, sys, types
package = types.ModuleType("pd_connector")
package.__path__ = [sys.argv.pop(1)]
sys.modules["pd_connector"] = package
runpy.run_module(sys.argv.pop(1), run_name="__main__")
"""


def command(python: str, module: str, *arguments: str) -> list[str]:
    """A command that runs a module of this package.

    Args:
        python: the program; empty: this one.
    """
    if not python:
        return [sys.executable, "-m", module, *arguments]
    return [python, "-c", _BEGINS, str(PACKAGE), module, *arguments]


def problem_there(python: str, address: str) -> str:
    """The error that the far store reports for an address in that Python; empty if there is none.

    Raises:
        ConfigError: that Python cannot be used.
    """
    try:
        ended = subprocess.run(
            command(python, "pd_connector.pool.far.registry"),
            input=address,  # an option would show the password to other users
            check=False,
            capture_output=True,
            text=True,
            timeout=_CHECK_S,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ConfigError(f"{OPTION} {python}: cannot be started: {error}") from None
    if ended.returncode:
        last = (ended.stderr.strip().splitlines() or ["it says nothing"])[-1]
        raise ConfigError(
            f"{OPTION} {python}: cannot be used ({last}): must be a Python of 3.11 or later whose environment has msgspec and the "
            "far store's client"
        )
    if not ended.stdout.startswith(CHECKED):
        raise ConfigError(
            f"{OPTION} {python}: cannot be used (it did not run what it was given): must be a Python of 3.11 or later"
        )
    return ended.stdout.removeprefix(CHECKED).strip()
