# SPDX-License-Identifier: Apache-2.0
"""One API server with several data-parallel ranks: the load of all of them counts."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

from admission_fakes import Bench, metric

from scheduler_plugins.admission.board import BoardWriter, boards_of


def busy(bench: Bench, *waiting_s: float) -> None:
    for board, seconds in zip(bench.boards, waiting_s, strict=True):
        board.write(waiting_s=seconds)


def test_a_busy_first_rank_does_not_turn_away_what_another_has_room_for(tmp_path: Path) -> None:
    bench = Bench(tmp_path, ranks=2)
    busy(bench, 4.0, 0.0)
    assert bench.premium(300).status == 200
    busy(bench, 4.0, 4.0)
    assert bench.premium(300).status == 429


def test_an_idle_first_rank_does_not_let_everything_in(tmp_path: Path) -> None:
    """Requests go to the rank that has fewest, so what was let in counts for that rank."""
    bench = Bench(tmp_path, ranks=2)
    busy(bench, 0.0, 4.0)
    bench.gate.done = lambda ticket: None  # none of them is answered meanwhile
    answers = [bench.premium(300).status for _ in range(8)]
    assert answers == [200] * 3 + [429] * 5, "0.3 s each, and 1 s is promised"


def test_two_idle_ranks_take_twice_as_much_as_one(tmp_path: Path) -> None:
    let_in = {}
    for ranks in (1, 2):
        bench = Bench(tmp_path, ranks=ranks)
        busy(bench, *[0.0] * ranks)
        bench.gate.done = lambda ticket: None
        count = 0
        while bench.premium(300).status != 429:
            count += 1
        let_in[ranks] = count
    assert let_in[2] == 2 * let_in[1]


def test_a_rank_that_the_client_chose_is_the_one_that_counts(tmp_path: Path) -> None:
    bench = Bench(tmp_path, ranks=2)
    busy(bench, 0.0, 4.0)
    body = {"prompt": list(range(300)), "max_tokens": 1}
    headers = [("x-customer-tier", "premium"), ("X-data-parallel-rank", "1")]
    assert bench.post(body, headers=headers).status == 429
    headers[1] = ("X-data-parallel-rank", "0")
    assert bench.post(body, headers=headers).status == 200
    headers[1] = ("X-data-parallel-rank", "9" * 5000)
    assert bench.post(body, headers=headers).status == 200, "vLLM says what is wrong with it"


def test_a_rank_whose_load_is_not_known_is_left_out(tmp_path: Path) -> None:
    bench = Bench(tmp_path, ranks=2)
    bench.boards[1].write(waiting_s=4.0)
    assert bench.premium(300).status == 429
    bench.boards[1].post = None
    assert bench.premium(300).status == 200


def test_metrics_add_the_ranks_up(tmp_path: Path) -> None:
    bench = Bench(tmp_path, ranks=2)
    busy(bench, 1.0, 2.0)
    bench.gate.show()
    assert metric("waiting", qos="premium") == 12
    assert metric("waiting_work_seconds", qos="premium") == 3.0


def config(**parallel: object) -> SimpleNamespace:
    usual = {
        "data_parallel_index": 0,
        "data_parallel_size": 1,
        "data_parallel_size_local": 1,
        "data_parallel_external_lb": False,
        "data_parallel_hybrid_lb": False,
    }
    return SimpleNamespace(
        instance_id="i", parallel_config=SimpleNamespace(**{**usual, **parallel})
    )


def test_the_boards_of_an_api_server_are_those_of_its_ranks(tmp_path: Path, monkeypatch) -> None:
    from scheduler_plugins.admission import board

    monkeypatch.setattr(board, "default_folder", lambda: tmp_path / "boards")
    writers = [BoardWriter(f"i_dp{n}" if n else "i", n) for n in range(4)]
    ranks = {
        "internal": config(data_parallel_size=4, data_parallel_size_local=4),
        "external": config(
            data_parallel_size=4, data_parallel_index=2, data_parallel_external_lb=True
        ),
        "hybrid": config(
            data_parallel_size=4,
            data_parallel_size_local=2,
            data_parallel_index=2,
            data_parallel_hybrid_lb=True,
        ),
    }
    found = {name: [one._rank for one in boards_of(made)] for name, made in ranks.items()}
    assert found == {"internal": [0, 1, 2, 3], "external": [2], "hybrid": [2, 3]}
    for writer in writers:
        writer.close()
