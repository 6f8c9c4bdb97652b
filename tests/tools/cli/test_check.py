# SPDX-License-Identifier: Apache-2.0
"""`pd-connector check` tells what is wrong with a config, where, and what to write."""

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from pd_connector.config import HOST_VARIABLE, KEY_VARIABLE, Config
from pd_connector.control.keys import new_key
from pd_connector.tools.cli.app import app
from pd_connector.tools.cli.check import examine
from pd_connector.tools.cli.checks import configs_together
from pd_connector.tools.cli.checks.finding import Finding, Status
from pd_connector.tools.cli.checks.transfer_config import KEYS, UNUSED

RIGHT = {"kv_connector": "PDConnector", "kv_role": "kv_producer"}
KEY = {KEY_VARIABLE: new_key()}
MULTI = {"kv_connector": "MultiConnector", "kv_role": "kv_both"}


def extra(**keys: Any) -> dict[str, Any]:
    return {**RIGHT, "kv_connector_extra_config": keys}


def multi(*names: str, **keys: Any) -> dict[str, Any]:
    parts = [{"kv_connector": name, "kv_role": "kv_both"} for name in names]
    return {**MULTI, "kv_connector_extra_config": {"connectors": parts}, **keys}


def told(config: object, environment: dict[str, str] | None = None) -> list[Finding]:
    """What is not in order."""
    text = config if isinstance(config, str) else json.dumps(config)
    return [one for one in examine(text, environment or {}).findings if one.status is not Status.OK]


def text_of(findings: list[Finding]) -> str:
    return "\n".join(f"{one.area} {one.name}: {one.found}: {one.advice}" for one in findings)


@pytest.mark.parametrize(
    ("config", "wanted"),
    [
        (extra(codc="int8"), "unknown config key 'codc': did you mean 'codec'?"),
        (extra(slots="16"), "slots '16': Expected `int`"),
        (extra(codec="int4"), "codec 'int4' is not known"),
        (extra(transports=["rdma"]), "transport 'rdma' is not known"),
        (extra(host="10.0.0.1"), "Set PD_CONNECTOR_KEY"),
        (extra(host="0.0.0.0", insecure=True), "not a wildcard"),
        (extra(key="secret"), "could be guessed"),
        (extra(lease_s=0.5), "must be at least twice heartbeat_s"),
        (extra(pool={"memori": "16GiB"}), "did you mean 'memory'?"),
        (extra(pool={"memory": "lots"}), "must be a size"),
        (extra(pool={"disk": "16GiB"}), "set pool.dir"),
        (extra(pool={"dir": "kv"}), "must be the absolute path"),
        ({"kv_role": "kv_both"}, "no kv_connector"),
        (extra(audit=7), "must be `first`, `off`, or a share"),
        ({**RIGHT, "codec": "int8"}, 'write "kv_connector_extra_config": {"codec": "int8"}'),
        ({**RIGHT, "kv_rol": "kv_both"}, "did you mean 'kv_role'?"),
        ({**RIGHT, "kv_role": "prefill"}, "did you mean 'kv_producer'?"),
        ({**RIGHT, "kv_role": "consumer"}, "did you mean 'kv_consumer'?"),
        ({"kv_connector": "PDConnector"}, "no kv_role"),
        ({**RIGHT, "kv_connector": "PdConnector"}, "PdConnector is Dynamo's own connector"),
        ({**RIGHT, "kv_connector": "PDConector"}, "did you mean 'PDConnector'?"),
        ({**RIGHT, "kv_connector_extra_config": "{}"}, "must be a JSON object"),
        (multi("PDConnector", "NixlConnector"), "leave NixlConnector out"),
        ({**MULTI, "kv_connector_extra_config": {}}, "must be a list of objects"),
        ('{"kv_connector": "PDConnector" "kv_role": "kv_both"}', "Expecting ',' delimiter"),
        (json.dumps(RIGHT)[:-1] + ', "kv_role": "kv_both"}', "key 'kv_role' is there twice"),
        (
            json.dumps(RIGHT)[:-1] + ', "kv_connector_extra_config": {"slots": 4, "slots": 8}}',
            "key 'slots' is there twice",
        ),
        (extra(pool={"memory": "9" * 400 + "GB"}), "must be a size"),
        (extra(slots=float("inf"), lease_s=float("nan")), "slots inf"),
        ('{"a":' * 100_000, "is nested too deeply"),
        ("{'kv_connector': 'PDConnector'}", "property name enclosed in double quotes"),
    ],
)
def test_an_engine_that_would_not_start_is_told_with_what_to_write(
    config: object, wanted: str
) -> None:
    findings = told(config)
    assert wanted in text_of(findings)
    assert any(one.status is Status.FAIL for one in findings)


