# SPDX-License-Identifier: Apache-2.0
"""Cases executed in a process of their own, because kernels may be interpreted in that of the tests."""

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]


def executed(
    *names: str, seed: int = 0, arguments: Sequence[str] = (), triton: Path | None = None
) -> dict[str, Any]:
    """What was wrong with each case; "" for a case that was right.

    Args:
        arguments: more of the command's, see `__main__.py`.
        triton: folder of another Triton than this environment's.
    """
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    paths = [triton, ROOT, ROOT / "kernels", environment.get("PYTHONPATH")]
    environment["PYTHONPATH"] = os.pathsep.join(str(path) for path in paths if path)
    command = [sys.executable, "-m", "tests.emulator", *names, f"--seed={seed}", *arguments]
    done = subprocess.run(
        command, capture_output=True, text=True, env=environment, cwd=ROOT, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    told = json.loads(done.stdout.splitlines()[-1])  # behind what engines log
    assert triton is None or triton.name.endswith(told["triton"])
    found: dict[str, Any] = told["cases"]
    return found
