# SPDX-License-Identifier: Apache-2.0
"""`pd-router simulate` from trace to table, JSON and SVG; and `pd-router` itself."""

from __future__ import annotations

import json
import subprocess
import sys
import xml.etree.ElementTree as ET
from pathlib import Path
from urllib.request import urlopen

import pytest
from typer.main import get_command

from pd_connector import __version__
from scheduler_plugins.commands import Commands, app
from scheduler_plugins.commands import main as pd_router
from scheduler_plugins.cost.model import CostModel
from scheduler_plugins.cost.profile import save
from scheduler_plugins.router.__main__ import main as router
from scheduler_plugins.router.policies.registry import BOTH_SIDES, PREFILL
from scheduler_plugins.router.settings.config import RouterConfig
from scheduler_plugins.sim.report import spread


@pytest.fixture
def recorded(tmp_path: Path) -> Path:
    lines = [
        {
            "timestamp": n // 4 * 3000,
            "input_length": 1024 * (1 + n % 5),
            "output_length": 1 + n % 7,
            "hash_ids": [0, *(100 * (n % 9) + k for k in range(1, 2 * (1 + n % 5)))],
        }
        for n in range(60)
    ]
    path = tmp_path / "trace.jsonl"
    path.write_text("\n".join(map(json.dumps, lines)))
    return path


def simulate(*arguments: object) -> int:
    return pd_router(["simulate", *map(str, arguments)])


def test_all_policies_on_one_trace(recorded: Path, tmp_path: Path, capsys) -> None:
    out, picture = tmp_path / "out.json", tmp_path / "out.svg"
    assert simulate(recorded, "--compare", "all", "--json", out, "--svg", picture) == 0
    rows = json.loads(out.read_text())
    assert [row["policy"] for row in rows] == [*PREFILL, *BOTH_SIDES, "conductor+pull"]
    for row in rows:
        assert row["served"] + sum(row["rejected"].values()) == row["requests"] == 60
        assert 0 < row["ttft_s"]["p50"] <= row["ttft_s"]["p99"]
        assert 0 <= row["hit"] < 1
        assert set(row["utilisation"]) == {f"{side}{n}" for side in "pd" for n in range(4)}
    drawing = ET.parse(picture).getroot()
    lines = drawing.findall("{http://www.w3.org/2000/svg}polyline")
    assert len(lines) == 2 * len(rows)


def test_a_promise_is_counted_and_rejects(recorded: Path, capsys) -> None:
    arguments = (recorded, "--prefill", 1, "--decode", 1, "--speed", 20, "--json", "-")
    assert simulate(*arguments) == 0
    (free,) = json.loads(capsys.readouterr().out)
    assert simulate(*arguments, "--ttft-ms", 1000) == 0
    (promised,) = json.loads(capsys.readouterr().out)
    assert free["rejected"] == {}
    assert free["attained"] == 1.0, "nothing was promised"
    assert promised["rejected"]["ttft"] > 0
    assert promised["ttft_s"]["p99"] < free["ttft_s"]["p99"]


def test_a_measured_cost_model_steps_and_engines_that_do_both(
    recorded: Path, tmp_path: Path, capsys
) -> None:
    costs = tmp_path / "costs.json"
    save(costs, CostModel(a=1e-4, c=0.01, d0=0.02, chunk_tokens=256))
    options = ("--level", 2, "--prefill", 0, "--decode", 0, "--both", 2, "--kv-tokens", 20_000)
    assert simulate(recorded, *options, "--cost-model", costs, "--json", "-") == 0
    (row,) = json.loads(capsys.readouterr().out)
    assert row["moved_bytes"] == 0
    assert row["tpot_s"]["p50"] == pytest.approx(0.02)


def test_long_prompts_that_nobody_waits_for_go_to_cpu_engines(tmp_path: Path, capsys) -> None:
    lines = [
        {
            "timestamp": 3000 * n,
            "input_length": 50_000 if n % 2 else 1000,
            "output_length": 5,
            "hash_ids": [],
        }
        for n in range(40)
    ]
    path = tmp_path / "trace.jsonl"
    path.write_text("\n".join(map(json.dumps, lines)) + "\n\n")
    costs = tmp_path / "cpu.json"
    save(costs, CostModel(a=1e-3, c=0.1, d0=0.02))
    arguments = (path, "--prefill", 1, "--decode", 1, "--cpu-prefill", 2, "--cpu-cost-model", costs)

    def busy(*more: object) -> dict[str, float]:
        assert simulate(*arguments, "--json", "-", *more) == 0
        (row,) = json.loads(capsys.readouterr().out)
        assert row["served"] == 40
        return row["utilisation"]

    assert busy("--policy", "length", "--background", 0.5)["c0"] > 0
    assert busy("--policy", "length")["c0"] == 0, "somebody waits for all of them"
    assert busy("--background", 0.5)["c0"] == 0, "the conductor knows no such engines"


