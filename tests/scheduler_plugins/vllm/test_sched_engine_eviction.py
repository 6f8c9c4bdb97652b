# SPDX-License-Identifier: Apache-2.0
"""What stays cached is worth at least what vLLM keeps, for conversations and for suffixes alike."""

from __future__ import annotations

import pytest
from typer.testing import CliRunner
from vllm.v1.core.sched.scheduler import Scheduler

from pd_bench.scheduler import app as bench
from pd_bench.scheduler import eviction
from pd_bench.scheduler.workload import conversations, shared_profiles
from scheduler_plugins.vllm.discard import SuffixDiscard
from scheduler_plugins.vllm.scheduler import PrefixAwareScheduler

BLOCKS = 400
LAST = (eviction.QUARTERS - 1, eviction.QUARTERS)


@pytest.fixture(scope="module")
def theirs() -> float:
    return eviction.serve(Scheduler, conversations(1, 600), BLOCKS).rate(*LAST)


@pytest.mark.parametrize("remote_decode", [True, False])
def test_conversations_are_found_again_as_often_as_with_vllm(theirs, remote_decode: bool) -> None:
    requests = conversations(1, 600)
    ours = eviction.serve(PrefixAwareScheduler, requests, BLOCKS, remote_decode=remote_decode)
    assert ours.rate(*LAST) >= eviction.LAST_QUARTER * theirs


def test_without_ageing_they_would_not_be(theirs, monkeypatch: pytest.MonkeyPatch) -> None:
    made = SuffixDiscard.__init__

    def never_ages(self, *args) -> None:
        made(self, *args)
        self._bonus = 1 << 40

    def learns_nothing(self, missing) -> None:
        pass

    monkeypatch.setattr(SuffixDiscard, "__init__", never_ages)
    monkeypatch.setattr(SuffixDiscard, "_learn", learns_nothing)
    ours = eviction.serve(PrefixAwareScheduler, conversations(1, 600), BLOCKS)
    assert ours.rate(*LAST) < 0.8 * theirs


def test_suffixes_still_make_room_for_shared_profiles() -> None:
    posts = shared_profiles(1, posts=20, post_tokens=eviction.POST_TOKENS)
    room = eviction.PROFILES * 1400 // eviction.PAGE_SIZE
    ours, vllm = (
        eviction.serve(one, posts, room).rate() for one in (PrefixAwareScheduler, Scheduler)
    )
    assert ours > 1.02 * vllm


def test_the_command_prints_both_sides(tmp_path) -> None:
    trace = tmp_path / "trace.jsonl"
    lines = [
        f'{{"timestamp": {n}, "input_length": 1024, "output_length": 1, "hash_ids": [1, {n % 40}]}}'
        for n in range(80)
    ]
    trace.write_text("\n".join(lines))
    ended = CliRunner().invoke(bench.app, ["replay", str(trace), "--blocks", "300"])
    assert ended.exit_code == 0, ended.output
    assert "Hits of the prefix cache" in ended.output
