# SPDX-License-Identifier: Apache-2.0
"""`bench chaos`, its short form: real agents in real processes, a few faults of each kind."""

from __future__ import annotations

import json
import socket

import pytest
from typer.testing import CliRunner

from pd_connector.tools.bench.chaos import bench as bench_module
from pd_connector.tools.bench.chaos import report
from pd_connector.tools.bench.chaos.bench import control, skipped
from pd_connector.tools.bench.chaos.campaign import Campaign, Limits
from pd_connector.tools.bench.chaos.connections import reset_connections, silence_connections
from pd_connector.tools.bench.chaos.faults import CHUNK_FAULTS, Fault
from pd_connector.tools.bench.chaos.ledger import Ledger
from pd_connector.tools.bench.chaos.nursery import Nursery
from pd_connector.tools.bench.chaos.ranks import SETUPS, Ranks
from pd_connector.tools.bench.flow import BenchError
from pd_connector.tools.cli import bench as command

QUICK = (*CHUNK_FAULTS, Fault.LIE_MESSAGE, Fault.RESET, Fault.CLOCK)
"""Faults that cost a fraction of a second each."""
SLOW = (Fault.HALF_OPEN, Fault.STOP, Fault.DESCRIPTORS, Fault.KILL)


@pytest.fixture(scope="module")
def nursery():
    with Nursery() as nursery:
        yield nursery


def test_no_promise_is_broken_whatever_is_done_over_shared_memory(nursery) -> None:
    with Ranks(SETUPS["shm"], 7, nursery) as ranks:
        for fault in QUICK:
            if skipped("shm", fault):
                continue
            found = Campaign(ranks, fault, seed=7).run(Limits(faults=6, seconds=5.0))
            assert found.good, found
            assert found.injected, found
            assert found.ok, found


def test_no_promise_is_broken_between_four_ranks_over_tcp_that_hang_or_die(nursery) -> None:
    with Ranks(SETUPS["tcp TP 2"], 3, nursery) as ranks:
        for fault in (*QUICK, *SLOW):
            found = Campaign(ranks, fault, seed=3).run(Limits(faults=1, seconds=5.0))
            assert found.good, found
            assert found.injected, found


def test_a_consumer_that_compares_no_checksum_is_caught(nursery) -> None:
    found = control(5, nursery)
    assert found.wrong > 0
    assert not found.good


def test_a_bench_that_finds_nothing_wrong_without_checksums_says_that_it_is_blind(
    monkeypatch, nursery
) -> None:
    def believe(self, limits):
        return Ledger("corrupt", "tcp", injected=20, ok=20)

    monkeypatch.setattr(bench_module.Campaign, "run", believe)
    with pytest.raises(BenchError, match="blind"):
        control(5, nursery)


def test_the_command_prints_writes_and_ends_with_what_it_found(monkeypatch, tmp_path) -> None:
    found = [Ledger("drop", "tcp", injected=3, ok=2), Ledger("corrupt", "tcp", injected=3, wrong=1)]
    monkeypatch.setattr(bench_module.ChaosBench, "run", lambda self, say: iter(found))
    rows, page = tmp_path / "rows.json", tmp_path / "table.md"
    arguments = ["chaos", "--json", str(rows), "--markdown", str(page)]
    result = CliRunner().invoke(command.app, arguments)
    assert result.exit_code == 1, result.output
    assert [row["wrong"] for row in json.loads(rows.read_text())] == [0, 1]
    assert page.read_text() == report.markdown(found)
    found.pop()
    assert CliRunner().invoke(command.app, ["chaos"]).exit_code == 0
    assert CliRunner().invoke(command.app, ["chaos", "--fault", "rain"]).exit_code == 2


def test_pairs_share_the_faults_of_a_cell_and_are_one_row() -> None:
    class Bench(bench_module.ChaosBench):
        def _pair(self, setup, fault, number, faults, nursery):
            found = Ledger(fault, setup.name, injected=faults, ok=2, growth=(number, 0, -number))
            found.recomputed["stalled"] = number
            found.slowest_s, found.held, found.note = number / 10, 1, "held: {}"
            return found

    bench = Bench(["tcp"], [Fault.DROP], Limits(10), seed=1, pairs=4)
    found = bench._cell(SETUPS["tcp"], Fault.DROP, Nursery())
    assert (found.injected, found.ok, found.held, found.slowest_s) == (10, 8, 4, 0.3)
    assert found.recomputed == {"stalled": 6}
    assert found.growth == (3, 0, 0)
    assert found.note == "held: {}"


def test_links_are_cut_over_tcp_only() -> None:
    assert "tcp only" in skipped("shm", Fault.PARTITION)


@pytest.fixture
def connected():
    """Both ends of a TCP connection of this process."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        ours = socket.create_connection(server.getsockname())
        theirs, _ = server.accept()
        with ours, theirs:
            yield ours, theirs


def test_a_reset_is_seen_by_both_ends(connected) -> None:
    ours, theirs = connected
    assert reset_connections() >= 1
    for end in (ours, theirs):
        end.settimeout(5.0)
        with pytest.raises(OSError, match=r"reset|not connected|Broken pipe"):
            end.recv(1) or end.sendall(b"x")


def test_a_silenced_connection_stands_and_hears_nothing(connected) -> None:
    ours, theirs = connected
    assert silence_connections() >= 2
    theirs.sendall(b"not heard")
    ours.settimeout(0.3)
    with pytest.raises(TimeoutError):
        ours.recv(1)