def test_a_pool_is_off_by_default_and_shared_by_all(recorded: Path, capsys) -> None:
    arguments = (recorded, "--cache-blocks", 4, "--json", "-", "--latency-s", 0)
    rows = []
    pool = ("--pool-blocks", 1000, "--pool-bytes-per-s", 1e10, "--pool-latency-s", 0)
    for more in ((), pool):
        assert simulate(*arguments, *more) == 0
        rows += json.loads(capsys.readouterr().out)
    assert rows[0]["pulled"] == 0
    assert rows[1]["pulled"] > 0
    assert rows[1]["hit"] > rows[0]["hit"]


def test_a_far_store_has_what_hosts_lose_when_they_die(recorded: Path, capsys) -> None:
    arguments = (recorded, "--cache-blocks", 4, "--json", "-", "--latency-s", 0)
    pools = ("--hosts", 2, "--pool-blocks", 1000, "--pool-latency-s", 0, "--host-deaths", 2)
    far = ("--far-blocks", 1000, "--far-bytes-per-s", 1e10, "--far-latency-s", 0)
    rows = []
    for more in (pools, (*pools, *far)):
        assert simulate(*arguments, *more) == 0
        rows += json.loads(capsys.readouterr().out)
    assert [row["served"] for row in rows] == [60, 60]
    assert rows[0]["far"] == 0
    assert rows[1]["far"] > 0
    assert rows[1]["hit"] > rows[0]["hit"]
    assert simulate(recorded, "--cache-blocks", 4, "--latency-s", 0, *pools, *far) == 0
    assert " far " in capsys.readouterr().out


