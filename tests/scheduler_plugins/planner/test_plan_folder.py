# SPDX-License-Identifier: Apache-2.0
"""The folder of a plan: its scripts and configs are valid for the programs that read them, and damage is named."""

from __future__ import annotations

import secrets
import shlex
import shutil
from pathlib import Path

import pytest
import yaml
from support.charts import rendered
from support.plan_cases import cpu_stock, inputs, written

from pd_connector.tools.cli.app import main
from scheduler_plugins.commands import main as pd_router
from scheduler_plugins.planner.estimate import read_model
from scheduler_plugins.planner.files import PAGE, TITLE, _is_plan
from scheduler_plugins.planner.inventory import load, one_device
from scheduler_plugins.planner.mix import mix_of
from scheduler_plugins.qos.classes import Slo
from scheduler_plugins.router.policies.base import Role
from scheduler_plugins.router.settings.settings_file import parse

COMPOSE = Path(__file__).parents[3] / "examples/deploy/compose.yaml"


P, D, W = Role.PREFILL, Role.DECODE, Role.WHOLE
MIXES = {
    "planner": {("H100-tp1", P): 2, ("A100-tp1", D): 2},
    "colocated": {("H100-tp1", W): 2, ("A100-tp2", W): 1},
    "one node": {("H100-tp1", P): 2, ("H100-tp2", D): 1},
    "cpu": {("CPU-tp1", P): 1, ("CPU-tp1", D): 1},
}


ALIKE = """
nodes:
  - {name: a, device: H100, gpus: 2, nic_gbit_per_s: 10}
  - {name: b, device: H100, gpus: 2, nic_gbit_per_s: 10}
"""


