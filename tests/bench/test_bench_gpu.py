# SPDX-License-Identifier: Apache-2.0
"""`bench handoff --gpu`, tried out in host memory: everything but the GPU's own calls.

What a GPU would do is done by the kernels' references, and NIXL moves DRAM.
"""

from __future__ import annotations

import importlib.util
import json
import os

import pytest
import torch
from typer.testing import CliRunner

from pd_bench import harness
from pd_bench.gpu import bench as gpu_module
from pd_bench.gpu.bench import CODECS, GpuBench, GpuPair
from pd_bench.gpu.cache import GpuCache
from pd_bench.kernels.caches import LLAMA_8B, MODELS, Model
from pd_bench.machine import cpu_seconds
from pd_bench.report import BenchError, Comparison, missed
from pd_bench.wire.movers import descriptors
from pd_bench.wire.pair import WireRun
from pd_connector.tools.cli import bench as command
from pd_connector.tools.launch import proc
from pd_connector.tools.wire import PAGE_TOKENS

TINY = Model("tiny", 3, 2, 32, 16)
LATENT = Model("tiny latent", 2, 1, 48, 0)
CPU = torch.device("cpu")
needs_nixl = pytest.mark.skipif(
    not all(importlib.util.find_spec(name) for name in ("nixl", "triton")),
    reason="needs NIXL and Triton",
)


EITHER_DEVICE = pytest.mark.parametrize(
    "device",
    [
        "cpu",
        pytest.param(
            "cuda:0",
            marks=[
                pytest.mark.gpu,
                pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
            ],
        ),
    ],
)


def settings(model: Model, tokens: int, codec: str, slots: int = 2) -> dict:
    slab = {"slots": slots, "slot_bytes": 20_480}
    return {"model": model._asdict(), "tokens": tokens, "codec": codec, **slab}


def filled_consumer(tokens: int) -> GpuCache:
    """A consumer's cache as it is after a transfer that went well."""
    producer, consumer = (GpuCache(role, TINY, tokens, CPU) for role in ("producer", "consumer"))
    for theirs, mine in zip(producer.layers, consumer.layers, strict=True):
        mine[consumer.pages] = theirs[producer.pages]
    return consumer


def test_the_geometries_are_those_that_are_asked_for():
    assert [(model.layers, model.heads, model.key_dim) for model in MODELS] == [
        (32, 8, 128),
        (80, 1, 128),
        (61, 1, 576),
    ]
    assert LLAMA_8B.bytes_of(1, 2) == 128 * 1024


def test_a_descriptor_is_one_page_of_one_layer_on_its_device():
    cache = GpuCache("consumer", TINY, 40, CPU)
    page = TINY.heads * PAGE_TOKENS * (32 + 16) * 2
    found = descriptors([1000, 500_000], cache.page_count, cache.page_bytes, device=1)
    assert found[:, 0].tolist() == [base + n * page for base in (1000, 500_000) for n in range(3)]
    assert {tuple(row) for row in found[:, 1:].tolist()} == {(page, 1)}
    tables = GpuCache("consumer", TINY, 200, CPU).tables
    assert sorted(tables["producer"]) == sorted(tables["consumer"]) == list(range(13))
    assert tables["producer"] != tables["consumer"]


@pytest.mark.parametrize("lossy", [False, True])
def test_what_has_arrived_is_looked_at_token_by_token(lossy: bool):
    cache = filled_consumer(40)
    assert cache.check(lossy) == ""
    last = cache.layers[1][cache.pages[2]]
    last[:, 8:] = 9.0
    assert cache.check(lossy) == "", "what lies behind the prompt is nobody's"
    last[:, 7:] = 9.0
    assert "layer 1" in cache.check(lossy)
    cache.wipe()
    assert "layer 0" in cache.check(lossy)


@needs_nixl
@EITHER_DEVICE
def test_kv_moves_either_way_and_is_right(device: str):
    """Through fewer slots than chunks, twice, with a last page that is partly filled."""
    with GpuPair((device, device)) as pair:
        for model, codec in [(TINY, "raw"), (LATENT, "int8"), (TINY, "fp8_e4m3")]:
            pages = 13 * model.layers
            pair.open("pages", settings(model, 200, codec))
            assert pair.run(lossy=False).descriptors == pages
            pair.close()
            pair.open("collated", settings(model, 200, codec))
            for _ in range(2):
                run = pair.run(lossy=codec != "raw")
                assert run.descriptors < pages
                assert codec != "raw" or run.descriptors > 2
            pair.close()
        assert cpu_seconds(pair.pids) > 0
        pids = pair.pids
    assert [proc.read(pid) for pid in pids] == [None, None]


@needs_nixl
@EITHER_DEVICE
def test_agents_move_kv_between_slots_of_either_kind(device: str):
    """`slot_memory: device` ends the start where slots cannot lie there."""
    with GpuPair((device, device)) as pair:
        for model, memory in [(TINY, "device"), (LATENT, "device"), (TINY, "host")]:
            config = {"transports": ["nixl"], "slot_mib": 1, "slot_memory": memory}
            given = {"model": model._asdict(), "tokens": 200, "config": config}
            pair.open("agent", given)
            for _ in range(2):
                assert pair.run(lossy=False).descriptors > 0
            pair.close()


