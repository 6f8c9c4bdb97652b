# SPDX-License-Identifier: Apache-2.0
"""What cannot be moved is refused when the engine starts, by name; a config is read or refused."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("sglang.srt")

from sglang.srt.disaggregation.base.conn import StateType
from sglang.srt.disaggregation.utils import KVClassType, TransferBackend, get_kv_class
from sglang.srt.plugins.hook_registry import HookRegistry
from sglang.srt.server_args import ServerArgs

from pd_connector.errors import ConfigError, PDConnectorError, UnsupportedGeometryError
from pd_connector.kv.geometry import Geometry, Group, Section, Shard, state_group
from pd_connector.sglang import plugin
from pd_connector.sglang.pool_settings import check_arguments
from pd_connector.sglang.settings import load_config
from pd_connector.sglang.support import _VARIABLES, _WANTED, check_described, check_supported

ARGS = SimpleNamespace(**_WANTED, disaggregation_mode="prefill", enable_pd_role_switch=False)
ALONE = SimpleNamespace(
    attn_cp_size=1,
    pp_size=1,
    dcp_size=1,
    dp_size=1,
    attn_dp_size=1,
    load_balance_method="round_robin",
)
DECODE = SimpleNamespace(**_WANTED, disaggregation_mode="decode", enable_pd_role_switch=False)
SWITCHES = SimpleNamespace(
    **_WANTED,
    disaggregation_mode="prefill",
    enable_pd_role_switch=True,
    disaggregation_decode_enable_radix_cache=True,
    disable_radix_cache=False,
)
PLAIN = SimpleNamespace(state_types=[], num_draft_entries=0)
DRAFTS = SimpleNamespace(state_types=[], num_draft_entries=2)


def changed(known: Any, **changes: Any) -> Any:
    return SimpleNamespace(**vars(known) | changes)


def test_every_argument_that_is_looked_at_is_one_of_sglangs() -> None:
    known = {name for base in ServerArgs.__mro__ for name in getattr(base, "__annotations__", {})}
    assert _WANTED.keys() <= known


def test_an_engine_as_it_comes_is_fine() -> None:
    check_supported(PLAIN, ARGS, ALONE)
    check_supported(PLAIN, changed(ARGS, enable_pdmux=None), ALONE)
    check_supported(PLAIN, SWITCHES, ALONE)
    check_supported(DRAFTS, changed(ARGS, speculative_algorithm="EAGLE"), ALONE)
    check_supported(changed(PLAIN, state_types=[StateType.SWA]), ARGS, ALONE)
    check_supported(changed(PLAIN, state_types=[StateType.MAMBA]), ARGS, ALONE)
    check_supported(changed(PLAIN, state_types=[StateType.DSA]), ARGS, ALONE)


@pytest.mark.parametrize(
    ("kv_args", "args", "parallel", "told"),
    [
        (PLAIN, changed(ARGS, tokenizer_worker_num=2), ALONE, "--tokenizer-worker-num 2"),
        (
            PLAIN,
            changed(ARGS, speculative_algorithm="NGRAM"),
            ALONE,
            "--speculative-algorithm NGRAM",
        ),
        (
            PLAIN,
            changed(ARGS, speculative_algorithm="NEXTN"),
            ALONE,
            "--speculative-algorithm NEXTN with a draft model without a KV pool",
        ),
        (
            changed(DRAFTS, state_types=[StateType.MAMBA]),
            changed(ARGS, speculative_algorithm="EAGLE"),
            ALONE,
            "--speculative-algorithm EAGLE with states",
        ),
        (
            DRAFTS,
            changed(ARGS, speculative_algorithm="EAGLE"),
            changed(ALONE, pp_size=2),
            "--speculative-algorithm EAGLE with pp_size 2",
        ),
        (
            DRAFTS,
            changed(SWITCHES, speculative_algorithm="EAGLE3"),
            ALONE,
            "--speculative-algorithm EAGLE3 with --enable-pd-role-switch",
        ),
        (PLAIN, changed(ARGS, enable_hisparse=True), ALONE, "--enable-hisparse True"),
        (
            PLAIN,
            changed(SWITCHES, disaggregation_decode_enable_radix_cache=False),
            ALONE,
            "--enable-pd-role-switch with the radix cache of prefill",
        ),
        (
            PLAIN,
            SWITCHES,
            changed(ALONE, pp_size=2),
            "--enable-pd-role-switch with pp_size 2",
        ),
        (
            PLAIN,
            SWITCHES,
            changed(ALONE, dp_size=2, load_balance_method="follow_bootstrap_room"),
            "--enable-pd-role-switch with dp_size 2",
        ),
        (
            PLAIN,
            changed(SWITCHES, ep_size=2),
            ALONE,
            "--enable-pd-role-switch with ep_size 2",
        ),
        (
            PLAIN,
            changed(ARGS, disaggregation_decode_host_receive_threshold=0.5),
            ALONE,
            "--disaggregation-decode-host-receive-threshold 0.5",
        ),
        (PLAIN, ARGS, changed(ALONE, attn_cp_size=2), "attn_cp_size 2"),
        (PLAIN, ARGS, changed(ALONE, dcp_size=2), "dcp_size 2"),
        (PLAIN, DECODE, changed(ALONE, pp_size=2), "pp_size 2 of a decode engine"),
        (PLAIN, ARGS, changed(ALONE, dp_size=2), "--load-balance-method round_robin"),
        (PLAIN, ARGS, changed(ALONE, attn_dp_size=2), "--load-balance-method round_robin"),
        (changed(PLAIN, state_types=[StateType.DSA_TAIL]), ARGS, ALONE, "kind dsa_tail"),
        (changed(PLAIN, state_types=[StateType.SWA_RING]), ARGS, ALONE, "kind swa_ring"),
        (changed(PLAIN, state_types=[StateType.QSA_COMPRESSED]), ARGS, ALONE, "qsa_compressed"),
        (
            changed(PLAIN, state_types=[StateType.SWA, StateType.MAMBA]),
            ARGS,
            ALONE,
            "kinds swa and mamba in one model",
        ),
        (
            changed(PLAIN, state_types=[StateType.MAMBA]),
            SWITCHES,
            ALONE,
            "--enable-pd-role-switch with recurrent states",
        ),
    ],
)
def test_what_is_not_supported_is_named(kv_args: Any, args: Any, parallel: Any, told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        check_supported(kv_args, args, parallel)


def test_states_that_the_cache_has_no_views_of_are_refused() -> None:
    """SGLang's own backends would move them, and a decode engine would go on from zeros."""
    geometry = Geometry(
        Shard(0, 1, 0, 1), (state_group((0,), (Section("ssm", 1, 1, 1, "float32"),)),)
    )
    recurrent = changed(PLAIN, state_types=[StateType.MAMBA])
    check_described(recurrent, geometry)
    dense = Group("attention", (0,), 1, 8, 8, 16, 0, "bfloat16", "", True)
    bare = Geometry(geometry.shard, (dense,))
    check_described(PLAIN, bare)
    with pytest.raises(UnsupportedGeometryError, match="recurrent states beside a KV pool"):
        check_described(recurrent, bare)


