# SPDX-License-Identifier: Apache-2.0
"""`pd-router plan` from a trace to a folder of files; and what it refuses."""

from __future__ import annotations

import json
import re
import secrets
import shlex
import subprocess
from pathlib import Path

import pytest
from support.plan_cases import CONFIG, TWO_NODES, inputs, written

from pd_connector.tools.cli.app import main as check
from scheduler_plugins.commands import main as pd_router
from scheduler_plugins.planner.command import _generated, _served
from scheduler_plugins.planner.mix import mix_of
from scheduler_plugins.router.policies.base import Role
from scheduler_plugins.router.settings.settings_file import parse
from scheduler_plugins.sim import fleet, trace

PROMISE = ("--ttft-ms", "300", "--tpot-ms", "50")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return inputs(tmp_path)


def plan(folder: Path, *more: object) -> int:
    given = ("--model", folder / "config.json", "--requests", "240", *more)
    return pd_router(["plan", *map(str, given)])


def test_a_plan_writes_a_folder_and_every_row_says_how_to_get_its_figure(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys
) -> None:
    out = folder / "out"
    given = (folder / "trace.csv", "--inventory", folder / "inventory.yaml", *PROMISE)
    assert plan(folder, *given, "--out", out) == 0
    told = capsys.readouterr().out
    assert "recommended: " in told
    assert "estimated" in told
    page = (out / "plan.md").read_text()
    assert "**The engines' costs are estimated.**" in page
    assert "not measured" in page
    assert "rate +20%" in page
    rows = re.findall(r"^- ([a-z0-9, ]+): ([0-9.]+)\n\n +(pd-router simulate .+)$", page, re.M)
    assert {"planner", "colocated", "splitwise", "hexgen2"} <= {name for name, _, _ in rows}
    monkeypatch.chdir(out)
    for _, part, command in rows:
        assert pd_router([*shlex.split(command)[1:], "--json", "-"]) == 0
        (found,) = json.loads(capsys.readouterr().out)
        in_time = found["attained"] * found["served"] / found["requests"]
        assert in_time == pytest.approx(float(part), abs=6e-4), "the same figure"
        assert in_time >= 0.9