def test_azures_form_is_read(tmp_path: Path, capsys) -> None:
    path = tmp_path / "azure.csv"
    rows = [f"2023-11-16 18:1{n}:03.9799600,{100 + n},{5 + n}" for n in range(5)]
    path.write_text("\n".join(["TIMESTAMP,ContextTokens,GeneratedTokens", *rows]))
    assert simulate(path, "--json", "-") == 0
    (row,) = json.loads(capsys.readouterr().out)
    assert row["served"] == 5
    assert row["duration_s"] == pytest.approx(240, abs=120)
    path.write_text("TIMESTAMP,ContextTokens\n2023-11-16 18:17:03,1")
    assert simulate(path) == 2
    assert "line 2" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--policy", "robin"), "policy 'robin' is not known"),
        (("--decode-policy", "robin"), "decode policy 'robin' is not known"),
        (("--level", "3"), "level 3: must be 1"),
        (("--decode", "0"), "decode 0: at least one"),
        (("--both", "1"), "give 0 for them"),
        (("--cpu-prefill", "1", "--prefill", "0"), "prefill 0: at least one"),
        (("--background", "2"), "background 2.0: must be between 0 and 1"),
        (("--pool-blocks", "-1"), "pool_blocks -1: must be 0 (no pool) or more"),
        (("--pool-bytes-per-s", "0"), "pool_bytes_per_s 0.0: must be above 0"),
        (("--pool-bytes-per-s", "inf"), "pool_bytes_per_s inf: must be above 0, and a number"),
        (("--bytes-per-s", "1e400"), "bytes_per_s inf: must be a rate"),
        (("--cost-model", "nowhere.json"), "not a cost model"),
    ],
)
def test_a_mistake_is_named(recorded: Path, options: tuple[str, str], said: str, capsys) -> None:
    assert simulate(recorded, *options) == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ("--prefill -1", "prefill -1"),
        ("--prefill 99999999999", "up to 10,000"),
        ("--decode -1", "decode -1"),
        ("--cache-blocks 0", "cache_blocks 0"),
        ("--speed 0", "speed 0.0"),
        ("--speed -1", "speed -1.0"),
        ("--speed nan", "speed nan"),
        ("--level 2 --kv-tokens -5", "kv_tokens -5.0"),
        ("--lag-s nan", "lag_s nan"),
        ("--bytes-per-s 0", "bytes_per_s 0.0"),
        ("--bytes-per-s -1", "bytes_per_s -1.0"),
        ("--latency-s -5", "latency_s -5.0"),
        ("--kv-bytes-per-token -1", "kv_bytes_per_token -1"),
        ("--pool-latency-s -1", "pool_latency_s -1.0"),
        ("--far-blocks -1", "far_blocks -1"),
        ("--far-blocks 5", "with hosts (--hosts)"),
        ("--hosts 2 --far-latency-s -1", "far_latency_s -1.0"),
        ("--hosts -1", "hosts -1"),
        ("--host-deaths 1", "needs hosts (--hosts)"),
        ("--limit 0", "limit 0"),
        ("--compare ,", "compare ','"),
        ("--json /nowhere/x.json", "no folder /nowhere"),
        ("--svg /", "is a folder"),
    ],
)
def test_what_makes_no_sense_is_refused_before_anything_is_simulated(
    recorded: Path, options: str, said: str, capsys
) -> None:
    """Many of these gave figures: negative times, hits of nothing."""
    assert simulate(recorded, *options.split()) == 2
    told = capsys.readouterr()
    assert said in told.err
    assert not told.out


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ("--port 99999", "port 99999"),
        ("--speed -1", "speed -1.0"),
        ("--block-tokens 0", "block_tokens 0"),
        ("--cache-blocks 0", "cache_blocks 0"),
        ("--kv-tokens 0", "kv_tokens 0.0"),
        ("--bytes-per-s 0", "bytes_per_s 0.0"),
        ("--order nope", "policy 'nope'"),
        ("--kv-events nowhere", "KV events at nowhere"),
        ("--kv-replay tcp://127.0.0.1:5558", "is set without kv_events"),
        ("--host=", "host '': must be an address"),
        ("--host x..y", "not started: cannot listen on x..y:0: "),
        ("--host 192.0.2.1", "this machine has no such address; name one of its own with --host"),
    ],
)
def test_a_mock_engine_that_makes_no_sense_does_not_start(options: str, said: str, capsys) -> None:
    assert pd_router(["mock", *options.split()]) == 2
    assert said in capsys.readouterr().err


def test_an_interrupt_ends_with_a_line_and_130(
    recorded: Path, monkeypatch: pytest.MonkeyPatch, capsys
) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("scheduler_plugins.sim.trace.load", interrupted)
    assert simulate(recorded) == 130
    monkeypatch.setattr("scheduler_plugins.router.__main__._settings", interrupted)
    assert pd_router(["serve"]) == 130
    assert router([]) == 130
    assert capsys.readouterr().err == "interrupted\n" * 3


def test_pd_router_names_its_commands(capsys) -> None:
    assert pd_router([]) == 0
    assert "simulate" in capsys.readouterr().out
    assert pd_router(["fly"]) == 2
    assert "command 'fly' is not known" in capsys.readouterr().err
    assert pd_router(["--policy", "jsq"]) == 2, "options alone are the router's"
    assert "--prefill" in capsys.readouterr().err
    assert pd_router(["--version"]) == 0
    assert capsys.readouterr().out == f"pd-connector {__version__}\n"


