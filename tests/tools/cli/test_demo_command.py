# SPDX-License-Identifier: Apache-2.0
"""What `pd-connector demo` says and how it exits. With real engines: tests/engines/test_demo.py."""

import math
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from pd_connector.errors import PDConnectorError
from pd_connector.tools import command_line
from pd_connector.tools.cli import asker, demo
from pd_connector.tools.cli.app import app
from pd_connector.tools.cli.asker import DemoError, PromptResult, StreamedAnswer
from pd_connector.tools.launch import Samples

ROW = PromptResult(3000, 0.7, 0.04, 12_320_768, 3, 0.0)


@pytest.fixture
def run(monkeypatch, tmp_path):
    """Run the command with these rows, or this exception, in place of engines."""

    def run(outcome):
        def pretend(*args):
            if isinstance(outcome, BaseException):
                raise outcome
            return outcome

        monkeypatch.setattr(demo, "_run", pretend)
        monkeypatch.setattr(demo, "TOLERANCE", 0.0)
        monkeypatch.setattr(demo, "log_folder", lambda: tmp_path / "logs")
        (tmp_path / "logs").mkdir()
        return CliRunner().invoke(app, ["demo"], env={"COLUMNS": "120"})

    return run


def test_equal_logprobs_exit_with_0_and_leave_no_logs(run, tmp_path):
    result = run([ROW])
    assert result.exit_code == 0
    for figure in ("3,000", "700 ms", "40.0 ms", "12,320,768", "bit for bit"):
        assert figure in result.stdout
    assert not (tmp_path / "logs").exists()


def test_the_last_line_says_how_to_do_it_on_two_gpu_hosts(run):
    last = run([ROW]).stdout.splitlines()[-1]
    assert "two GPU hosts" in last
    for word in ("kv_producer", "kv_consumer", "scheduler_plugins.router", "PD_CONNECTOR_KEY"):
        assert word in last


@pytest.mark.parametrize("difference", [1e-6, math.inf, math.nan])
def test_a_differing_logprob_exits_with_1_and_names_the_prompt(run, tmp_path, difference):
    result = run([ROW, ROW._replace(prompt_tokens=1000, difference=difference)])
    assert result.exit_code == 1
    assert "[1000]" in result.output
    assert (tmp_path / "logs").exists()


def test_kv_that_never_came_exits_with_1_and_says_so(run):
    result = run(DemoError("the decode engine received no KV"))
    assert result.exit_code == 1
    assert "received no KV" in result.output


def test_a_demo_that_starts_nothing_leaves_no_logs(run, tmp_path):
    result = run(PDConnectorError("no SGLang"))
    assert result.exit_code == 1
    assert "logs" not in result.output
    assert not (tmp_path / "logs").exists()


def test_an_interrupt_is_told_once(monkeypatch, capsys):
    def interrupted(*args):
        raise KeyboardInterrupt

    monkeypatch.setattr(demo, "_run", interrupted)
    assert command_line.run(app, "pd-connector", ["demo"]) == command_line.INTERRUPTED
    assert capsys.readouterr().err.count("interrupted") == 1


def test_an_interrupt_exits_with_130(run, tmp_path):
    result = run(KeyboardInterrupt())
    assert result.exit_code == 130
    assert not (tmp_path / "logs").exists()


def test_other_tokens_are_infinitely_far_apart():
    reply = StreamedAnswer(("token_id:1",), (-0.5,), 5, 0.1)
    assert asker.difference(reply, reply._replace(tokens=("token_id:2",))) == math.inf
    assert asker.difference(reply, reply._replace(logprobs=(-0.75,))) == 0.25


def test_failures_are_named_with_their_causes():
    grown = Samples.parse(
        'pd_connector:failed_transfers_total{engine="0",cause="checksum"} 1\n'
        'pd_connector:failed_transfers_created{engine="0",cause="checksum"} 1e9\n'
        'pd_connector:lost_sessions_total{engine="0",cause="timeout"} 0\n'
    )
    assert asker.failures(grown) == "failed_transfers_total['checksum']"


def test_the_shipped_models_folder_is_printed_and_nothing_starts():
    result = CliRunner().invoke(app, ["demo", "--print-model"])
    assert result.exit_code == 0
    assert (Path(result.output.strip()) / "config.json").is_file()


@pytest.mark.parametrize("model", ["nope", "./nope", "some/model", "~nobody", "x" * 300])
def test_a_model_that_is_not_on_this_machine_is_refused_before_an_engine_starts(model, monkeypatch):
    if model in ("nope", "./nope", "some/model"):  # may be a name: only its client can tell
        pytest.importorskip("huggingface_hub")
    _refuses(model, monkeypatch)


@pytest.mark.parametrize("model", ["/nope", "../nope", "a/b/c", "~nobody", "x" * 300])
def test_without_hugging_faces_client_a_folder_that_is_not_there_is_refused(model, monkeypatch):
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    _refuses(model, monkeypatch)


@pytest.mark.parametrize("model", ["nope", "some/model-1.5"])
def test_without_hugging_faces_client_the_engine_finds_a_model_by_its_name(model, monkeypatch):
    """SGLang's environment may have the client where this one does not."""
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    assert demo._has_config(Path(model)) == Path(model)


def _refuses(model, monkeypatch):
    monkeypatch.setattr(demo, "_run", lambda *args: pytest.fail("engines were started"))
    result = CliRunner().invoke(app, ["demo", "--model", model], env={"COLUMNS": "500"})
    assert result.exit_code == 2
    assert "name the folder of a model" in result.output


def test_a_folder_without_a_model_is_named_before_an_engine_starts(tmp_path):
    result = CliRunner().invoke(app, ["demo", "--model", str(tmp_path)], env={"COLUMNS": "300"})
    assert result.exit_code == 2
    assert f"{tmp_path}: has no config.json" in result.output
    (tmp_path / "config.json").write_text("{}")
    file = str(tmp_path / "config.json")
    result = CliRunner().invoke(app, ["demo", "--model", file], env={"COLUMNS": "300"})
    assert result.exit_code == 2