@pytest.mark.parametrize("both", [False, True])
def test_the_files_start_what_was_planned(
    folder: Path, both: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PD_CONNECTOR_KEY", secrets.token_urlsafe(32))
    roles = (Role.WHOLE, Role.WHOLE) if both else (Role.PREFILL, Role.DECODE)
    out = written(folder, mix_of({("H100-tp1", roles[0]): 2, ("A100-tp1", roles[1]): 2}))
    planned = fleet.load(out / "fleet.yaml")
    lines, used = list[list[str]](), list[tuple[str, str]]()
    for script in sorted(out.glob("start-*.sh")):
        text = script.read_text()
        assert subprocess.run(["sh", "-n", script], check=False).returncode == 0
        assert ("PD_CONNECTOR_KEY:?" in text) is not both, "a key is a reference, never a value"
        for line in text.splitlines():
            if "vllm serve" in line:
                gpus, *words = shlex.split(line)
                lines.append(words)
                used += [(script.name, gpu) for gpu in gpus.partition("=")[2].split(",")]
    assert all(words[:3] == ["vllm", "serve", "it's $(x)"] for words in lines), "quoted"
    assert len(lines) == sum(one.number for one in planned.parts)
    assert len(set(used)) == len(used), "no GPU is given twice"
    router = parse((out / "router.yaml").read_bytes(), {}, "router.yaml")
    sides = (len(router.prefill), len(router.decode), len(router.engine))
    engines = planned.number(Role.PREFILL), planned.number(Role.DECODE)
    assert sides == ((0, 0, engines[1]) if both else (*engines, 0))
    assert (out / "values.yaml").exists() is not both
    configs = [words[words.index("--kv-transfer-config") + 1] for words in lines if not both]
    assert all(check(["check", one]) == 0 for one in configs)


def test_a_plan_of_two_lengths_brings_its_trace(folder: Path, capsys) -> None:
    out = folder / "out"
    given = (
        "--device",
        "H100",
        "--gpus",
        "2",
        "--prompt-tokens",
        "2000",
        "--answer-tokens",
        "60",
        *PROMISE,
    )
    assert plan(folder, *given, "--out", out) == 0
    assert len((out / "trace-2000-60.csv").read_text().splitlines()) == 3001
    assert (out / "start-node.sh").exists()
    assert "PD_CONNECTOR_KEY" not in (out / "start-node.sh").read_text()
    if "engines that do both" in (out / "plan.md").read_text().split("not written")[-1]:
        assert not (out / "values.yaml").exists()


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ("", "inventory: none is given"),
        ("--device H100 --inventory x", "both are given; give one"),
        (
            "--device H10",
            "device 'H10': has no profile and no data sheet here; did you mean 'H100'?",
        ),
        ("--device H100 --gpus 0", "no GPU may be used"),
        ("--device L4 --gpus 0", "no GPU may be used"),
        ("--device H100 --ttft-ms 0", "ttft_ms 0.0: must be"),
        ("--device H100 --tpot-ms nan", "tpot_ms nan: must be"),
        ("--device H100 --tpot-ms 1e300", "tpot_ms 1e+300: must be"),
        ("--device H100 --gpus -1", "gpus -1: must be from 1 to 512"),
        ("--device H100 --gpus 1000000000", "gpus 1000000000: must be from 1 to 512"),
        ("--device H100 --requests -5", "requests -5: must be 40 or more"),
        ("--device H100 --requests 10000000000", "and at most 1,000,000"),
        (
            "--device H100 --ttft-ms 3600000 --requests 40",
            "a window lasts less than 5 promised first tokens",
        ),
        ("--device H100 --per-s -1", "per_s -1.0"),
        ("--device H100 --order nope", "policy 'nope'"),
        ("--device H100 --policy nope", "policy 'nope'"),
        ("--device H100 --prompt-tokens 5", "trace and lengths: both are given"),
        ("--device H100 --model /nowhere", "cannot be read"),
        ("--inventory /nowhere", "cannot be read"),
    ],
)
def test_a_mistake_is_named_and_nothing_is_written(
    folder: Path, options: str, said: str, capsys
) -> None:
    given = (folder / "trace.csv", *PROMISE, *options.split())
    assert plan(folder, *given, "--out", folder / "out") == 2
    told = capsys.readouterr()
    assert said in told.err
    assert not told.out
    assert not (folder / "out").exists()


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (("device: H100", "device: H10"), "inventory.yaml:3: device 'H10': has no profile and no data sheet here"),
        (("gpus: 2, nic_gbit_per_s: 100}\n  - {name: b", "gpus: 2}\n  - {name: b"), "nic_gbit_per_s: node 'a' has none"),
        (("name: a", "name: b"), "name 'b': two nodes have it"),
        (("name: a", "name: $(reboot)"), "name '$(reboot)': must be letters"),
        (("name: a", "name: a'b"), 'name \'a\'b\': must be letters'),
        (("gpus: 2", "gpus: 2, reserved: 3"), "reserved 3: node 'a' has only 2 GPUs"),
        (("gpus: 2", "gpsu: 2"), "key 'gpsu' is not known; did you mean 'gpus'?"),
        (("gpus: 2", "gpus: 99999"), "gpus: Expected"),
        (("gpus: 2", "number: 512, gpus: 2"), "have 1,026 GPUs, at most 512 are planned together"),
        (("nodes:", "nodes:\n\t- x"), "found character"),
        (("devices:", "nodes: []\ndevices:"), "inventory.yaml:5: key 'nodes' is there twice"),
        (("device: H100", "device: H100, device: A100"), "inventory.yaml:3: key 'device' is there twice"),
        (("  A100: {price_per_h: 1.2}", "  A100: {price_per_h: 1.2}\nbudget: {price_per_h: 0.1}"), "budget: no fleet that answers is within it"),
        (("nodes:", "x: &a [1]\nnodes: *a\ny:"), "aliases (*a) are not read"),
        (("  A100: {price_per_h: 1.2}", "budget: {watts: 1, price_per_h: 1}"), "has both price_per_h and watts"),
        (("  A100: {price_per_h: 1.2}", "budget: {price_per_h: 1}"), "budget: price_per_h needs a price_per_h of every device"),
        (("price_per_h: 2.5", "profiles: [no.yaml]"), "no.yaml: cannot be read"),
        (("  H100: {", "  H1O0: {"), "device 'H1O0': no node has it; did you mean 'H100'?"),
    ],
)  # fmt: skip
def test_a_mistake_in_an_inventory_is_named(
    folder: Path, change: tuple[str, str], said: str, capsys
) -> None:
    path = folder / "inventory.yaml"
    assert change[0] in TWO_NODES
    path.write_text(TWO_NODES.replace(*change, 1))
    assert plan(folder, folder / "trace.csv", "--inventory", path, *PROMISE) == 2
    assert said in capsys.readouterr().err


