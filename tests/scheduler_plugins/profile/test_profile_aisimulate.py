# SPDX-License-Identifier: Apache-2.0
"""A profile from AISimulate's predictions, with a package in its place that predicts what a known cost model says."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from pd_connector.tools.cli.app import main
from scheduler_plugins.cost.engine_profile import EngineProfile
from scheduler_plugins.planner.inventory import load
from scheduler_plugins.profile.aisimulate import PINNED
from scheduler_plugins.sim.fleet import read

CONFIG = {
    "_name_or_path": "meta-llama/Llama-3.1-8B", "hidden_size": 4096, "num_hidden_layers": 32,
    "num_attention_heads": 32, "num_key_value_heads": 8, "intermediate_size": 14336, "vocab_size": 128256,
    "torch_dtype": "bfloat16",
}  # fmt: skip
PREDICTS = """
class ForwardPassPerfModelConfig:
    def __init__(self, **given):
        assert (given["model"], given["tp"]) == ("meta-llama/Llama-3.1-8B", 2), given
        if given["system"] == "l4":
            raise ValueError("no data for l4")

class RustForwardPassPerfModel:
    @classmethod
    def best_available(cls, config):
        return cls()

    def estimate_forward_pass_time_ms(self, metrics):
        step = metrics["scheduled_requests"]
        tokens, cached = step["sum_prefill_tokens"], step["sum_prefill_kv_tokens"]
        batch, context = step["num_decode_requests"], step["sum_decode_kv_tokens"]
        fixed = 9.0 if tokens and batch else 6.0
        return fixed + tokens * 0.02 + (tokens * tokens + 2 * tokens * cached) * 5e-7 + batch * 0.02 + context * 5e-5
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A model's config, and the package in the place of AISimulate."""
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    there = tmp_path / "there"
    (there / "aisimulate_core").mkdir(parents=True)
    (there / "aisimulate_core/__init__.py").touch()
    (there / "aisimulate_core/sdk.py").write_text(PREDICTS)
    about = there / "aisimulate-1.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: aisimulate\nVersion: 1\n")
    monkeypatch.setenv("PYTHONPATH", str(there))
    return tmp_path


def ask(folder: Path, source: str = "aisimulate", *more: str) -> int:
    given = ["--from", source, "--model", str(folder), "--out", str(folder / "tp2.json"), *more]
    return main(["profile", *given])


def test_it_is_fitted_to_what_is_predicted_and_called_estimated(folder: Path, capsys) -> None:
    source = f"aisimulate={sys.executable}"
    assert ask(folder, source, "--device", "H100", "--gpus", "2", "--chunk-tokens", "1024") == 0
    assert "estimated" in capsys.readouterr().out
    found, _ = read(folder / "tp2.json", EngineProfile)
    assert found.source == "estimated"
    assert (found.gpus, found.layers, found.costs.chunk_tokens) == (2, 32, 1024)
    assert found.kv_tokens > 500_000
    assert found.start_s > 0
    costs = found.costs
    assert costs.mixed is not None
    for value, wanted in (
        (costs.a, 2e-5), (costs.b, 5e-10), (costs.c, 6e-3), (costs.d0, 6e-3), (costs.d1, 2e-5), (costs.d2, 5e-8),
        (costs.mixed.m0, 9e-3), (costs.mixed.m1, 2e-5), (costs.mixed.m2, 5e-8),
    ):  # fmt: skip
        assert value == pytest.approx(wanted, rel=1e-5)
    (folder / "inventory.yaml").write_text(
        "nodes: [{name: n, device: mine, gpus: 4}]\ndevices: {mine: {profiles: [tp2.json]}}"
    )
    stock = load(folder / "inventory.yaml", None)
    assert stock.kinds["mine-tp2"].source == "estimated", "a plan calls it so, too"


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (("--device", "H10"), "AISimulate has no data of it; known are A100"),
        ((), "--from needs --model"),
        (("--device", "L4", "--gpus", "2"), "cannot predict meta-llama/Llama-3.1-8B on l4: ValueError: no data"),
        (("--device", "H100", "--url", "http://127.0.0.1:1"), "one of both"),
    ],
)  # fmt: skip
def test_what_is_missing_is_named(folder: Path, more: tuple[str, ...], said: str, capsys) -> None:
    assert ask(folder, "aisimulate", *more) == 2
    assert said in " ".join(capsys.readouterr().err.split())
    assert not (folder / "tp2.json").exists()


def test_a_python_without_it_is_told_what_to_install(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys
) -> None:
    monkeypatch.delenv("PYTHONPATH")
    if ask(folder, "aisimulate", "--device", "H100", "--gpus", "2"):
        said = " ".join(capsys.readouterr().err.split())
        assert f"pip install aisimulate=={PINNED}" in said
    assert ask(folder, "other", "--device", "H100") == 2
    assert "must be aisimulate" in capsys.readouterr().err
    assert ask(folder, "aisimulate=/nowhere/python", "--device", "H100") == 2
    assert "/nowhere/python: cannot be run" in capsys.readouterr().err


def test_a_package_that_prints_something_of_its_own_is_named(folder: Path, capsys) -> None:
    (folder / "there/aisimulate_core/__init__.py").write_text("print('hello')")
    assert ask(folder, "aisimulate", "--device", "H100", "--gpus", "2") == 2
    assert "printed something else than its times" in " ".join(capsys.readouterr().err.split())
