# SPDX-License-Identifier: Apache-2.0
"""The stand-ins of these tests lie beside them. What they test needs the extras `router` and `scheduler`."""

from __future__ import annotations

import sys
from importlib.util import find_spec
from pathlib import Path

sys.path.append(str(Path(__file__).parent))

if any(find_spec(name) is None for name in ("aiohttp", "prometheus_client", "yaml")):
    collect_ignore_glob = ["test_*.py"]