@pytest.mark.parametrize(
    ("config", "mistakes"),
    [
        (extra(codc="int8", slotz=4), ["'codc'", "'slotz'"]),
        (extra(codc="int8", slots="16", lease_s="x"), ["'codc'", "slots '16'", "lease_s 'x'"]),
        (extra(slots=0, slot_mib=0, host="*"), ["slots 0", "slot_mib 0", "host *"]),
        (
            extra(codec="int4", transports=["rdma", "tcp", "tpc"]),
            ["codec 'int4'", "'rdma'", "'tpc'"],
        ),
        (
            extra(codc=1, pool={"memry": "16GiB", "disk": "1", "tenants": "a"}),
            ["'codc'", "'pool.memry'", "pool.disk '1'", "pool.disk '1': needs", "pool.tenants"],
        ),
    ],
)
def test_every_mistake_of_a_config_is_told_at_once(config: object, mistakes: list[str]) -> None:
    findings = told(config)
    assert len(findings) == len(mistakes)
    for mistake in mistakes:
        assert any(mistake in one.found for one in findings), mistake


@pytest.mark.parametrize("name", ["PDConector", "NixlConnector"])
def test_a_wrong_connector_is_not_called_right_in_the_next_line(name: str) -> None:
    findings = examine(json.dumps({**RIGHT, "kv_connector": name}), {}).findings
    assert [one.status for one in findings if name in one.found] != []
    assert not [one for one in findings if one.status is Status.OK and name in one.found]


@pytest.mark.parametrize(
    ("config", "wanted"),
    [
        ({**RIGHT, "kv_load_failure_policy": "fail"}, "set `on_failure`"),
        ({**RIGHT, "kv_ip": "10.0.0.1"}, "kv_ip has no effect"),
        ({**RIGHT, "kv_connector": "NixlConnector"}, "nothing of pd-connector is used"),
        (multi("OffloadingConnector", "PDConnector"), "name PDConnector first"),
        (multi("PDConnector", "OffloadingConnector"), '"kv_load_failure_policy": "recompute"'),
        (multi("OffloadingConnector"), "PDConnector is not among the parts"),
        (extra(key=KEY[KEY_VARIABLE]), "other users of the machine see them"),
    ],
)
def test_what_starts_and_is_not_meant_is_a_warning(config: object, wanted: str) -> None:
    findings = told(config)
    assert wanted in text_of(findings)
    assert {one.status for one in findings} == {Status.WARN}


@pytest.mark.parametrize(
    "config",
    [
        RIGHT,
        extra(codec="int8", pool={"memory": "16GiB"}),
        {"codec": "int8"},  # as PD_CONNECTOR_CONFIG has it
        multi("PDConnector", "OffloadingConnector", kv_load_failure_policy="recompute"),
    ],
)
def test_a_right_config_has_no_complaints(config: object) -> None:
    assert told(config) == []


def test_the_keys_of_the_environment_count() -> None:
    assert told(extra(host="10.0.0.1")) != []
    assert told(extra(host="10.0.0.1"), KEY) == []


SECRET = KEY[KEY_VARIABLE]


