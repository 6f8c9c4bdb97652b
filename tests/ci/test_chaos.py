# SPDX-License-Identifier: Apache-2.0
"""`ci/chaos`, its short form: real agents in real processes, a few faults of each kind."""

from __future__ import annotations

import json
import socket
from collections import Counter

import pytest
from typer.testing import CliRunner

from chaos import bench as bench_module
from chaos import report
from chaos.__main__ import app
from chaos.bench import CONTROLS, control, skipped
from chaos.blind import PATH
from chaos.campaign import Campaign, Limits
from chaos.connections import reset_connections, silence_connections
from chaos.faults import CHUNK_FAULTS, RECORD_FAULTS, Fault
from chaos.known import STATE_LAYERS, KnownPages
from chaos.ledger import Ledger
from chaos.nursery import Nursery
from chaos.ranks import SETUPS, Ranks, Setup
from pd_bench.netns import Bed, available
from pd_bench.report import BenchError
from pd_connector.kv.geometry import Shard

QUICK = (*CHUNK_FAULTS, Fault.TAKE_BACK, Fault.LIE_MESSAGE, Fault.RESET, Fault.CLOCK)
"""Faults that cost a fraction of a second each."""
SLOW = (Fault.HALF_OPEN, Fault.STOP, Fault.DESCRIPTORS, Fault.KILL)


@pytest.fixture(scope="module")
def nursery():
    with Nursery() as nursery:
        yield nursery


def found_with(ranks: Ranks, fault: Fault, seed: int, faults: int) -> Ledger:
    """With these faults, or those of some seconds; with one at least, however slow the machine is."""
    found = Campaign(ranks, fault, seed=seed).run(Limits(faults=faults, seconds=5.0))
    if found.good and not found.injected:
        found = Campaign(ranks, fault, seed=seed).run(Limits(faults=1, seconds=120.0))
    assert found.good, found
    assert found.injected, found
    return found


def test_no_promise_is_broken_whatever_is_done_over_shared_memory(nursery) -> None:
    with Ranks(SETUPS["shm"], 7, nursery) as ranks:
        for fault in QUICK:
            if skipped("shm", fault):
                continue
            found = found_with(ranks, fault, 7, faults=3)
            assert found.ok, found


def test_no_promise_is_broken_between_four_ranks_over_tcp_that_hang_or_die(nursery) -> None:
    with Ranks(SETUPS["tcp TP 2"], 3, nursery) as ranks:
        for fault in (*QUICK, *SLOW):
            if fault is Fault.CORRUPT:  # on the wire, below
                continue
            found_with(ranks, fault, 3, faults=1)


@pytest.mark.parametrize(
    ("name", "faults"),
    [
        ("shm states", [Fault.DROP, Fault.TAKE_BACK]),
        ("tcp states TP 2 to 1 key", [Fault.TAKE_BACK, Fault.KILL]),
    ],
)
def test_states_arrive_whole_or_not_at_all(nursery, name, faults) -> None:
    with Ranks(SETUPS[name], 5, nursery) as ranks:
        for fault in faults:
            found_with(ranks, fault, 5, faults=1)


def test_states_of_another_page_or_of_half_a_page_are_seen() -> None:
    """The control: what `Engine` compares."""
    producer = KnownPages(Shard(0, STATE_LAYERS.stop, 0, 1), filled=True, states=True)
    layer = producer.cache._layers.states[STATE_LAYERS.start]
    assert producer.states_are([3], [3])
    assert not producer.states_are([3], [4])
    assert not producer.states_untouched([3])
    layer.sections[1][3, 0].zero_()
    assert not producer.states_are([3], [3])


@pytest.mark.parametrize("name", ["tcp key", "tcp int8"])
def test_no_promise_is_broken_whatever_a_network_does_to_records(nursery, name) -> None:
    with Ranks(SETUPS[name], 4, nursery, wired=True) as ranks:
        for fault in (Fault.CORRUPT, *RECORD_FAULTS):
            found_with(ranks, fault, 4, faults=2)


@pytest.mark.parametrize(("name", "fault", "guard"), CONTROLS)
def test_without_its_guard_wrong_pages_are_found(nursery, name, fault, guard) -> None:
    found = control(5, nursery, name, fault, guard)
    assert found.wrong > 0
    assert not found.good