@pytest.mark.parametrize(
    ("typed", "said"),
    [
        ("sreve", "pd-router: command 'sreve' is not known; did you mean 'serve'?"),
        (
            "--prefil a:1",
            "pd-router serve: option '--prefil' is not known; did you mean '--prefill'?",
        ),
        ("serve --prefill a:1", "pd-router serve: decode: no URL given; name at least one engine"),
        ("serve --prefill --decode b:1", "pd-router serve: option --prefill needs a value"),
        ("serve --port x", "pd-router serve: Invalid value for '--port'"),
        ("serve --log-level LOUD", "pd-router serve: Invalid value for '--log-level'"),
        ("serve --kv-events x", "pd-router serve: kv_events 'x': must look like http://"),
        (
            "serve --kv-events http://u:PW@h:8100",
            "pd-router serve: kv_events 'http://u:***@h:8100': must look like http://",
        ),
        (
            "simulate --polcy x",
            "pd-router simulate: option '--polcy' is not known; did you mean '--policy'?",
        ),
        ("mock --sped 2", "pd-router mock: option '--sped' is not known; did you mean '--speed'?"),
    ],
)
def test_an_error_of_use_takes_two_lines_and_names_what_was_meant(
    typed: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert pd_router(typed.split()) == 2
    told = capsys.readouterr()
    assert told.out == ""
    first, second = told.err.splitlines()
    assert first.startswith(said)
    assert second == f"{said.partition(':')[0]} --help tells more"


def test_several_urls_follow_one_option_or_each_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    found = list[RouterConfig]()
    monkeypatch.setattr(
        "scheduler_plugins.router.__main__._run", lambda config, settings: found.append(config)
    )
    for typed in (
        "--prefill a:1 b:2 --workers 2 --decode c:3",
        "serve --prefill=a:1 --decode c:3 --prefill=b:2 --workers=2",
        "serve --prefill a:1 --prefill b:2 --workers 2 --decode c:3",
    ):
        assert pd_router(typed.split()) == 0
    assert found[0] == found[1] == found[2]
    assert found[0].prefill == ("http://a:1", "http://b:2")
    assert found[0].workers == 2


def test_the_routers_defaults_are_those_of_its_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    found = list[RouterConfig]()
    monkeypatch.setattr(
        "scheduler_plugins.router.__main__._run", lambda config, settings: found.append(config)
    )
    assert pd_router(["--prefill", "a:1", "--decode", "b:1"]) == 0
    assert found == [RouterConfig(prefill=("a:1",), decode=("b:1",))]


def test_the_help_of_pd_router_imports_no_command() -> None:
    program = (
        "import sys; from scheduler_plugins.commands import main; main(['--help']); "
        "print([name for name in sys.modules if name.startswith('scheduler_plugins.')], file=sys.stderr)"
    )
    ended = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert ended.stderr == "['scheduler_plugins.commands']\n"


def test_the_lines_of_the_help_are_those_of_the_commands() -> None:
    group = get_command(app)
    with group.make_context("pd-router", ["mock"]) as ctx:
        for name, line in Commands.lines.items():
            own = group.get_command(ctx, name).get_short_help_str(200)
            assert own.rstrip(".") == line.rstrip(".")


def test_a_mock_engine_says_where_it_is_and_ends_when_told() -> None:
    program = (
        "import sys; from scheduler_plugins.commands import main; sys.exit(main(sys.argv[1:]))"
    )
    command = [sys.executable, "-c", program, "mock", "--speed", "100"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as mock:
        try:
            assert mock.stdout is not None
            url = mock.stdout.readline().split()[-1]
            with urlopen(f"{url}/v1/models", timeout=30) as answer:
                assert json.load(answer)["data"][0]["id"] == "mock"
        finally:
            mock.terminate()
        assert mock.wait(30) == 0


def test_percentiles_are_values_that_were_there() -> None:
    found = spread(range(1, 101))
    assert found == {"mean": 50.5, "p50": 50, "p90": 90, "p95": 95, "p99": 99}
    assert set(spread([]).values()) == {0.0}


def test_the_goodput_of_one_request_is_that_of_its_time(recorded: Path, capsys) -> None:
    assert simulate(recorded, "--limit", 1, "--json", "-") == 0
    (found,) = json.loads(capsys.readouterr().out)
    assert found["goodput_per_s"] == pytest.approx(1 / found["duration_s"])


def test_roles_are_compared_on_traces_one_after_another(
    recorded: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out.json"
    given = (recorded, recorded, "--per-s", "2,8", "--level", "2", "--json", out)
    assert simulate(*given, "--roles", "pressure,arrow,fixed") == 0
    rows = json.loads(out.read_text())
    assert [row["policy"] for row in rows] == [
        "pressure, least_delay",
        "arrow, arrow",
        "fixed, least_delay",
    ]
    assert all(row["requests"] == row["served"] == 120 for row in rows)
    assert rows[2]["moves"] == []
    assert "level 1" not in capsys.readouterr().out


def test_level_1_is_said_to_mislead_about_roles(
    recorded: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert simulate(recorded, "--roles", "fixed") == 0
    assert "Use --level 2" in capsys.readouterr().out


def test_every_trace_needs_its_rate(recorded: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert simulate(recorded, recorded, "--per-s", "2") == 2
    assert "a rate for each of 2 traces" in capsys.readouterr().err
