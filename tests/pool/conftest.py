# SPDX-License-Identifier: Apache-2.0
"""Clients that only tests have are in a folder of their own (`ci/setup-tests`); what the environment has goes first."""

import os
import sys
from pathlib import Path

_CLIENTS = str(Path(__file__).parents[2] / ".venv" / "far")
if os.path.isdir(_CLIENTS) and _CLIENTS not in sys.path:
    sys.path.append(_CLIENTS)