@pytest.mark.parametrize(
    "config",
    [
        extra(key=SECRET),
        extra(key=[SECRET]),
        {**RIGHT, "key": SECRET},
        {**RIGHT, "kv_connector_extra_config": json.dumps({"key": SECRET})},
        {**RIGHT, "kv_connector_extra_config": [SECRET]},
        {**MULTI, "kv_connector_extra_config": {"connectors": [extra(key=SECRET), SECRET]}},
        json.dumps(extra(key=SECRET))[:-1] + " x",
        json.dumps(extra(key=SECRET)).replace(", ", " "),
        f"PD_CONNECTOR_KEY: {SECRET}\n\tkv_connector: PDConnector",
        f"PD_CONNECTOR_KEY: {SECRET}: x\nkv_connector: PDConnector",
        f"PD_CONNECTOR_KEY: *{SECRET}\nkv_connector: PDConnector",
        f"PD_CONNECTOR_KEY: !{SECRET}!a x\nkv_connector: PDConnector",
        json.dumps({"key": f"a {SECRET}"}) + " x",
        json.dumps({"key": f"a, }}' {SECRET}"}) + " x",
        json.dumps({"key": f'a" {SECRET}'}) + " x",
        json.dumps({"key": ["a", SECRET]}) + " x",
        json.dumps({"PD_CONNECTOR_KEY": SECRET}) + " x",
        json.dumps({"a": json.dumps({"key": SECRET})}) + " x",
        f"{{'key': 'a {SECRET}'}}",
    ],
    ids=lambda _: "config",  # the secret is drawn by each process
)
def test_a_key_is_never_printed(config: object, tmp_path: Path) -> None:
    text = config if isinstance(config, str) else json.dumps(config)
    if not text.startswith("{"):
        (tmp_path / "values.yaml").write_text(text)
        text = str(tmp_path / "values.yaml")
    shown = text_of(examine(text, {}).findings)
    assert shown
    assert not [n for n in range(len(SECRET) - 6) if SECRET[n : n + 6] in shown]


def test_all_keys_of_vllms_config_are_known() -> None:
    vllm = pytest.importorskip("vllm.config")
    assert set(vllm.KVTransferConfig.__dataclass_fields__) <= {*KEYS, *UNUSED}
    assert not set(KEYS) & set(Config.__struct_fields__)


VALUES = """
prefill:
  args: ["--model", "m", "--kv-transfer-config", '{"kv_connector": "PDConnector", "kv_role": "kv_producer"}']
decode:
  command: |
    exec vllm serve m \\
      --kv-transfer-config '{"kv_connector": "PDConnector", "kv_role": "kv_consumer",
        "kv_connector_extra_config": {"codc": "int8"}}'
other:
  - --kv-transfer-config={"kv_connector":"PDConnector","kv_role":"kv_producr"}
  - "vllm serve m --kv-transfer-config {\\"kv_connector\\": \\"PDConnector\\"}"
  - --kv-transfer-config
  - '{"kv_connector": "PDConnector" "kv_role": "kv_both"}'
written_out:
  kv_connector: PDConnector
  kv_role: kv_both
  slots: 4
"""


def test_every_config_in_a_values_file_is_found_with_its_line(tmp_path: Path) -> None:
    file = tmp_path / "values.yaml"
    file.write_text(VALUES)
    areas = {one.area: one for one in told(str(file)) if one.status is Status.FAIL}
    assert [area.removeprefix(f"{file}:") for area in areas] == ["5", "10", "11", "13", "15"]
    ok = [one.area for one in examine(str(file), {}).findings if one.status is Status.OK]
    assert f"{file}:3" in ok


def test_engines_in_pods_without_an_address_are_told_what_is_missing(tmp_path: Path) -> None:
    file = tmp_path / "values.yaml"
    pair = [
        {"args": ["--kv-transfer-config", json.dumps({**RIGHT, "kv_role": role})]}
        for role in ("kv_producer", "kv_consumer")
    ]
    file.write_text("engines: " + json.dumps(pair))
    assert HOST_VARIABLE in text_of(told(str(file)))
    file.write_text(f"env: [{HOST_VARIABLE}, {KEY_VARIABLE}]\nengines: " + json.dumps(pair))
    assert told(str(file)) == []