@needs_nixl
def test_a_chunk_that_is_damaged_on_its_way_is_no_figure(tmp_path, monkeypatch):
    """A byte of a slot changes after it was summed."""
    (tmp_path / "sitecustomize.py").write_text(
        "import sys\n"
        "if 'producer' in ' '.join(sys.orig_argv):\n"
        "    import pd_bench.gpu.movers as movers\n"
        "    write = movers.Collated._write\n"
        "    def damaged(self, queued):\n"
        "        self._slab[self._place(queued.number) + 5] ^= 1\n"
        "        return write(self, queued)\n"
        "    movers.Collated._write = damaged\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    with GpuPair(("cpu", "cpu")) as pair:
        pair.open("collated", settings(TINY, 64, "raw"))
        with pytest.raises(BenchError, match=r"chunk \d is corrupt"):
            pair.run(lossy=False)


class FakePair:
    """Takes as many milliseconds as it is told to, by codec; `pages` for the baseline."""

    def __init__(self, times: dict[str, float]) -> None:
        self.times = times
        self.opened: list[str] = []

    def __enter__(self) -> FakePair:
        return self

    def __exit__(self, *error: object) -> None:
        pass

    def open(self, way: str, settings: dict) -> None:
        self.now = way if way == "pages" else settings["codec"]
        self.opened.append(self.now)

    def run(self, lossy: bool) -> WireRun:
        assert lossy == (self.now in ("fp8_e4m3", "int8"))
        return WireRun(self.times[self.now] / 1e3, 0.0, 15_008 if self.now == "pages" else 17)

    def close(self) -> None:
        pass


def measured(device: str, tokens: int, **times: float) -> tuple[list[str], list[Comparison]]:
    plan = GpuBench((device, device), ("raw", "int8"), (tokens,), runs=2, warm_ups=1)
    pair, said = FakePair(times), []
    found = plan._measure(pair, LLAMA_8B, tokens, said.append)
    assert len(said) == 4 * 3
    return pair.opened, found


def test_the_baseline_runs_first_and_last_and_ours_must_be_two_and_a_half_times_faster():
    opened, good = measured("cuda:0", 7_500, pages=20.0, raw=8.0, int8=19.0)
    assert opened == ["pages", "raw", "int8", "pages"]
    assert missed(good) == []
    assert [(one.name, one.params["codec"], one.bar) for one in good] == [
        ("handoff", "raw", 0.4),
        ("rate", "raw", None),
        ("descriptors", "raw", None),
        ("handoff", "int8", None),
        ("rate", "int8", None),
        ("descriptors", "int8", None),
    ]
    rate = good[1]
    kv_bytes = 7_500 * 128 * 1024  # in bfloat16, whatever the codec
    assert (rate.ours.median, rate.unit) == (pytest.approx(kv_bytes / 8e-3 / 1e9), "GB/s")
    assert rate.ratio == pytest.approx(20 / 8)
    _, bad = measured("cuda:0", 7_500, pages=20.0, raw=8.1, int8=1.0)
    assert [one.params["codec"] for one in missed(bad)] == ["raw"]


def test_other_lengths_and_host_memory_have_no_bar():
    for device, tokens in (("cuda:0", 512), ("cpu", 7_500)):
        _, found = measured(device, tokens, pages=1.0, raw=9.0, int8=9.0)
        assert missed(found) == []


def invoke(*arguments: str):
    return CliRunner().invoke(command.app, ["handoff", "--gpu", *arguments])


@needs_nixl
@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_nothing_is_measured_and_the_command_says_so():
    result = invoke()
    assert result.exit_code == 2
    assert "no GPU 'cuda:0'" in " ".join(result.output.split())


@pytest.mark.parametrize("missing", ["nixl", "triton"])
def test_without_nixl_or_triton_nothing_is_measured_and_the_command_says_so(monkeypatch, missing):
    monkeypatch.setattr(
        harness.importlib.util, "find_spec", lambda name: None if name == missing else name
    )
    result = invoke("--device", "cpu")
    assert result.exit_code == 2
    assert f"{missing} is not installed" in result.output


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--ours", "shm"], "int8"),
        (["--local"], "--local"),
        (["--device", "tpu"], "cuda:1"),
        (["--device", "cpu", "--device", "cuda"], "of one kind"),
    ],
)
def test_what_cannot_be_measured_is_refused(arguments: list[str], named: str):
    result = invoke(*arguments)
    assert result.exit_code == 2
    assert named in result.output


def test_a_device_is_only_for_a_gpu():
    result = CliRunner().invoke(command.app, ["handoff", "--device", "cpu"])
    assert result.exit_code == 2
    assert "--gpu" in result.output


@needs_nixl
def test_the_command_measures_all_models_and_lengths_and_writes_rows(monkeypatch, tmp_path):
    times = {"pages": 20.0, "raw": 4.0, "fp8_e4m3": 3.0, "int8": 3.5}
    devices: list[tuple[str, str]] = []

    def pair(given: tuple[str, str]) -> FakePair:
        devices.append(given)
        return FakePair(times)

    monkeypatch.setattr(gpu_module, "GpuPair", pair)
    file = tmp_path / "figures.json"
    result = invoke("--device", "cpu", "--runs", "2", "--warm-ups", "0", "--json", str(file))
    assert result.exit_code == 0, result.output
    assert devices == [("cpu", "cpu")]
    assert "say nothing of a GPU" in result.output
    rows = [row for row in json.loads(file.read_text()) if row["name"] == "handoff"]
    keys = {(row["params"]["model"], row["params"]["tokens"]) for row in rows}
    assert keys == {(model.name, n) for model in MODELS for n in (512, 7_500, 32_000)}
    assert {row["params"]["codec"] for row in rows} == set(CODECS)
    assert {row["ratio"] for row in rows if row["params"]["codec"] == "raw"} == {0.2}
