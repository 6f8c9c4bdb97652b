# SPDX-License-Identifier: Apache-2.0
"""`python -m pd_bench.kernels host`: both sides launch once a call, or are not measured."""

import importlib.util

import pytest

from pd_bench.kernels import host_layers
from pd_bench.kernels.host_layers import LAUNCHES, measure_layers, seconds


@pytest.fixture(autouse=True)
def _short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_layers, "ROUNDS", 2)
    monkeypatch.setattr(host_layers, "CALLS", 3)


def test_each_side_is_called_as_often_as_the_other() -> None:
    calls: list[str] = []
    sides = [[lambda name=name: (calls.append(name), LAUNCHES())] for name in ("ours", "theirs")]
    taken = seconds(*sides)
    assert len(taken) == 2
    assert calls.count("ours") == calls.count("theirs") == 2 + 2 * 3


@pytest.mark.parametrize("times", [0, 2])
def test_a_call_that_does_not_launch_once_is_no_layer(times: int) -> None:
    with pytest.raises(RuntimeError, match=f"launches {times} times instead of once"):
        seconds([lambda: [LAUNCHES() for _ in range(times)]])


@pytest.mark.skipif(
    importlib.util.find_spec("flashinfer") is not None, reason="FlashInfer is installed here"
)
def test_what_is_not_installed_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """An engine that is missing has no rows; without FlashInfer there is nothing to compare with."""
    monkeypatch.setattr(host_layers, "BATCHES", (1,))
    monkeypatch.setattr(host_layers.importlib.util, "find_spec", lambda _: None)
    monkeypatch.setattr(host_layers, "plan_of", lambda _: None)
    (row,) = measure_layers()
    assert not row.ok
    assert "No module named 'flashinfer'" in str(row.params["failed"])
    assert "vLLM: not measured, vllm is not installed here" in capsys.readouterr().out
