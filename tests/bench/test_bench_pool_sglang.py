# SPDX-License-Identifier: Apache-2.0
"""`bench pool --sglang` and `--cross` with engines that only pretend: what is asked, compared and said."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from pd_bench.pool import cross, sglang
from pd_bench.report import BenchError

QUICK, SLOW = 0.1, 0.5


class Pretended(sglang.SglangPool):
    """Engines that answer at once. The reader loads what was written, unless it is `lazy`."""

    def __init__(self, folder: Path, rows: list[sglang.Row], *, lazy: bool = False) -> None:
        super().__init__(folder, folder, folder, folder, rows)
        self.stored: list[list[int]] = []
        self.hits, self.lazy = 0, lazy

    def chunks(self) -> int:
        return sum(len(prompt) // 128 for prompt in self.stored)

    def loaded(self) -> float:
        return self.hits


@pytest.fixture
def python(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PD_CONNECTOR_SGLANG_PYTHON", "python")


def measured(
    monkeypatch: pytest.MonkeyPatch, engines: Pretended, rows: list[sglang.Row]
) -> dict[str, Any]:
    def first_token(client: Any, body: dict[str, Any]) -> tuple[float, str]:
        prompt = body["prompt"]
        if client is engines.writer.client:
            engines.stored.append(prompt)
        loads = client is engines.reader.client and prompt in engines.stored and not engines.lazy
        if loads:
            engines.hits += len(prompt) // 128
            with engines.lookups.open("a") as file:
                file.write("20000 15\n9000000 0\n")
        return QUICK if loads else SLOW, "ab"

    monkeypatch.setattr(sglang, "first_token", first_token)
    seconds = iter(range(1, 1000))
    monkeypatch.setattr(sglang, "cpu_seconds", lambda pids: float(next(seconds)))
    said: list[str] = []
    tables = sglang.measure(engines, rows, 2, 1, said.append)
    return {row.name: row for _, table in tables for row in table}


def test_each_row_compares_its_two_sides(
    python: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    rows = list(sglang.Row)
    found = measured(monkeypatch, Pretended(tmp_path, rows), rows)
    assert found["SGLang, first token, stored"].ratio == pytest.approx(QUICK / SLOW)
    assert found["SGLang, first token, no hits"].ratio == 1.0
    assert found["SGLang, look-up, CPU, p99"].ours.median == 0.02, "those that name chunks"
    assert found["SGLang, CPU while all is saved"].ratio == 1.0
    assert found["SGLang, first token, stored / cached"].ratio == pytest.approx(QUICK / SLOW)
    assert len(found) == len(rows) + 1


def test_the_engine_that_saves_nothing_computes_its_prompts(
    python: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    rows = [sglang.Row.CPU]
    engines = Pretended(tmp_path, rows)
    measured(monkeypatch, engines, rows)
    assert engines.stored
    assert not engines.hits, "it loaded what the other one had saved"


def test_one_row_starts_only_its_engines(python: None, tmp_path: Path) -> None:
    engines = Pretended(tmp_path, [sglang.Row.LOOKUP])
    assert engines.all == (engines.writer, engines.reader)


def test_a_reader_that_computes_ends_the_benchmark(
    python: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    rows = [sglang.Row.STORED]
    with pytest.raises(BenchError, match="loaded 0 of 15 chunks"):
        measured(monkeypatch, Pretended(tmp_path, rows, lazy=True), rows)


@pytest.mark.parametrize("lost", [False, True])
def test_a_lost_answer_is_counted(
    python: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, lost: bool
) -> None:
    trace = tmp_path / "trace.jsonl"
    line = {"timestamp": 0, "input_length": 3200, "output_length": 64, "hash_ids": list(range(7))}
    trace.write_text("".join(json.dumps(line | {"timestamp": n}) + "\n" for n in range(4)))
    monkeypatch.setattr(cross, "PER_S", 1000.0)
    monkeypatch.setattr(cross, "wait_all", lambda engines: None)
    monkeypatch.setattr(cross.time, "sleep", lambda seconds: None)
    host = cross.CrossHost(tmp_path, tmp_path)
    killed: list[str] = []

    def post(path: str, body: dict[str, Any], timeout_s: float) -> dict[str, Any]:
        if lost and "kv_transfer_params" not in body and len(killed) == 2:
            raise OSError("gone")
        return {"choices": [{"text": body["prompt"][:3], "finish_reason": "length"}]}

    for engine in (*host.engines, host.router):
        metrics = SimpleNamespace(total=lambda name: 1.0)
        engine.client = SimpleNamespace(  # type: ignore[assignment]
            post=post,
            metrics=lambda metrics=metrics: metrics,
            get=lambda path, timeout_s: '{"engines": [{"state": "up"}]}',
        )
        engine.kill = lambda engine=engine: killed.append(engine.name)  # type: ignore[method-assign]
        engine.start = lambda: None  # type: ignore[method-assign,assignment,return-value]
    monkeypatch.setattr(host, "wait_for_pool", lambda starts: None)
    said: list[str] = []
    ([right], notes) = cross.measure(host, trace, 4, said.append)
    assert killed == ["vllm", "sglang"]
    assert right.ok != lost
    assert ("gone" in " ".join(notes)) == lost