@pytest.mark.parametrize(
    ("roles", "codecs", "wanted"),
    [
        (("kv_producer", "kv_producer"), ("raw", "raw"), "all 2 engines are kv_producer"),
        (("kv_producer", "kv_consumer"), ("raw", "int8"), "different codecs (int8, raw)"),
    ],
)
def test_engines_that_do_not_fit_together_are_told(
    tmp_path: Path, roles: tuple[str, str], codecs: tuple[str, str], wanted: str
) -> None:
    file = tmp_path / "engines.yaml"
    configs = [
        {**RIGHT, "kv_role": role, "kv_connector_extra_config": {"codec": codec, "host": "::1"}}
        for role, codec in zip(roles, codecs, strict=True)
    ]
    file.write_text("engines: " + json.dumps(configs))
    assert wanted in text_of(told(str(file)))


@pytest.mark.parametrize(
    ("one", "two", "said"),
    [
        ({"dir": "/a"}, {"dir": "/b"}, 'pool.dir ("/a", "/b")'),
        ({"dir": "/a"}, True, ""),
        ({"tenants": ["a"]}, True, 'pool.tenants (["a"], [])'),
        ({"tenants": ["a"]}, {"tenants": ["a", "b"]}, 'pool.tenants (["a", "b"], ["a"])'),
        ({"tenants": ["a"]}, {"tenants": ["a"]}, ""),
        ({"memory": "1GiB"}, True, ""),
    ],
)
def test_engines_of_a_host_with_unlike_pools_are_told(one: object, two: object, said: str) -> None:
    engines = [("kv_both", {"pool": pool}) for pool in (one, two)]
    found = [finding.found for finding in configs_together.pools_together("file", engines)]
    assert [f"the engines name different {said}: on one host, " in text for text in found] == [
        True
    ] * bool(said)


@pytest.mark.parametrize(
    ("pools", "wanted"),
    [
        ((True, {"codec": "int8"}), "keep chunks in different codecs (int8, raw)"),
        (({"codec": "int8"}, {"codec": "int8", "write": False}), ""),
        (({"codec": "int8"}, False), ""),
    ],
)
def test_pools_that_keep_chunks_in_different_codecs_are_told(
    tmp_path: Path, pools: tuple[object, object], wanted: str
) -> None:
    file = tmp_path / "engines.yaml"
    both = {**RIGHT, "kv_role": "kv_both"}
    configs = [
        {**both, "kv_connector_extra_config": {"pool": pool, "host": "::1"}} for pool in pools
    ]
    file.write_text("engines: " + json.dumps(configs))
    found = text_of(told(str(file)))
    assert wanted in found
    assert bool(wanted) == ("different codecs" in found)


@pytest.mark.parametrize(
    ("prefill", "decode", "fits"),
    [
        ({"pool": {"codec": "int8"}}, {}, False),
        ({"pool": {"codec": "int8"}}, {"pool": True}, False),
        ({"pool": {"codec": "int8", "read": False}}, {}, True),
        ({"pool": {"codec": "int8"}}, {"pool": {"codec": "int8"}}, True),
        ({"pool": {"codec": "int8"}}, {"codec": "int8"}, True),
        ({"pool": {"codec": "int8"}}, {"codec": "auto"}, True),
        ({"pool": True}, {}, True),
        ({"pool": True, "codec": "int8"}, {"pool": {"write": False}, "codec": "int8"}, True),
        ({"pool": {"read": False}, "codec": "int8"}, {}, True),
    ],
)
def test_a_prefill_engine_whose_kv_a_decode_engine_would_refuse_is_told(
    tmp_path: Path, prefill: dict[str, object], decode: dict[str, object], fits: bool
) -> None:
    file = tmp_path / "engines.yaml"
    sides = ("kv_producer", prefill), ("kv_consumer", decode)
    configs = [
        {**RIGHT, "kv_role": role, "kv_connector_extra_config": {"host": "::1", **more}}
        for role, more in sides
    ]
    file.write_text("engines: " + json.dumps(configs))
    refused = [one for one in told(str(file)) if "loads INT8 chunks" in one.found]
    assert [one.status for one in refused] == ([] if fits else [Status.FAIL])