@pytest.mark.parametrize("name", sorted(_WANTED))
def test_every_argument_of_which_one_value_works_is_refused_with_another(name: str) -> None:
    flag = "--" + name.replace("_", "-")
    for other in ("another", 7):
        with pytest.raises(ConfigError, match=f"{flag} {other}"):
            check_supported(PLAIN, changed(ARGS, **{name: other}), ALONE)


@pytest.mark.parametrize("name", sorted(_VARIABLES))
def test_variables_that_make_sglang_ask_for_more_are_refused(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setenv(name, "0")
    check_supported(PLAIN, ARGS, ALONE)
    monkeypatch.setenv(name, "1")
    with pytest.raises(ConfigError, match=f"{name}=1.*unset it"):
        check_supported(PLAIN, ARGS, ALONE)


def test_pipelines_and_replicas_are_fine_where_a_decode_engine_finds_them() -> None:
    by_room = changed(ALONE, dp_size=2, load_balance_method="follow_bootstrap_room")
    check_supported(PLAIN, ARGS, by_room)
    check_supported(PLAIN, ARGS, changed(ALONE, pp_size=2))
    check_supported(PLAIN, DECODE, changed(ALONE, dp_size=2))


def test_a_config_comes_from_a_variable_or_a_file(tmp_path: Path) -> None:
    assert load_config('{"codec": "int8"}').codec == "int8"
    file = tmp_path / "config.json"
    file.write_text('{"slots": 3}')
    assert load_config(f"@{file}").slots == 3
    assert load_config(" ") == load_config("{}")


def test_sglangs_own_address_of_this_host_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SGLANG_HOST_IP", "10.0.0.7")
    assert load_config('{"insecure": true}').host == "10.0.0.7"
    assert load_config("").host == "127.0.0.1", "without a key only loopback"


@pytest.mark.parametrize("text", ["{", "[]", "7", "@/no/such/file", '{"codek": "int8"}'])
def test_a_config_that_cannot_be_read_is_refused(text: str) -> None:
    with pytest.raises(ConfigError):
        load_config(text)


@pytest.mark.parametrize("text", ['{"key": "hunter2", }', '["hunter2"]', "hunter2"])
def test_what_stands_in_the_variable_is_not_repeated(text: str) -> None:
    """It may have the key in it, and the message goes into the log."""
    with pytest.raises(ConfigError, match="PD_CONNECTOR_CONFIG: ") as caught:
        load_config(text)
    assert "hunter2" not in str(caught.value)


@pytest.mark.parametrize("audit", ["first", 0.01])
def test_an_audit_that_is_asked_for_is_refused_because_nothing_is_computed(audit: object) -> None:
    with pytest.raises(ConfigError, match="computes no prompt"):
        load_config(json.dumps({"audit": audit}))
    assert load_config('{"audit": "off"}').audit == "off"


def test_what_a_pool_cannot_do_in_a_pair_is_refused_and_not_left_out_in_silence() -> None:
    ours = {"disaggregation_transfer_backend": "pd_connector"}
    cached = {"disaggregation_mode": "decode", "disaggregation_decode_enable_radix_cache": True}
    check_arguments(SimpleNamespace(disaggregation_mode="null"))  # controls
    check_arguments(SimpleNamespace(disaggregation_mode="prefill", **ours))
    check_arguments(SimpleNamespace(**cached, **ours))
    for given, named in (
        ({"disaggregation_mode": "prefill"}, "--disaggregation-transfer-backend None"),
        (
            {**cached, "disaggregation_transfer_backend": "nixl"},
            "--disaggregation-transfer-backend nixl",
        ),
        ({"disaggregation_mode": "decode", **ours}, "--disaggregation-decode-enable-radix-cache"),
        (
            {"disaggregation_mode": "prefill", "enable_pd_role_switch": True, **ours},
            "--enable-pd-role-switch",
        ),
    ):
        with pytest.raises(ConfigError, match=named):
            check_arguments(SimpleNamespace(**given))


def test_the_backend_is_registered_and_its_classes_are_ours() -> None:
    plugin.register()
    plugin.register()  # harmless to repeat
    HookRegistry.apply_hooks()
    from sglang.srt.disaggregation import utils

    assert TransferBackend("pd_connector").value == "pd_connector"
    made = utils.get_kv_class(TransferBackend("pd_connector"), KVClassType.SENDER)
    assert made.__module__ == "pd_connector.sglang.sender"
    assert get_kv_class(TransferBackend.NIXL, KVClassType.KVARGS) is not None


def test_an_sglang_whose_functions_are_others_is_told_so(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """SGLang goes on after that: its parser would only call the backend's name invalid."""
    target = "sglang.srt.disaggregation.prefill.PrefillBootstrapQueue.add"
    monkeypatch.setattr(plugin, "HOOKS", (plugin.Hook(target, ("self", "request"), print),))
    with pytest.raises(PDConnectorError, match=r"add has the parameters .*wanted"):
        plugin.register()
    assert "will not be known as a transfer backend" in caplog.text
    missing = plugin.Hook("sglang.srt.disaggregation.prefill.no_such", (), print)
    monkeypatch.setattr(plugin, "HOOKS", (missing,))
    with pytest.raises(PDConnectorError, match="SGLang has no"):
        plugin.register()