MEASURED = """
costs: {a: 3.0e-5, c: 0.008, d0: 0.008, d1: 2.0e-5, d2: 5.0e-8, chunk_tokens: 2048}
kv_tokens: 400000
kv_bytes_per_token: 131072
source: measured
model: llama-8b
dtype: bfloat16
errors: {prefill: 0.02, decode: 0.03, mixed: 0.05}
"""


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (
            ("llama-8b", "llama-70b"),
            "profile 'tp1.yaml': is of model llama-70b, wanted is llama-8b",
        ),
        (("bfloat16", "fp8"), "is of dtype fp8, wanted is bfloat16"),
        (("decode: 0.03", "decode: 0.3"), "error 30% (decode) is above 15 %"),
        (("kv_tokens: 400000", "gpus: 1"), "kv_tokens and kv_bytes_per_token are missing"),
        (("a: 3.0e-5", "a: .nan"), "a is nan"),
        (("131072", "1.0e+300"), "kv_bytes_per_token 1e+300: must be a number from 0 to 1e+09"),
    ],
)
def test_a_profile_that_does_not_fit_is_refused(
    folder: Path, change: tuple[str, str], said: str, capsys
) -> None:
    (folder / "tp1.yaml").write_text(MEASURED.replace(*change))
    path = folder / "inventory.yaml"
    path.write_text(
        "nodes: [{name: n, device: mine, gpus: 2}]\ndevices: {mine: {profiles: [tp1.yaml]}}"
    )
    assert plan(folder, folder / "trace.csv", "--inventory", path, *PROMISE) == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize(
    ("devices", "said"),
    [
        ("{mine: {profiles: [tp1.yaml, tp1.yaml]}}", "profiles of device 'mine': are of 1, 1 GPUs; give one for each"),
        ("{mine: {profiles: [tp1.yaml]}}\nbudget: {watts: 900}", "budget: watts needs a watts of every device, mine-tp1 has none"),
    ],
)  # fmt: skip
def test_what_profiles_do_not_say_is_named(folder: Path, devices: str, said: str, capsys) -> None:
    (folder / "tp1.yaml").write_text(MEASURED)
    path = folder / "inventory.yaml"
    path.write_text(f"nodes: [{{name: n, device: mine, gpus: 2}}]\ndevices: {devices}")
    assert plan(folder, folder / "trace.csv", "--inventory", path, *PROMISE) == 2
    assert said in capsys.readouterr().err


def test_a_measured_profile_is_called_measured_and_force_says_so_on_the_page(
    folder: Path, capsys
) -> None:
    path = folder / "inventory.yaml"
    path.write_text(
        "nodes: [{name: n, device: mine, gpus: 2}]\ndevices: {mine: {profiles: [tp1.yaml]}}"
    )
    (folder / "tp1.yaml").write_text(MEASURED)
    given = (folder / "trace.csv", "--inventory", path, *PROMISE, "--out", folder / "out")
    assert plan(folder, *given) == 0
    page = (folder / "out/plan.md").read_text()
    assert "costs are measured" in page
    assert "not measured" not in page
    (folder / "tp1.yaml").write_text(MEASURED.replace("decode: 0.03", "decode: 0.3"))
    assert plan(folder, *given, "--force") == 0
    assert "error 30% (decode)" in (folder / "out/plan.md").read_text()


@pytest.mark.parametrize(
    "name", ["plan.md", "router.yaml", "router-a.yaml", "fleet.yaml", "fleets/1.yaml", "start-a.sh"]
)
def test_files_that_no_plan_wrote_are_not_replaced(folder: Path, name: str, capsys) -> None:
    out = folder / "out"
    (out / name).parent.mkdir(parents=True)
    (out / name).write_text("# Mine\n")
    given = (folder / "trace.csv", "--device", "H100", "--gpus", "2", *PROMISE, "--out", out)
    assert plan(folder, *given) == 2
    assert f"{out / name}: no plan wrote it" in capsys.readouterr().err
    assert [path.read_text() for path in out.rglob("*.*")] == ["# Mine\n"]


