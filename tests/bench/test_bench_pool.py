# SPDX-License-Identifier: Apache-2.0
"""`pd-connector bench pool`: what is got is looked at, and the report says what was not compared."""

from __future__ import annotations

import importlib.util
import json
import shutil
from pathlib import Path

import pytest
from support.redis_servers import MISSING
from typer.testing import CliRunner

from pd_bench import harness
from pd_bench.model import HEAD_DIM, KV_HEADS, LAYERS, write_model, write_weights
from pd_bench.pool import far as far_store
from pd_bench.pool import trace as hit_rates
from pd_bench.pool.raw import RawPair
from pd_bench.pool.raw_party import OBJECT_BYTES, Objects
from pd_bench.report import BenchError
from pd_bench.serve.hosts import need_store
from pd_connector.tools.cli import bench as command


def bench(*arguments: str) -> tuple[int, str]:
    done = CliRunner().invoke(command.app, ["pool", *arguments], env={"COLUMNS": "200"})
    return done.exit_code, done.output


def test_the_help_says_what_is_measured() -> None:
    code, said = bench("--help")
    assert code == 0
    for option in ("--raw", "--lookup", "--engines", "--stores", "--peer-env"):
        assert option in said


def test_a_disk_folder_in_which_nothing_can_be_made_is_named(tmp_path: Path) -> None:
    code, said = bench("--disk", str(tmp_path / "nothing"))
    assert code == 2
    assert f"{tmp_path / 'nothing'}: No such file or directory: name a folder" in said


def test_without_mooncake_the_store_is_measured_beside_files_and_a_copy(tmp_path: Path) -> None:
    figures = tmp_path / "figures.json"
    missing = str(tmp_path / "nothing")
    code, said = bench(
        "--raw", "--objects", "2", "--runs", "1", "--peer-env", missing, "--json", str(figures)
    )
    assert code == 0, said
    assert "NOT COMPARED: Mooncake is not in" in said
    install = " ".join(said.split()).partition("pip install ")[2].partition("`")[0]
    assert install.endswith(" numpy"), "the whole command is between the marks"
    assert {row["name"] for row in json.loads(figures.read_text())} == {"raw put", "raw get"}


def test_an_unknown_row_of_the_far_store_is_named() -> None:
    code, said = bench("--far", "cpu,speed")
    assert code == 2
    assert "--far speed: must be all, or some of cpu, bytes, once, silent" in " ".join(said.split())


def test_rows_that_play_a_trace_are_measured_only_if_they_are_named() -> None:
    assert far_store.chosen("all", ["link"]) == ["cpu", "bytes", "once", "silent", "link"]
    for row in ("hits", "hits-mooncake"):
        code, said = bench("--far", row)
        assert code == 2
        assert f"--far {row}: needs --trace FILE" in " ".join(said.split())


@pytest.mark.parametrize(("kind", "lacks"), [("redis", "redis-server"), ("mooncake", "mooncake")])
def test_what_a_store_needs_is_named(
    monkeypatch: pytest.MonkeyPatch, kind: str, lacks: str
) -> None:
    found = importlib.util.find_spec
    monkeypatch.setattr(shutil, "which", lambda program: None)
    monkeypatch.setattr(
        importlib.util,
        "find_spec",
        lambda name: None if name == "mooncake" else found("json" if name == "redis" else name),
    )
    with pytest.raises(BenchError, match=f"{lacks}.*install"):
        need_store(kind)


def test_bytes_on_the_wire_are_those_of_chunks(tmp_path: Path) -> None:
    pytest.importorskip("redis", reason=MISSING)
    if not shutil.which("redis-server"):
        pytest.skip(MISSING)
    figures = tmp_path / "figures.json"
    code, said = bench("--far", "bytes", "--json", str(figures))
    assert code == 0, said
    rows = json.loads(figures.read_text())
    ratios = {
        row["params"]["at rest"]: row["ratio"]
        for row in rows
        if row["params"].get("statistic", "median") == "median"
    }
    assert 1.0 <= ratios["raw"] <= 1.02
    assert 0.5 <= ratios["int8"] <= 0.54


