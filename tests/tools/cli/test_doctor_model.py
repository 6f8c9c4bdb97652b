# SPDX-License-Identifier: Apache-2.0
"""`pd-connector doctor MODEL`, docs/models.md, and what the two are made of."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from pd_connector.tools.cli import doctor
from pd_connector.tools.cli.app import app
from pd_connector.tools.cli.checks import model
from pd_connector.tools.cli.checks.facts import Facts
from pd_connector.tools.cli.checks.finding import Finding, Status
from pd_connector.tools.models import MODELS, Standing, find, markdown

DOCS = Path(__file__).parents[3] / "docs"


def findings(folder: Path, *architectures: str) -> dict[str, Finding]:
    config = folder / "config.json"
    config.write_text(json.dumps({"architectures": architectures}))
    return {finding.name: finding for finding in model.check(str(folder))}


def test_the_page_has_the_table() -> None:
    """`python -m pd_connector.tools.models` prints it."""
    assert markdown() in (DOCS / "models.md").read_text()


def test_each_architecture_has_one_row_and_each_refusal_a_reason_and_a_remedy() -> None:
    named = [architecture for row in MODELS for architecture in row.architectures]
    assert len(named) == len(set(named))
    for row in MODELS:
        for support in (row.vllm, row.sglang):
            if support.standing is Standing.REFUSED:
                assert support.why, row.names
                assert support.remedy, row.names


def test_architectures_are_spelt_as_vllm_spells_them() -> None:
    registry = pytest.importorskip("vllm.model_executor.models.registry")
    known = set(registry.ModelRegistry.get_supported_archs())
    named = {architecture for row in MODELS for architecture in row.architectures}
    assert named <= known


def test_a_model_that_hands_over_is_good_with_one_engine_only(tmp_path: Path) -> None:
    found = findings(tmp_path, "FalconH1ForCausalLM")
    assert [found[name].status for name in found] == [Status.OK, Status.WARN, Status.WARN]
    assert not found["vLLM"].found.startswith("does not")
    assert (
        found["SGLang"].found
        == "does not hand over. states of linear attention, or in layers that also have attention"
    )
    assert found["SGLang"].advice


def test_a_model_that_hands_over_nowhere_fails(tmp_path: Path) -> None:
    assert (
        findings(tmp_path, "WhisperForConditionalGeneration")["architecture"].status is Status.FAIL
    )


def test_an_unknown_architecture_is_no_failure(tmp_path: Path) -> None:
    (found,) = findings(tmp_path, "SomebodysForCausalLM").values()
    assert found.status is Status.WARN
    assert "not in the table" in found.found
    assert find(["SomebodysForCausalLM"]) is None


@pytest.mark.parametrize(
    "content",
    [
        "{}",
        "[]",
        "no JSON",
        '{"architectures": 3}',
        '{"architectures": "Llama"}',
        '{"architectures": []}',
    ],
)
def test_a_file_that_is_no_config_says_what_to_give(tmp_path: Path, content: str) -> None:
    (tmp_path / "config.json").write_text(content)
    (found,) = model.check(str(tmp_path))
    assert found.status is Status.FAIL
    assert "config.json" in found.advice
    (found,) = model.check(str(tmp_path / "nowhere"))
    assert "no such folder" in found.found


def test_the_command_begins_with_the_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor.probe, "look", Facts)
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["Lfm2ForCausalLM"]}))
    result = CliRunner().invoke(app, ["doctor", str(tmp_path), "--json"])
    first, *_ = json.loads(result.stdout)
    assert first["area"] == f"model {tmp_path}"
    assert "short convolutions" in first["found"]
