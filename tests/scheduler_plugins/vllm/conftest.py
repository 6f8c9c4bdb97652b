# SPDX-License-Identifier: Apache-2.0
"""The rig of these tests needs vLLM. Boards do not go to the user's folder."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest

from scheduler_plugins.admission import board

if find_spec("vllm") is None:
    collect_ignore_glob = ["test_sched_engine*.py"]


@pytest.fixture(scope="session", autouse=True)
def boards(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where boards lie in these tests."""
    folder = tmp_path_factory.mktemp("board") / "boards"
    board.default_folder = lambda: folder
    return folder
