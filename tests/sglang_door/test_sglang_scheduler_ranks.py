# SPDX-License-Identifier: Apache-2.0
"""Two ranks whose clocks run apart put the same requests into the same steps."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("sglang.srt")

from scheduler_plugins.sglang.ranks import Decision, Ranks

RANK = """
import json, sys
import torch.distributed as dist
from sglang_door.sglang_rig import Rig, prompt, request

rank, meeting, together = int(sys.argv[1]), sys.argv[2], sys.argv[3] == "together"
dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=2)
shared = {"group": dist.group.WORLD, "rank": rank, "size": 2} if together else {}
rig = Rig(page_size=16, pool_tokens=4096, **shared)  # small: prefixes are evicted
seconds = (1.0, 3000.0)[rank]  # of this rank's clock in a second
steps = []
for n in range(60):
    tokens = 60 + 150 * ((n * 7) % 9)
    ids = [*prompt(96, 500 + n % 4), *prompt(tokens, n)]
    rig.waiting.append(request(str(n), ids, at_s=7.0 * rank + n * seconds, max_tokens=1))
    steps.append(rig.step())
print(json.dumps([steps, rig.tree.total_size()]))
dist.destroy_process_group()
"""


def ranks(folder: Path, how: str) -> list[object]:
    """What two processes, each a rank, have put into their steps."""
    meeting = folder / how
    tests = Path(__file__).parents[1]
    path = os.pathsep.join([str(tests), *filter(None, [os.environ.get("PYTHONPATH")]), *sys.path])
    env = {**os.environ, "PYTHONPATH": path, "GLOO_SOCKET_IFNAME": "lo"}
    started = [
        subprocess.Popen(
            [sys.executable, "-W", "ignore", "-c", RANK, str(rank), str(meeting), how],
            stdout=subprocess.PIPE,
            env=env,
            text=True,
        )
        for rank in range(2)
    ]
    said = [process.communicate()[0] for process in started]
    assert [process.returncode for process in started] == [0, 0]
    return [json.loads(text.splitlines()[-1]) for text in said]


def test_ranks_with_skewed_clocks_start_the_same_requests_in_the_same_steps(tmp_path: Path) -> None:
    first, second = ranks(tmp_path, "together")
    assert first == second


def test_ranks_that_decide_for_themselves_differ(tmp_path: Path) -> None:
    """The harm: their next collective operation would never end."""
    first, second = ranks(tmp_path, "apart")
    assert first[0] != second[0]  # type: ignore[index]


def test_a_decision_of_any_length_arrives(monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[object] = []
    first, second = Ranks(None, 0, True, 2), Ranks(None, 0, False, 2)
    monkeypatch.setattr(
        "torch.distributed.broadcast", lambda tensor, src, group: sent.append(tensor.clone())
    )
    long = Decision([f"{n:032x}" for n in range(2000)], ["x"], 512, 64)
    decisions = [Decision(["a"], [], None, 0), long]
    for decision in decisions:
        assert first.agree(lambda decision=decision: decision) == decision  # type: ignore[misc]
    monkeypatch.setattr(
        "torch.distributed.broadcast", lambda tensor, src, group: tensor.copy_(sent.pop(0))
    )

    def forbidden() -> Decision:
        raise AssertionError("only the first rank decides")

    assert [second.agree(forbidden) for _ in decisions] == decisions


def test_one_rank_alone_tells_nobody() -> None:
    alone = Ranks(None, 0, True, 1)
    assert alone.agree(lambda: Decision(["a"])).start == ["a"]