def test_an_out_that_cannot_be_looked_at_is_refused_by_name(folder: Path, capsys) -> None:
    out = folder / ("o" * 300)
    given = (folder / "trace.csv", "--device", "H100", "--gpus", "2", *PROMISE, "--out", out)
    assert plan(folder, *given) == 2
    assert "cannot be read (File name too long); name another --out" in capsys.readouterr().err


def test_a_trace_of_two_lengths_has_all_requests_that_are_asked_for(folder: Path) -> None:
    """Short requests need long windows: with few requests every rate is in time."""
    lengths = ("--prompt-tokens", "20", "--answer-tokens", "1", "--requests", "3200")
    given = (*lengths, "--device", "L4", "--gpus", "1", "--ttft-ms", "300", "--tpot-ms", "100")
    assert plan(folder, *given, "--out", folder / "out") == 0
    assert len((folder / "out/trace-20-1.csv").read_text().splitlines()) == 3201


def test_a_trace_of_two_lengths_goes_on_after_a_day(folder: Path) -> None:
    (path := folder / "long.csv").write_text("\n".join(_generated(20, 1, 90_000)) + "\n")
    requests = trace.load(path)
    assert len(requests) == 90_000
    assert requests[-1].arrival_s - requests[0].arrival_s > 24 * 3600


def test_engines_serve_the_folder_that_has_the_weights(folder: Path) -> None:
    assert _served(str(folder / "config.json")) == ""
    assert _served("") == ""
    (folder / "model.safetensors").touch()
    assert _served(str(folder / "config.json")) == _served(str(folder)) == str(folder)


def test_traces_that_say_nothing_are_refused(folder: Path, capsys) -> None:
    head, first, *rest = (folder / "trace.csv").read_text().splitlines()
    long = [f"{line.rsplit(',', 2)[0]},140000,5" if n == 7 else line for n, line in enumerate(rest)]
    at_once = [",".join([first.split(",")[0], *line.split(",")[1:]]) for line in rest]
    for lines, said in (
        ([head], "is empty"),
        (
            [head, *at_once],
            "all 60 requests of a window come at the same time, so they have no rate",
        ),
        ([head, first], "has 1 requests, wanted are 40"),
        ([head, *rest, first.replace(first.rsplit(",", 2)[1], "-5")], "tokens below 0"),
        ([head, *long], "1 of 299 requests are longer than the model's context of 131,072"),
    ):
        (folder / "trace.csv").write_text("\n".join(lines))
        assert plan(folder, folder / "trace.csv", "--device", "H100", *PROMISE) == 2
        assert said in capsys.readouterr().err


def test_endless_files_are_not_read_to_their_end(folder: Path, capsys) -> None:
    trace, zero = folder / "trace.csv", "/dev/zero"
    assert plan(folder, trace, "--device", "H100", *PROMISE, "--model", zero) == 2
    assert "is not JSON" in capsys.readouterr().err
    assert plan(folder, trace, "--inventory", zero, *PROMISE) == 2
    assert "has more bytes than are read, at most 1,048,576" in capsys.readouterr().err
    (folder / "zeros").write_bytes(b"\0" * (2 << 20))
    assert plan(folder, folder / "zeros", "--device", "H100", *PROMISE) == 2
    assert "longer than 1,048,576 bytes; a trace has one request a line" in capsys.readouterr().err


def test_a_config_that_is_nested_too_deeply_is_refused(folder: Path, capsys) -> None:
    (folder / "config.json").write_text('{"a":' * 100_000)
    assert plan(folder, folder / "trace.csv", "--device", "H100", *PROMISE) == 2
    assert "config.json: is not JSON" in capsys.readouterr().err


def test_weights_that_fit_nowhere_are_refused(folder: Path, capsys) -> None:
    (folder / "config.json").write_text(json.dumps({**CONFIG, "num_hidden_layers": 800}))
    assert plan(folder, folder / "trace.csv", "--device", "L4", "--gpus", "2", *PROMISE) == 2
    assert "too few for 351 GB of weights" in capsys.readouterr().err
