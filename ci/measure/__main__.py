# SPDX-License-Identifier: Apache-2.0
"""`python ci/measure`: see `app`."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from measure.app import app

app()
