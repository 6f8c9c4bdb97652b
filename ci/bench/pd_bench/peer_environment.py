# SPDX-License-Identifier: Apache-2.0
"""Other projects' programs to compare with, each in its own virtual environment."""

import subprocess
from pathlib import Path


def installed_version(environment: Path, package: str) -> str:
    """The version of a package in a virtual environment; empty if it is missing."""
    python = environment / "bin" / "python"
    if not python.exists():
        return ""
    program = f"from importlib.metadata import version; print(version('{package}'))"
    done = subprocess.run([python, "-c", program], capture_output=True, text=True, check=False)
    return done.stdout.strip() if done.returncode == 0 else ""


def how_to_make(environment: Path, *packages: str) -> str:
    """Commands that make an environment with these packages, for messages."""
    return (
        f"make an environment of its own with `python3 -m venv {environment} && "
        f"{environment}/bin/pip install {' '.join(packages)}`"
    )
