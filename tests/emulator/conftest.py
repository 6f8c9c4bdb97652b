# SPDX-License-Identifier: Apache-2.0
"""Without Triton or a C compiler nothing of this folder is collected."""

import importlib.util
import shutil
import sys
from pathlib import Path

if importlib.util.find_spec("triton") is None or shutil.which("cc") is None:
    collect_ignore_glob = ["*.py"]
sys.path.append(str(Path(__file__).parent))  # of the modules that these tests share