def test_an_environment_without_the_other_stores_is_told(tmp_path: Path) -> None:
    code, said = bench("--stores", str(tmp_path))
    assert code == 2
    assert "has lmcache not at all, wanted" in said
    assert "docs/benchmarks/README.md#bench-pool" in said


def test_an_object_with_one_wrong_byte_is_found() -> None:
    objects = Objects(2)
    objects.fill(7)
    objects.check(7)
    with pytest.raises(ValueError, match="object 0 of run 8"):
        objects.check(8)
    objects.view[OBJECT_BYTES + 12_345] ^= 1
    with pytest.raises(ValueError, match="object 1 of run 7"):
        objects.check(7)


def test_a_process_that_cannot_store_ends_the_benchmark(tmp_path: Path) -> None:
    settings = {"folder": str(tmp_path / "nothing")}
    pair = RawPair("files", 1, [settings] * 2).open()
    try:
        with pytest.raises(BenchError, match="files: FileNotFoundError"):
            pair.run(0)
    finally:
        pair.close()


def test_look_ups_and_starts_are_held_to_their_limits(tmp_path: Path) -> None:
    figures = tmp_path / "figures.json"
    code, said = bench("--lookup", "--chunks", "50", "--runs", "1", "--json", str(figures))
    assert code in (0, 1), said
    judged = [row for row in json.loads(figures.read_text()) if row["bar"] is not None]
    assert [row["name"] for row in judged] == ["look-up", "look-up", "store ready"]


def test_a_disk_is_read_beside_raw_reads_and_left_empty(tmp_path: Path) -> None:
    figures = tmp_path / "figures.json"
    arguments = ["--objects", "2", "--runs", "1", "--warm-ups", "0", "--json", str(figures)]
    code, said = bench("--disk", str(tmp_path), *arguments)
    assert code in (0, 1), said
    assert {row["name"] for row in json.loads(figures.read_text())} == {"disk get"}
    assert list(tmp_path.iterdir()) == [figures]


def test_a_traces_hit_rate_is_held_to_that_of_an_exact_lru(tmp_path: Path) -> None:
    prompts = [[user, *range(100 * user, 100 * user + 9)] for user in (1, 1, 2, 2, 3, 3)]
    trace, figures = tmp_path / "trace.jsonl", tmp_path / "figures.json"
    trace.write_text("".join(json.dumps({"hash_ids": ids}) + "\n" for ids in prompts))
    assert hit_rates.exact(prompts, 30) == 50.0
    assert hit_rates.exact(prompts, 3) == 15.0
    code, said = bench("--trace", str(trace), "--json", str(figures))
    assert code in (0, 1), said
    rows = [row for row in json.loads(figures.read_text()) if row["bar"] is not None]
    assert [row["params"]["room"] for row in rows] == ["10%", "20%", "30%"]
    trace.write_text("{}")
    assert bench("--trace", str(trace))[0] == 2


def test_the_weights_are_the_same_in_each_folder(tmp_path: Path) -> None:
    files = []
    for name in ("a", "b"):
        write_weights(write_model(tmp_path / name))
        files.append(tmp_path / name / "model.safetensors")
    assert files[0].read_bytes() == files[1].read_bytes()
    safetensors = pytest.importorskip("safetensors")
    with safetensors.safe_open(files[0], "pt") as weights:
        key = weights.get_slice(f"model.layers.{LAYERS - 1}.self_attn.k_proj.weight")
        assert key.get_shape()[0] == KV_HEADS * HEAD_DIM


def test_without_vllm_nothing_is_measured_that_takes_minutes_first(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(harness.importlib.util, "find_spec", lambda name: None)
    code, said = bench("--runs", "1")
    assert code == 2
    assert said.startswith("not measured: vllm is not installed")