@pytest.mark.parametrize(
    ("engines", "status"),
    [
        ((("kv_producer", {"pool": True, "codec": "int8"}), ("kv_consumer", {})), Status.WARN),
        ((("kv_producer", {"pool": True, "codec": "auto"}), ("kv_both", {})), Status.WARN),
        (
            (
                ("kv_producer", {"pool": True, "codec": "int8"}),
                ("kv_consumer", {}),
                ("kv_consumer", {"pool": True, "codec": "int8"}),
            ),
            Status.FAIL,
        ),
        ((("kv_both", {"pool": True, "codec": "int8"}), ("kv_both", {})), None),
    ],
)
def test_a_prefill_engine_that_loads_what_another_engine_keeps_in_int8_is_told(
    tmp_path: Path, engines: tuple[tuple[str, dict[str, object]], ...], status: Status | None
) -> None:
    file = tmp_path / "engines.yaml"
    configs = [
        {**RIGHT, "kv_role": role, "kv_connector_extra_config": {"host": "::1", **more}}
        for role, more in engines
    ]
    file.write_text("engines: " + json.dumps(configs))
    refused = [one for one in told(str(file)) if "loads INT8 chunks" in one.found]
    assert [one.status for one in refused] == ([] if status is None else [status])


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("a: [", "is not YAML"),
        ("{{- if .Values.x }}\na: 1\n{{- end }}", "helm template"),
        ("replicas: 3", "no kv_connector in it"),
        ("model: m", "check what `helm template` prints"),
    ],
)
def test_a_file_that_has_no_config_is_told_apart(tmp_path: Path, text: str, wanted: str) -> None:
    file = tmp_path / "values.yaml"
    file.write_text(text)
    assert wanted in text_of(told(str(file)))


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("kv_connector: PDConnector\nkv_role: kv_both\nkv_role: kv_producer", "key 'kv_role' is"),
        (
            "kv_connector: PDConnector\nkv_role: kv_both\nkv_connector_extra_config: {slots: 1, slots: 2}",
            "key 'slots' is there twice",
        ),
        (f'- --kv-transfer-config\n- \'{json.dumps(RIGHT)[:-1]}, "kv_role": ""}}\'', "twice"),
        (
            f'#!/bin/sh\nvllm --kv-transfer-config \'{json.dumps(RIGHT)[:-1]}, "kv_role": ""}}\'',
            "twice",
        ),
        ("kv_connector: PDConnector\nmodel_id: 2026-01-01\n1: 2", "unknown key 1"),
        ("a: &a [*a]", "no kv_connector in it"),
        ("[" * 3000, "is nested too deeply"),
    ],
)
def test_yaml_and_scripts_are_read_as_strictly_as_json(
    tmp_path: Path, text: str, wanted: str
) -> None:
    (tmp_path / "values").write_text(text)
    assert wanted in text_of(told(str(tmp_path / "values")))


def test_aliases_of_aliases_are_looked_at_once(tmp_path: Path) -> None:
    lines = [
        "a0: &a0 [x, x]",
        *(f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]" for n in range(1, 40)),
    ]
    (tmp_path / "values.yaml").write_text("\n".join(lines))
    assert "no kv_connector in it" in text_of(told(str(tmp_path / "values.yaml")))


def test_a_device_or_the_weights_of_a_model_are_not_read_whole() -> None:
    assert "it has more than 4,194,304 characters" in text_of(told("/dev/zero"))


def test_what_cannot_be_read_in_a_folder_is_named(tmp_path: Path) -> None:
    (tmp_path / "start-a.sh").mkdir()
    (tmp_path / "start-b.sh").write_text("a: [")
    (tmp_path / "fleet.yaml").symlink_to(tmp_path / "nowhere")
    result = CliRunner().invoke(app, ["check", str(tmp_path)], env={"COLUMNS": "300"})
    assert result.exit_code == 1
    assert isinstance(result.exception, SystemExit)
    for said in ("Is a directory", "is not YAML", "No such file or directory"):
        assert said in result.output


