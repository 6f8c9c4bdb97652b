# SPDX-License-Identifier: Apache-2.0
"""SGLang engines that are forked for tests behave as started ones: their processes are found, and none outlives them."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

from sglang_engines.sglang_harness import DEADLINE_S, ask, text
from sglang_engines.sglang_recipes import Recipe

from pd_connector.tools.launch import proc, wait_all


def test_a_forked_engines_processes_are_found_without_their_parent(tmp_path: Path) -> None:
    """An engine of its own, because it is killed."""
    with Recipe(None).engine("forked", tmp_path / "engine.log") as engine:
        wait_all([engine])
        assert ask(engine, text(20)).tokens
        family = engine.family
        assert family is not None
        before = {process.pid for process in family.members()}
        assert len(before) >= 3, "server, scheduler, detokenizer"
        for pid in before:
            assert "engine_forks.py" in Path(f"/proc/{pid}/cmdline").read_text()
        assert {pid for pid in before if family.id in proc.families(pid)} == before
        os.kill(family.pid, signal.SIGKILL)
        end = time.monotonic() + DEADLINE_S
        while engine.running:
            assert time.monotonic() < end, "its first process has not ended"
            time.sleep(0.1)
        assert {process.pid for process in family.members()} <= before
        engine.kill()
        assert not proc.marked(family.id)