@pytest.fixture(scope="module")
def plans(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Two nodes, disaggregated and not; and one node, disaggregated, with GPUs and with a CPU."""
    made = {}
    for name, counts in MIXES.items():
        folder = inputs(tmp_path_factory.mktemp("plan"))
        stock = one_device("H100", 4, read_model(folder / "config.json")) if "one" in name else None
        stock = cpu_stock(folder) if name == "cpu" else stock
        made[name] = written(folder, mix_of(counts), stock)
    return made


@pytest.fixture(autouse=True)
def key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PD_CONNECTOR_KEY", secrets.token_urlsafe(32))


@pytest.mark.parametrize("name", MIXES)
def test_check_is_silent_about_the_folder_of_a_plan(
    plans: dict[str, Path], name: str, capsys
) -> None:
    assert main(["check", str(plans[name])]) == 0
    told = capsys.readouterr()
    assert not told.out + told.err


BOMB = "x: &a [1, 1]\nparts: [*a, *a]\n"


@pytest.mark.parametrize(
    ("file", "change", "said"),
    [
        ("plan.md", None, "plan.md is missing"),
        ("router.yaml", None, "router.yaml is missing"),
        ("fleet.yaml", None, "fleet.yaml is missing"),
        ("start-a.sh", None, "scripts start"),
        ("start-a.sh", ("--port 8100", "--port 8101"), "two engines have port 8101"),
        ("start-a.sh", ("--port 8100", "--port 8109"), "the scripts start [8101, 8109]"),
        ("start-a.sh", ("CUDA_VISIBLE_DEVICES=0", "CUDA_VISIBLE_DEVICES=1"), "two engines have GPU 1"),
        ("start-a.sh", ("CUDA_VISIBLE_DEVICES=0", "CUDA_VISIBLE_DEVICES=0,1"), "for a tensor parallelism of 1"),
        ("start-a.sh", ("batched-tokens 2048", "batched-tokens 512"), "with chunks of 512"),
        ("start-a.sh", ("--max-num-batched-tokens", "--max-num-batch"), "has no --max-num-batched-tokens"),
        ("start-a.sh", ("PDConnector", "PDConector"), "PDConector"),
        ("start-a.sh", ('"kv_producer"', '"kv_prod"'), "kv_prod"),
        ("start-a.sh", ('"kv_role"', '"kv_rol"'), "is not an object with kv_role"),
        ("start-a.sh", ('"kv_producer"', "[]"), "start-NODE.sh start 1 [] of 1 GPU"),
        ("start-a.sh", (" &\n", "\n"), "is cut off"),
        ("start-a.sh", ("it'\"'\"'s", "it's"), "No closing quotation"),
        ("router.yaml", ("role: prefill", "role: decode"), "ports of prefill engines are"),
        ("router.yaml", ("engines:", "engnes:"), "key 'engnes' is not known"),
        ("router.yaml", ("engines:", "\tengines:"), "found character"),
        ("fleet.yaml", ("number: 2", "number: -2"), "must be a number of engines"),
        ("fleet.yaml", ("parts:", f"{BOMB}y:"), "aliases (*a) are not read"),
        ("fleet.yaml", ("parts:", "parts:\n\t- x"), "fleet.yaml:"),
    ],
)  # fmt: skip
def test_damage_is_named(
    plans: dict[str, Path],
    tmp_path: Path,
    file: str,
    change: tuple[str, str] | None,
    said: str,
    capsys,
) -> None:
    folder = shutil.copytree(plans["planner"], tmp_path / "out")
    path = folder / file
    if change is None:
        path.unlink()
    else:
        text = path.read_text()
        assert change[0] in text
        path.write_text(text.replace(*change, 1))
    assert main(["check", str(folder)]) == 1
    told = " ".join(capsys.readouterr().out.split())
    assert said in told
    assert "plan again" in told or "→" in told


@pytest.mark.parametrize(
    ("file", "change", "said"),
    [
        ("values.yaml", ("replicas: 2", "replicas: 3"), "replicas 3: the scripts start 2"),
        ("values.yaml", ("model:", "modl:"), "model: is missing"),
        ("compose.yaml", ("  prefill-8100:", "  other-8100:"), "services: 1 prefill engines; the scripts start 2"),
        ("compose.yaml", ("  router:", "  rooter:"), "services: has no router"),
        ("compose.yaml", ("  prefill-8100:", "  8100:"), "services: 1 prefill engines; the scripts start 2"),
        ("compose.yaml", ("services:", "services: 3\nx:"), "services: 0 prefill"),
    ],
)  # fmt: skip
def test_damage_of_values_is_named(
    plans: dict[str, Path], tmp_path: Path, file: str, change: tuple[str, str], said: str, capsys
) -> None:
    test_damage_is_named({"planner": plans["one node"]}, tmp_path, file, change, said, capsys)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (("THREADS_BIND=1", "THREADS_BIND=0"), "two engines have GPU 0"),
        (("--tensor-parallel-size 1", "--tensor-parallel-size 2"), "for a tensor parallelism of 2"),
    ],
)
def test_damage_of_a_cpu_is_named(
    plans: dict[str, Path], tmp_path: Path, change: tuple[str, str], said: str, capsys
) -> None:
    test_damage_is_named({"planner": plans["cpu"]}, tmp_path, "start-host.sh", change, said, capsys)


def test_engines_on_a_cpu_have_their_cores_and_room(plans: dict[str, Path]) -> None:
    script = (plans["cpu"] / "start-host.sh").read_text()
    for core in (0, 1):
        assert f"\nVLLM_CPU_OMP_THREADS_BIND={core} VLLM_CPU_KVCACHE_SPACE=1 python -m " in script
    assert "CUDA" not in script
    assert script.count("--enforce-eager") == 2
    page = (plans["cpu"] / PAGE).read_text()
    assert "our chart starts engines on GPUs" in page
    assert "our compose file starts engines on GPUs" in page
    assert not (plans["cpu"] / "values.yaml").exists()


def test_an_sglang_script_in_the_folder_is_checked(
    plans: dict[str, Path], tmp_path: Path, capsys
) -> None:
    out = tmp_path / "plan"
    shutil.copytree(plans["planner"], out)
    script = out / "more.sh"
    started = "#!/bin/sh\nPD_CONNECTOR_CONFIG='{%s}' python -m sglang.launch_server\n"
    script.write_text(started % '"codec": "int8"')
    assert main(["check", str(out)]) == 0
    script.write_text(started % '"codc": "int8"')
    assert main(["check", str(out)]) == 1
    assert "did you mean 'codec'?" in " ".join(capsys.readouterr().out.split())


def test_each_copy_of_a_fleet_has_a_router(tmp_path: Path, capsys) -> None:
    """KV between the copies would pass over the slow link that made the plan choose them."""
    folder = inputs(tmp_path)
    (tmp_path / "inventory.yaml").write_text(ALIKE)
    stock = load(tmp_path / "inventory.yaml", read_model(folder / "config.json"))
    out = written(folder, mix_of({("H100-tp1", P): 1, ("H100-tp1", D): 1}), stock, copies=2)
    assert main(["check", str(out)]) == 0
    assert not (out / "router.yaml").exists()
    for node in ("a", "b"):
        router = parse((out / f"router-{node}.yaml").read_bytes(), {}, "router")
        assert {*router.prefill, *router.decode} == {
            "http://127.0.0.1:8100",
            "http://127.0.0.1:8101",
        }
        assert "PD_CONNECTOR_KEY" not in (out / f"start-{node}.sh").read_text(), "within a node"
    assert "one for each node" in (out / "plan.md").read_text()
    script = out / "start-b.sh"
    script.write_text(script.read_text().replace("--port 8100", "--port 8109"))
    assert main(["check", str(out)]) == 1
    assert "router-b.yaml" in capsys.readouterr().out
    (out / "router-b.yaml").unlink()
    assert main(["check", str(out)]) == 1
    assert "router-b.yaml is missing" in " ".join(capsys.readouterr().out.split())


def test_router_files_of_the_users_own_are_kept_and_stand_for_no_copy(
    tmp_path: Path, capsys
) -> None:
    folder = inputs(tmp_path)
    out = written(folder, mix_of(MIXES["planner"]))
    own = [out / "router-mine.yaml", out / "router.old.yaml"]
    for path in own:
        path.write_text("port: 9000\n")
    assert main(["check", str(out)]) == 0, capsys.readouterr()
    written(folder, mix_of(MIXES["planner"]))
    assert all(path.exists() for path in own)


def test_the_router_knows_the_promise(plans: dict[str, Path]) -> None:
    """As in the simulation. Without it, it refuses nothing."""
    router = parse((plans["planner"] / "router.yaml").read_bytes(), {}, "router.yaml")
    assert [one.slo for one in router.classes] == [Slo(ttft_ms=300, tpot_ms=50)]


def test_another_folder_is_no_plan(tmp_path: Path, capsys) -> None:
    assert main(["check", str(tmp_path)]) == 1
    assert "is no folder of a plan" in " ".join(capsys.readouterr().out.split())


def test_the_chart_takes_the_values(plans: dict[str, Path]) -> None:
    values = yaml.safe_load((plans["one node"] / "values.yaml").read_text())
    documents = rendered(values)
    sides = {
        one["metadata"]["name"]: one["spec"] for one in documents if one["kind"] == "Deployment"
    }
    for side in ("prefill", "decode"):
        spec = sides[f"pd-{side}"]
        assert spec["replicas"] == values[side]["replicas"]
        container = spec["template"]["spec"]["containers"][0]
        said = [*container.get("command", []), *container["args"]]
        assert values["model"] in said
        assert "--max-num-batched-tokens" in said
    with pytest.raises(Exception, match="replica"):
        rendered({**values, "prefill": {**values["prefill"], "replica": 2}})


def test_the_compose_file_starts_the_engines(plans: dict[str, Path], monkeypatch) -> None:
    ours = yaml.safe_load(COMPOSE.read_text())["services"]
    its = yaml.safe_load((plans["one node"] / "compose.yaml").read_text())["services"]
    assert its["prefill"] == its["decode"] == {"profiles": ["unused"]}, "ours stand aside"
    engines = {name: one for name, one in its.items() if "-" in name}
    script = (plans["one node"] / "start-node.sh").read_text()
    started = [
        shlex.split(line.removesuffix(" &"))[4:]
        for line in script.splitlines()
        if "vllm serve" in line
    ]
    assert sorted(one["command"][2:] for one in engines.values()) == sorted(started)
    usual = ours["prefill"]
    for one in engines.values():
        assert one["entrypoint"] == ["vllm", "serve", "it's $$(x)"], (
            "compose replaces nothing in it"
        )
        same = set(usual) - {"entrypoint", "command", "deploy", "build"}
        assert {name: one[name] for name in same} == {name: usual[name] for name in same}
        assert "PD_CONNECTOR_KEY" not in str(one)
    found = list[object]()
    monkeypatch.setattr(
        "scheduler_plugins.router.__main__._run", lambda config, settings: found.append(config)
    )
    assert pd_router([*ours["router"]["entrypoint"][1:], *its["router"]["command"]]) == 0
    (config,) = found
    assert (len(config.prefill), len(config.decode)) == (
        sum(name.startswith("prefill-") for name in engines),
        sum(name.startswith("decode-") for name in engines),
    )


def test_secrets_are_references_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    secret = "s3cret-of-the-operator-0123456789abcdef"
    monkeypatch.setenv("PD_CONNECTOR_KEY", secret)
    monkeypatch.setenv("HF_TOKEN", secret)
    folder = written(inputs(tmp_path), mix_of(MIXES["planner"]))
    texts = [path.read_text() for path in folder.rglob("*") if path.is_file()]
    assert not any(secret in text for text in texts)
    assert any("${PD_CONNECTOR_KEY:?" in text for text in texts)


def test_a_page_of_the_users_own_is_no_plan_whose_files_may_be_deleted(tmp_path: Path) -> None:
    page = tmp_path / PAGE
    page.write_text("# My notes\n")
    assert not _is_plan(page)
    page.write_text(f"{TITLE}2 prefill, 1 decode\n")
    assert _is_plan(page)
