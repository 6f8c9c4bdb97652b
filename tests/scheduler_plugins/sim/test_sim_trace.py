# SPDX-License-Identifier: Apache-2.0
"""Recorded workloads are read as they are, and played at any speed."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from pd_bench.scheduler.app import app
from pd_bench.scheduler.workload import shared_profiles
from scheduler_plugins.sim import trace
from scheduler_plugins.sim.trace import TraceError, at_rate, jittered, load, read

LINE = '{"timestamp": %d, "input_length": %d, "output_length": 5, "hash_ids": [%s]}\n'


def write(path: Path, count: int = 4) -> Path:
    """Pairs of requests that come at the same time; each has a block of its own after one of all."""
    lines = (LINE % (n // 2 * 3000, 1000 + n, f"0, {n + 1}") for n in range(count))
    path.write_text("".join(lines))
    return path


def test_a_line_is_a_request(tmp_path: Path) -> None:
    first, *_, last = read(write(tmp_path / "t.jsonl"))
    assert (last.tokens, last.max_tokens, last.arrival_s) == (1003, 5, 3.0)
    assert list(last.block_hashes) == [0], "the second block is not full"
    assert first.arrival_s == 0.0
    assert len(read(tmp_path / "t.jsonl", limit=2)) == 2


def test_coarse_times_are_spread_and_scaled(tmp_path: Path) -> None:
    requests = read(write(tmp_path / "t.jsonl", 400))
    played = at_rate(requests, per_s=10.0, seed=1)
    assert played[-1].arrival_s == pytest.approx(40.0)
    assert len({one.arrival_s for one in played}) > 390
    assert {one.id for one in played} == {one.id for one in requests}
    assert at_rate(requests, 10.0, 1)[7].arrival_s == played[7].arrival_s


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "is empty"),
        (LINE % (0, 1, "") + "{}\n", "line 2: .*timestamp"),
        ("no trace\n", "line 1: "),
        ('{"a":' * 100_000, "line 1: "),
        (LINE % (0, 1, "") + LINE % (0, -1, ""), "line 2: .*>= 0"),
        (LINE % (0, 1, "") + LINE % (0, 10**15, ""), "line 2: .*<= 100000000"),
    ],
)
def test_what_is_no_trace_is_refused_by_line(tmp_path: Path, text: str, said: str) -> None:
    path = tmp_path / "t.jsonl"
    path.write_text(text)
    with pytest.raises(TraceError, match=said):
        read(path)
    with pytest.raises(TraceError, match="cannot be read"):
        read(tmp_path / "missing")


AZURE = "TIMESTAMP,ContextTokens,GeneratedTokens\n"


@pytest.mark.parametrize(
    ("lines", "said"),
    [
        ("2026-01-01 00:00:00,5,1e3", "line 2: ValueError"),
        (f"2026-01-01 00:00:00,{10**400},1", "line 2: .*more than 100,000,000 tokens"),
        (f"2026-01-01 00:00:00,1,{'1' * 200_000}", "line .*field larger than field limit"),
    ],
)
def test_what_is_no_trace_of_azure_is_refused_by_line(
    tmp_path: Path, lines: str, said: str
) -> None:
    (path := tmp_path / "t.csv").write_text(AZURE + lines)
    with pytest.raises(TraceError, match=said):
        load(path)


@pytest.mark.parametrize("name", ["t.csv", "t.jsonl"])
def test_a_file_that_never_ends_is_not_read_to_its_end(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / name
    path.write_bytes(
        b"\0" * (2 << 20)
    )  # as /dev/zero, which would fill the memory without the limit
    with pytest.raises(
        TraceError, match=r"line 1: begins with b?'.x00.*longer than 1,048,576 bytes"
    ):
        load(path)
    head, line = (AZURE, "2026-01-01 00:00:00,5,1\n") if "csv" in name else ("", LINE % (0, 1, ""))
    path.write_text(head + line * 100)
    assert len(load(path)) == 100
    monkeypatch.setattr(trace, "MOST_BYTES", 1000)
    assert len(load(path, limit=5)) == 5, "what is asked for is read"
    with pytest.raises(TraceError, match="at most 1,000 bytes are read; give a part of it"):
        load(path)


def test_the_command_replays_a_trace(tmp_path: Path) -> None:
    ran = CliRunner().invoke(app, ["replay", str(write(tmp_path / "t.jsonl", 60))])
    assert ran.exit_code == 0, ran.output
    assert "fcfs" in ran.output
    ran = CliRunner().invoke(app, ["replay", str(tmp_path / "missing")])
    assert ran.exit_code == 2


def test_binned_times_are_spread_over_their_bins() -> None:
    some = shared_profiles(1, users=3, posts=10)
    binned = [replace(one, arrival_s=n // 10 * 3.0) for n, one in enumerate(some)]
    moved = jittered(binned, 1)
    assert len({one.arrival_s for one in moved[:20]}) == 20
    for one in moved:
        first = next(other.arrival_s for other in binned if other.id == one.id)
        assert first <= one.arrival_s <= first + 3.0