def test_a_bench_that_finds_nothing_wrong_without_guards_says_that_it_is_blind(
    monkeypatch, nursery
) -> None:
    def believe(self, limits):
        return Ledger("corrupt", "tcp", injected=20, ok=20)

    monkeypatch.setattr(bench_module.Campaign, "run", believe)
    with pytest.raises(BenchError, match="finds no faults"):
        control(5, nursery, *CONTROLS[0])


DEFAULTS = Setup("defaults", {}, keyed=True, settings={})
OVER_TCP = DEFAULTS._replace(config={"transports": ["tcp"]})
"""What two machines take by default. Two processes on one machine take shared memory before it."""


def paths_of(ranks: Ranks) -> Counter[str]:
    """The ways of the chunks of a few transfers without any fault."""
    assert Campaign(ranks, Fault.DROP, seed=1).run(Limits(faults=0)).good
    return sum((Counter(one.call("paths")) for one in ranks.all), Counter())


@pytest.mark.parametrize("keyed", [True, False])
def test_the_path_of_a_default_pair_is_the_path_that_is_wrapped(nursery, keyed) -> None:
    with Ranks(OVER_TCP._replace(keyed=keyed), 1, nursery) as ranks:
        found = paths_of(ranks)
    assert found["sealed"] > found["written"], found
    assert found["opened"] > found["landed"], found


def test_a_wrapper_that_does_not_hand_on_what_prepares_writes_is_noticed(nursery) -> None:
    with Ranks(OVER_TCP, 1, nursery, blind_to=PATH) as ranks:
        found = paths_of(ranks)
    assert not found["sealed"], found
    assert not found["opened"], found


def test_on_one_machine_a_default_pair_reads_pages_where_they_lie(nursery) -> None:
    with Ranks(DEFAULTS, 1, nursery) as ranks:
        assert set(paths_of(ranks)) == {"pulled"}


@pytest.mark.netns
@pytest.mark.skipif(bool(available()), reason="needs network namespaces")
def test_between_two_machines_a_default_pair_takes_the_path_that_is_wrapped(nursery) -> None:
    with Bed() as bed, Ranks(DEFAULTS, 1, nursery, namespaces=bed.namespaces) as ranks:
        found = paths_of(ranks)
    assert found["sealed"] > found["written"], found
    assert found["opened"] > found["landed"], found


def test_the_command_prints_writes_and_ends_with_what_it_found(monkeypatch, tmp_path) -> None:
    found = [Ledger("drop", "tcp", injected=3, ok=2), Ledger("corrupt", "tcp", injected=3, wrong=1)]
    monkeypatch.setattr(bench_module.ChaosBench, "run", lambda self, say: iter(found))
    rows, page = tmp_path / "rows.json", tmp_path / "table.md"
    arguments = ["--json", str(rows), "--markdown", str(page)]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 1, result.output
    assert [row["wrong"] for row in json.loads(rows.read_text())] == [0, 1]
    assert page.read_text() == f"{report.coverage(found)}\n{report.markdown(found)}"
    found.pop()
    assert CliRunner().invoke(app).exit_code == 0
    assert CliRunner().invoke(app, ["--fault", "rain"]).exit_code == 2


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


def test_links_and_records_are_cut_over_tcp_only() -> None:
    assert "tcp only" in skipped("shm", Fault.PARTITION)
    assert "only tcp" in skipped("shm", Fault.CUT_RECORD)
    assert not skipped("tcp int8", Fault.CUT_RECORD)


def test_what_was_covered_is_told_by_kind_transport_and_path() -> None:
    ledgers = [
        Ledger("drop", "tcp", injected=1200, paths=Counter(sealed=3, written=1, opened=4)),
        Ledger("drop", "shm", injected=7, paths=Counter(pulled=5)),
        Ledger("cut record", "tcp", injected=2, paths=Counter(sealed=6, opened=6)),
    ]
    assert report.coverage(ledgers).splitlines() == [
        "| fault | tcp | shm |",
        "|---|---|---|",
        "| chunks | sealed 90%, written 10%; opened 100% | pulled 100% |",
        "| drop | 1,200 | 7 |",
        "| cut record | 2 |  |",
    ]


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
