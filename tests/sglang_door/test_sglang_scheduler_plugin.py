# SPDX-License-Identifier: Apache-2.0
"""How the scheduler comes into SGLang, how requests get their classes, and what is refused."""

from __future__ import annotations

import argparse
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("sglang.srt")

from sglang.srt.managers.io_struct import EmbeddingReqInput, GenerateReqInput
from sglang.srt.server_args import ServerArgs
from sglang_door.sglang_rig import prompt, request

from pd_connector.errors import ConfigError
from scheduler_plugins.qos.classes import QosError
from scheduler_plugins.sglang import plugin
from scheduler_plugins.sglang.plugin import POLICY, check_routes, check_supported
from scheduler_plugins.sglang.requests import ClassMarker, qos_of

ROUTED = """
scheduler:
  qos_classes:
    - {name: premium, reserved_fraction: 0.5, priority: 100}
    - {name: free, reserved_fraction: 0.5, priority: 10}
request_router:
  routes:
    - {match: {header: "x-customer-tier: premium"}, qos: premium}
"""


def marker(folder: Path, text: str) -> ClassMarker:
    path = folder / "scheduler.yaml"
    path.write_text(text)
    return ClassMarker(path)


def scheduler(**changed: Any) -> Any:
    return SimpleNamespace(dllm_config=None, **changed)


def disaggregation(mode: str = "null", **changed: Any) -> Any:
    return SimpleNamespace(disaggregation_mode=mode, enable_pdmux=False, **changed)


def test_every_function_that_is_hooked_is_there_as_it_is_known() -> None:
    for function in (*plugin._HOOKS, *plugin._OVERRIDDEN):
        plugin._check(function)


def test_a_function_that_has_changed_is_named() -> None:
    target = "sglang.srt.managers.scheduler.Scheduler.init_schedule_policy"
    with pytest.raises(ConfigError, match=r"init_schedule_policy.*wanted"):
        plugin._check(plugin._Function(target, ("self", "order")))
    with pytest.raises(ConfigError, match=r"has no .*Scheduler.order"):
        plugin._check(plugin._Function("sglang.srt.managers.scheduler.Scheduler.order", ()))


def test_the_policy_is_a_choice_of_the_command_line_and_the_others_stay() -> None:
    parser = argparse.ArgumentParser()
    ServerArgs.add_cli_args(parser)
    with pytest.raises(SystemExit):
        parser.parse_args(["--model-path", "m", "--schedule-policy", POLICY])
    plugin._add_choice(None, parser)
    for name in (POLICY, "lpm"):
        found = parser.parse_args(["--model-path", "m", "--schedule-policy", name])
        assert found.schedule_policy == name


def test_a_header_decides_the_class_and_the_client_cannot(tmp_path: Path) -> None:
    found = marker(tmp_path, ROUTED)
    claimed = {"custom_params": {"qos": "premium", "kept": 1}}
    asked = GenerateReqInput(text="a", sampling_params=dict(claimed))
    found.mark(asked, {})
    assert asked.sampling_params["custom_params"] == {"qos": "free", "kept": 1}
    found.mark(asked, {"x-customer-tier": "premium"})
    assert asked.sampling_params["custom_params"]["qos"] == "premium"
    assert claimed == {"custom_params": {"qos": "premium", "kept": 1}}


def test_batches_and_embeddings_get_their_class_too(tmp_path: Path) -> None:
    found, headers = marker(tmp_path, ROUTED), {"x-customer-tier": "premium"}
    several = GenerateReqInput(text=["a", "b"], sampling_params=[{}, {"n": 1}])
    embedded = EmbeddingReqInput(text="a")
    for asked in (several, embedded):
        found.mark(asked, headers)
    assert [one["custom_params"]["qos"] for one in several.sampling_params] == ["premium"] * 2
    assert embedded.sampling_params["custom_params"] == {"qos": "premium"}


@pytest.mark.parametrize("custom", [[1], "x", 5, [], None])
def test_custom_parameters_that_are_none_get_a_class_all_the_same(
    tmp_path: Path, custom: object
) -> None:
    """SGLang takes such a request; it was answered with 500."""
    asked = GenerateReqInput(text="a", sampling_params={"custom_params": custom})
    marker(tmp_path, ROUTED).mark(asked, {})
    assert asked.sampling_params == {"custom_params": {"qos": "free"}}


def test_sampling_parameters_that_are_none_are_left_to_sglang(tmp_path: Path) -> None:
    asked = GenerateReqInput(text=["a", "b"], sampling_params=["x", {}])
    marker(tmp_path, ROUTED).mark(asked, {})
    assert asked.sampling_params == ["x", {"custom_params": {"qos": "free"}}]


def test_without_routes_the_client_names_its_class(tmp_path: Path) -> None:
    asked = GenerateReqInput(text="a", sampling_params={"custom_params": {"qos": "free"}})
    marker(tmp_path, "scheduler: {policy: srjf}").mark(asked, {})
    assert asked.sampling_params == {"custom_params": {"qos": "free"}}
    assert qos_of(request("r", prompt(4), qos="free")) == "free"
    assert qos_of(request("r", prompt(4))) == ""
    wrong = request("r", prompt(4))
    wrong.sampling_params.custom_params = {"qos": ["free"]}
    assert qos_of(wrong) == ""


def test_a_file_that_becomes_wrong_leaves_the_rules_in_force(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("scheduler_plugins.qos.file.LOOK_EVERY_S", 0.0)
    found = marker(tmp_path, ROUTED)
    (tmp_path / "scheduler.yaml").write_text("request_router: {routes: 3}")
    asked = GenerateReqInput(text="a", sampling_params=None)
    found.mark(asked, {"x-customer-tier": "premium"})
    assert asked.sampling_params["custom_params"]["qos"] == "premium"
    with pytest.raises(QosError, match=r"scheduler\.yaml"):
        ClassMarker(tmp_path / "scheduler.yaml")


@pytest.mark.parametrize(
    ("parallel", "disagg", "named"),
    [
        ({"pp_size": 2}, {}, "--pipeline-parallel-size 2"),
        ({"attn_dp_size": 2}, {}, "--enable-dp-attention"),
        ({"attn_cp_size": 2}, {}, "--attn-cp-size 2"),
        ({}, {"mode": "decode"}, "--disaggregation-mode decode"),
    ],
)
def test_what_cannot_be_ordered_is_refused_by_name(
    parallel: dict[str, int], disagg: dict[str, str], named: str
) -> None:
    with pytest.raises(ConfigError, match=named):
        check_supported(scheduler(), SimpleNamespace(**parallel), disaggregation(**disagg))


def test_a_prefill_engine_and_a_lone_one_are_not_refused() -> None:
    for mode in ("null", "prefill"):
        check_supported(scheduler(), SimpleNamespace(pp_size=1), disaggregation(mode))


def test_several_tokenizers_know_no_classes() -> None:
    check_routes(4, routes=False)
    with pytest.raises(ConfigError, match="--tokenizer-worker-num 4"):
        check_routes(4, routes=True)