def test_a_file_that_is_not_there_is_told(tmp_path: Path) -> None:
    said = text_of(told(str(tmp_path / "none.yaml")))
    assert "cannot be read: No such file or directory" in said
    assert "in single quotes" in said
    (tmp_path / "binary").write_bytes(b"\xff\xfe")
    assert "it is not a text in UTF-8" in text_of(told(str(tmp_path / "binary")))


@pytest.mark.parametrize(("config", "status"), [(RIGHT, 0), (extra(codc="int8"), 1)])
def test_the_command_ends_with_its_verdict(config: object, status: int) -> None:
    result = CliRunner().invoke(app, ["check", json.dumps(config)])
    assert result.exit_code == status, result.output


DRAFT = '{"method": "eagle3", "model": "drafts/a", "num_speculative_tokens": 3}'
PREFILL = '{"kv_connector": "PDConnector", "kv_role": "kv_producer"}'
DECODE = '{"kv_connector": "PDConnector", "kv_role": "kv_consumer"}'


def arguments(config: str, speculation: str) -> str:
    """A manifest with one engine."""
    given = ["--kv-transfer-config", config]
    given += ["--speculative-config", speculation] if speculation else []
    return json.dumps([{"name": "engine", "args": given}]).replace("[{", "[ {", 1)


@pytest.mark.parametrize(
    ("prefill", "decode", "named"),
    [
        ("", DRAFT, True),
        (DRAFT.replace("drafts/a", "drafts/b"), DRAFT, True),
        (DRAFT, DRAFT.replace("3}", "5}"), False),
        (DRAFT, "", False),
        ("", '{"method": "ngram", "num_speculative_tokens": 3}', False),
    ],
)
def test_a_decode_engine_that_drafts_without_its_prefill_engine_is_named_in_two_files(
    tmp_path: Path, prefill: str, decode: str, named: bool
) -> None:
    files = [tmp_path / "prefill.yaml", tmp_path / "decode.yaml"]
    for file, config, draft in zip(files, (PREFILL, DECODE), (prefill, decode), strict=True):
        file.write_text(arguments(config, draft))
    result = CliRunner().invoke(app, ["check", *map(str, files)], env={"COLUMNS": "400"})
    assert result.exit_code == 0, result.output
    assert ("does not have that draft model" in result.output) is named


def test_drafts_of_commands_in_one_file_are_told_apart(tmp_path: Path) -> None:
    file = tmp_path / "compose.yaml"
    commands = (
        f"vllm serve m --kv-transfer-config '{PREFILL}'",
        f"vllm serve m --speculative-config '{DRAFT}' --kv-transfer-config '{DECODE}'",
        f"vllm serve m --speculative-config={DRAFT} --kv-transfer-config '{DECODE}'",
    )
    file.write_text("script: |\n" + "".join(f"  {command}\n" for command in commands))
    _, *drafting = examine(str(file), {}).engines
    assert [json.loads(one.speculation)["model"] for one in drafting] == ["drafts/a", "drafts/a"]
    found = list(configs_together.drafts_together(examine(str(file), {}).engines))
    assert len(found) == 2


SGLANG = "PD_CONNECTOR_CONFIG='{\"pool\": %s}' python -m sglang.launch_server --model-path m"


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ("--page-size 64", ""),
        ("--page-size=96", "--page-size 96"),
        ("--page-size 64 \\\n --enable-lora", ""),
        ("--page-size 64 \\\n --enable-lmcache", "--enable-lmcache"),
        ("--disable-radix-cache", "--disable-radix-cache"),
        ("--disaggregation-mode prefill", "--disaggregation-transfer-backend None"),
        (
            "--disaggregation-mode prefill --disaggregation-transfer-backend pd_connector",
            "",
        ),
        (
            "--disaggregation-mode decode --disaggregation-transfer-backend pd_connector",
            "--disaggregation-decode-enable-radix-cache",
        ),
    ],
)
def test_an_sglang_engine_with_a_pool_is_checked_by_its_arguments(
    tmp_path: Path, arguments: str, named: str
) -> None:
    script = tmp_path / "run.sh"
    script.write_text(f"#!/bin/sh\n{SGLANG % 'true'} {arguments}\n")
    findings = examine(str(script), {}).findings
    assert [one.status for one in findings] == [Status.FAIL if named else Status.OK]
    assert named in findings[0].found


