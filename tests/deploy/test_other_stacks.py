# SPDX-License-Identifier: Apache-2.0
"""What llm-d and production-stack are given: patches that apply to their pods, and arguments that engines understand."""

import copy
from typing import Any

import pytest
import yaml
from support.charts import FOLDER

from pd_connector.tools.cli.check import examine
from pd_connector.tools.cli.checks.finding import Status

LLM_D = FOLDER / "llm-d"
STACK = FOLDER / "production-stack" / "values.yaml"
ENGINE = "/spec/roles/{n}/spec/leaderWorkerTemplate/workerTemplate/spec/containers/0"


def read(name: str) -> Any:
    return yaml.safe_load((LLM_D / name).read_text())


def guide() -> dict[str, Any]:
    """A DisaggregatedSet with the fields of llm-d's guide that the patches name."""

    def role(name: str, *more: str) -> dict[str, Any]:
        container = {
            "name": "modelserver",
            "image": "REPLACE_MODEL_SERVER_IMAGE",
            "command": ["vllm", "serve"],
            "args": [
                "a-model",
                "--disable-access-log-for-endpoints=/health",
                "--tensor-parallel-size=1",
                "--block-size=128",
                "--enable-auto-tool-choice",
                "--tool-call-parser=openai",
                "--reasoning-parser=openai_gptoss",
                "--kv-transfer-config",
                '{"kv_connector":"NixlConnector"}',
                *more,
            ],
            "env": [{"name": "A", "value": "b"}],
            "ports": [{"name": "modelserver", "containerPort": 8000}],
        }
        template = {"workerTemplate": {"spec": {"containers": [container]}}}
        return {"name": name, "spec": {"leaderWorkerTemplate": template}}

    return {
        "kind": "DisaggregatedSet",
        "spec": {"roles": [role("prefill"), role("decode", "--port=8200")]},
    }


def patched(document: dict[str, Any], patch: list[dict[str, Any]]) -> dict[str, Any]:
    """The document after a JSON patch (RFC 6902) of `test`, `replace` and `add`."""
    document = copy.deepcopy(document)
    for step in patch:
        *path, last = step["path"].removeprefix("/").split("/")
        place: Any = document
        for key in path:
            place = place[int(key) if isinstance(place, list) else key]
        if last == "-":
            assert step["op"] == "add"
            place.append(step["value"])
            continue
        key = int(last) if isinstance(place, list) else last
        if step["op"] == "test":
            assert place[key] == step["value"], step
        else:
            assert step["op"] == "replace"
            assert place[key] is not None
            place[key] = step["value"]
    return document


def engines() -> list[dict[str, Any]]:
    """The engines' containers in llm-d's pods, prefill first."""
    document = guide()
    for one in read("kustomization.yaml")["patches"]:
        assert one["target"] == {"kind": "DisaggregatedSet"}
        document = patched(document, read(one["path"]))
    return [
        role["spec"]["leaderWorkerTemplate"]["workerTemplate"]["spec"]["containers"][0]
        for role in document["spec"]["roles"]
    ]


def test_llm_ds_pods_get_the_connector_its_key_and_their_own_address() -> None:
    for container, kv_role in zip(engines(), ("kv_producer", "kv_consumer"), strict=True):
        config = container["args"][container["args"].index("--kv-transfer-config") + 1]
        assert "PDConnector" in config
        assert kv_role in config
        named = {one["name"]: one.get("valueFrom") for one in container["env"]}
        assert named["PD_CONNECTOR_KEY"]["secretKeyRef"]["name"] == "pd-connector-key"
        assert named["PD_CONNECTOR_HOST"]["fieldRef"]["fieldPath"] == "status.podIP"
        assert "A" in named, "what the guide sets stays"


def test_a_guide_whose_arguments_have_moved_is_not_patched() -> None:
    moved = guide()
    moved["spec"]["roles"][0]["spec"]["leaderWorkerTemplate"]["workerTemplate"]["spec"][
        "containers"
    ][0]["args"].insert(1, "--new")
    with pytest.raises(AssertionError):
        patched(moved, read("prefill.yaml"))


def test_llm_ds_network_policy_opens_the_ports_that_prefill_pods_have() -> None:
    policy = read("networkpolicy.yaml")
    schemas = pytest.importorskip(
        "kubernetes_validate", reason="kubernetes-validate is not installed"
    )
    schemas.validate(policy, schemas.latest_version(), strict=True)
    opened = {port["port"] for rule in policy["spec"]["ingress"] for port in rule["ports"]}
    assert opened == {port["containerPort"] for port in engines()[0]["ports"]}
    assert "networkpolicy.yaml" in read("kustomization.yaml")["resources"]


def test_all_files_of_the_overlay_are_named_in_it() -> None:
    kustomization = read("kustomization.yaml")
    named = {one["path"] for one in kustomization["patches"]} | set(kustomization["resources"])
    own = {file.name for file in LLM_D.iterdir()} - {"kustomization.yaml"}
    assert own == {name for name in named if "/" not in name}


@pytest.mark.parametrize("file", [LLM_D / "prefill.yaml", LLM_D / "decode.yaml", STACK])
def test_the_engines_configs_pass_our_own_check(file: Any) -> None:
    findings = examine(str(file), {}).findings
    assert [one for one in findings if one.status is not Status.OK] == []
    assert [one for one in findings if one.name == "config"]


def commands() -> list[list[str]]:
    """The arguments of all engines, as their pods get them."""
    models = yaml.safe_load(STACK.read_text())["servingEngineSpec"]["modelSpec"]
    return [
        *(container["args"][1:] for container in engines()),
        *(model["vllmConfig"]["extraArgs"] for model in models),
    ]


def test_vllm_understands_the_engines_arguments() -> None:
    pytest.importorskip("vllm.entrypoints.launchers.cli_args", reason="no vLLM of 0.32")
    from vllm.entrypoints.launchers.cli_args import make_arg_parser
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    parser = make_arg_parser(FlexibleArgumentParser())
    roles = ["kv_producer", "kv_consumer"] * 2
    for command, role in zip(commands(), roles, strict=True):
        found = parser.parse_args(command).kv_transfer_config
        assert (found.kv_connector, found.kv_role) == ("PDConnector", role)


def test_production_stacks_router_finds_both_sides_by_their_labels() -> None:
    values = yaml.safe_load(STACK.read_text())
    labels = {one["labels"]["model"] for one in values["servingEngineSpec"]["modelSpec"]}
    given = values["routerSpec"]["extraArgs"]
    assert labels == {
        given[given.index(f"--{side}-model-labels") + 1] for side in ("prefill", "decode")
    }
    assert values["routerSpec"]["routingLogic"] == "disaggregated_prefill_orchestrated"