@pytest.mark.parametrize(
    ("config", "status", "said"),
    [
        ('{"codec": "int8"}', Status.OK, "codec 'int8'"),
        ('{"codc": "int8"}', Status.FAIL, "did you mean 'codec'?"),
        ('{"slots": 4, "slots": 8}', Status.FAIL, "key 'slots' is there twice"),
        ('{"host": "10.0.0.1"}', Status.FAIL, "without a key"),
        ('{"host": "10.0.0.1"}\' PD_CONNECTOR_KEY=\'$KEY', Status.OK, "host '10.0.0.1'"),
        ('{"pool": true, "host": "10.0.0.1"}\' PD_CONNECTOR_KEY=\'$KEY', Status.OK, "in use"),
    ],
)
def test_the_config_of_an_sglang_engine_is_checked(
    tmp_path: Path, config: str, status: Status, said: str
) -> None:
    script = tmp_path / "run.sh"
    command = "python -m sglang.launch_server --model-path m --page-size 64"
    script.write_text(f"#!/bin/sh\nPD_CONNECTOR_CONFIG='{config}' {command}\n")
    (finding,) = examine(str(script), {}).findings
    assert finding.status is status
    assert said in finding.found
    assert finding.area == f"{script}:2"


@pytest.mark.parametrize(
    "before",
    [
        "unset PD_CONNECTOR_CONFIG\n",
        "PD_CONNECTOR_CONFIG=@/etc/pd.json ",
        "# SGLang's is in PD_CONNECTOR_CONFIG of the unit; vLLM here:\n",
    ],
)
def test_an_object_behind_other_text_is_not_the_config_of_sglang(
    tmp_path: Path, before: str
) -> None:
    script = tmp_path / "run.sh"
    command = f"vllm serve m --kv-transfer-config '{json.dumps(RIGHT)}'"
    script.write_text(f"#!/bin/sh\n{before}{command}\n")
    assert not [one for one in told(str(script)) if one.status is Status.FAIL]


def test_a_variable_from_a_secret_is_not_the_config_of_sglang(tmp_path: Path) -> None:
    reference = {"secretKeyRef": {"name": "pd", "key": "config"}}
    variable = {"name": "PD_CONNECTOR_CONFIG", "valueFrom": reference}
    args = ["serve", "m", "--kv-transfer-config", json.dumps(RIGHT)]
    manifest = tmp_path / "pod.yaml"
    manifest.write_text(f"env: [{json.dumps(variable)}]\nargs: {json.dumps(args)}\n")
    assert not [one for one in told(str(manifest)) if one.status is Status.FAIL]


@pytest.mark.parametrize(
    "written",
    [
        "- name: PD_CONNECTOR_CONFIG\n  value: '%s'",
        "PD_CONNECTOR_CONFIG: '%s'",
        "PD_CONNECTOR_CONFIG: |-\n  %s",
        "- {name: PD_CONNECTOR_CONFIG, value: '%s'}",
    ],
)
def test_the_config_of_sglang_is_found_in_yaml(tmp_path: Path, written: str) -> None:
    manifest = tmp_path / "pod.yaml"
    manifest.write_text(written % '{"codc": "int8"}')
    assert "did you mean 'codec'?" in text_of(told(str(manifest)))


def test_each_engine_of_sglang_is_checked_with_its_own_config(tmp_path: Path) -> None:
    script = tmp_path / "run.sh"
    lines = [
        "#!/bin/sh",
        'export PD_CONNECTOR_CONFIG=\'{"codec": "int8"}\'',
        "python -m sglang.launch_server --page-size 24 &",
        "export PD_CONNECTOR_CONFIG='{\"pool\": true}'",
        "python -m sglang.launch_server --page-size 24 &",
        "python -m sglang.launch_server --page-size 64 &",
        "PD_CONNECTOR_CONFIG='{\"codc\": 1}' python -m sglang.launch_server",
    ]
    script.write_text("\n".join(lines))
    found = [(one.area.rpartition(":")[2], one.status) for one in examine(str(script), {}).findings]
    ok, fail = Status.OK, Status.FAIL
    assert found == [("2", ok), ("5", fail), ("6", ok), ("7", fail)]


def test_containers_of_sglang_can_have_their_config_behind_the_command(tmp_path: Path) -> None:
    manifest = tmp_path / "pod.yaml"
    container = (
        "- command: [python, -m, sglang.launch_server, --page-size, '24']\n"
        "  env: [{name: PD_CONNECTOR_CONFIG, value: '%s'}]\n"
    )
    manifest.write_text(container % '{"codec": "int8"}' + container % '{"pool": true}')
    found = {one.area.rpartition(":")[2]: one.status for one in examine(str(manifest), {}).findings}
    assert found == {"2": Status.OK, "3": Status.FAIL}


@pytest.mark.parametrize(
    ("name", "written"),
    [
        ("run.sh", "#!/bin/sh\nexport PD_CONNECTOR_CONFIG=%s\npython -m sglang.launch_server\n"),
        ("values.yaml", "env: [{name: PD_CONNECTOR_CONFIG, value: %s}]\n"),
        ("values.yaml", "PD_CONNECTOR_CONFIG: %s\n"),
    ],
)
def test_a_config_of_sglang_with_escaped_quotes_is_checked(
    tmp_path: Path, name: str, written: str
) -> None:
    file = tmp_path / name
    file.write_text(written % json.dumps('{"codec": "int8", "slots": 8}'))
    (finding,) = examine(str(file), {}).findings
    assert (finding.status, finding.found) == (Status.OK, "codec 'int8', slots 8")
    file.write_text(written % json.dumps('{"codc": "int8"}'))
    assert "did you mean 'codec'?" in text_of(told(str(file)))


@pytest.mark.parametrize(
    "written",
    [
        (
            "#!/bin/sh\nPD_CONNECTOR_CONFIG=@/etc/pd.json python -m sglang.launch_server "
            "--json-model-override-args '{\"a\": 2}'"
        ),
        '#!/bin/sh\nexport PD_CONNECTOR_CONFIG="$CONFIG"\npython -m sglang.launch_server',
        "PD_CONNECTOR_CONFIG: '@/etc/pd.json'",
        "- name: PD_CONNECTOR_CONFIG\n  valueFrom: {secretKeyRef: {name: pd, key: config}}",
    ],
)
def test_a_config_of_sglang_that_the_file_does_not_have_is_left_to_its_start(
    tmp_path: Path, written: str
) -> None:
    file = tmp_path / "file"
    file.write_text(written)
    (finding,) = examine(str(file), {}).findings
    assert finding.status is Status.OK
    assert "when the engine starts" in finding.found


def test_commands_of_a_page_are_a_script_without_a_first_line(tmp_path: Path) -> None:
    script = tmp_path / "pasted"
    exported = "export PD_CONNECTOR_CONFIG='{\"pool\": true}'\npython -m sglang.launch_server"
    for page_size, status in ((64, Status.OK), (24, Status.FAIL)):
        script.write_text(f"{exported} --model-path m --page-size {page_size}\n")
        assert [one.status for one in examine(str(script), {}).findings] == [status]
    script.write_text('vllm serve m --kv-transfer-config \'{"kv_conector": "PDConnector"}\'\n')
    assert "kv_conector" in text_of(told(str(script)))


def test_the_pool_of_an_sglang_engine_is_checked_as_vllms_is(tmp_path: Path) -> None:
    script = tmp_path / "run.sh"
    script.write_text(f"#!/bin/sh\n{SGLANG % json.dumps({'memry': '1GiB'})}\n")
    assert "did you mean 'memory'" in text_of(told(str(script)))
