# SPDX-License-Identifier: Apache-2.0
"""A config is right, or the error says which key, which value, and what to do."""

import secrets
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pd_connector.config import CODEC_GROUP, CODECS, HOST_VARIABLE, KEY_VARIABLE, Config
from pd_connector.control.keys import new_key
from pd_connector.errors import ConfigError
from pd_connector.kv.coding import CODINGS
from pd_connector.sglang.settings import load_config

KEY = "a secret of more than thirty-two characters"


def _load(environment: dict[str, str] | None = None, /, **extra: Any) -> Config:
    return Config.load(extra, environment or {}, "HOST_OF_THE_ENGINE")


def test_the_defaults_are_valid_and_stay_on_this_machine() -> None:
    config = _load()
    assert config.host == "127.0.0.1"
    assert config.on_failure == "recompute"
    assert config.slot_bytes == config.slot_mib * 2**20
    assert not config.permits("192.0.2.1")


@pytest.mark.parametrize(
    ("written", "meant"),
    [("transport", "transports"), ("lease", "lease_s"), ("slot_mb", "slot_mib"), ("Host", "host")],
)
def test_the_nearest_key_is_named_for_an_unknown_one(written: str, meant: str) -> None:
    with pytest.raises(
        ConfigError, match=rf"unknown config key '{written}'.*did you mean '{meant}'"
    ):
        _load(**{written: "x"})


def test_an_error_has_every_mistake() -> None:
    with pytest.raises(ConfigError) as caught:
        _load(codc="int8", slots=0, host="10.0.0.1")
    assert len(caught.value.args) == 3
    for mistake in ("'codc'", "slots 0", "host '10.0.0.1' without a key"):
        assert mistake in str(caught.value)


def test_a_value_is_not_judged_beside_one_that_cannot_be_read() -> None:
    """The host needs a key, and has one that is a number by mistake."""
    with pytest.raises(ConfigError) as caught:
        _load(key=12, host="10.0.0.1")
    assert caught.value.args == ("key: Expected `str`, got `int` (config key key)",)


def test_all_keys_are_named_for_one_that_is_like_none() -> None:
    with pytest.raises(ConfigError) as caught:
        _load(qqqqqqqq=1)
    for key in Config.__struct_fields__:
        assert key in str(caught.value)


@pytest.mark.parametrize(
    ("key", "value", "wanted"),
    [
        ("slots", "16", "got `str`: write it without quotes"),
        ("slots", 1.5, "Expected `int`"),
        ("slots", True, "Expected `int`"),
        ("slots", None, "Expected `int`"),
        ("insecure", "yes", "Expected `bool`"),
        ("host", 7, "Expected `str`"),
        ("lease_s", "30s", "got `str` (config"),
        ("transports", "tcp", 'got `str`: write ["tcp"]'),
        ("transports", [1], "Expected `str`"),
        ("on_failure", "retry", "must be `recompute` or `fail`"),
        ("direction", "rea", "did you mean 'read'? It must be `auto` or `write` or `read`"),
        ("direction", True, "must be `auto` or `write` or `read`"),
        ("direction", "1", "must be `auto` or `write` or `read` (config"),
        ("audit", True, "must be `first` or `off` or a number"),
        ("audit", "0.5", "must be `first` or `off` or a number: write it without quotes"),
        ("model_id", 7, "Expected `str`"),
        ("codec", 8, "Expected `str`"),
        ("overlap", True, "must be `auto` or `off` or `step` or `layer`"),
        ("overlap", "chunk", "must be `auto` or `off` or `step` or `layer`"),
        ("direction", "both", "must be `auto` or `write` or `read`"),
        ("defer_pages", 1, "Expected `bool`"),
    ],
)
def test_an_ill_typed_value_is_named_with_its_key_and_the_type_wanted(
    key: str, value: object, wanted: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        _load(**{key: value})
    message = str(caught.value)
    assert wanted in message
    assert f"{key} {value!r}" in message
    assert f"config key {key}" in message


def test_an_unknown_transport_is_named_with_those_that_exist_and_how_to_add_one() -> None:
    with pytest.raises(ConfigError) as caught:
        _load(transports=["shm", "tpc"])
    message = str(caught.value)
    for said in ("transport 'tpc'", "shm, tcp, nixl, ucx", "config key transports"):
        assert said in message
    assert "pd_connector.transports" in message


def test_an_unknown_codec_is_named_with_those_that_exist_and_how_to_add_one() -> None:
    with pytest.raises(ConfigError) as caught:
        _load(codec="zip")
    message = str(caught.value)
    for said in ("codec 'zip'", "auto, fp8_e4m3, int8, raw", "config key codec", CODEC_GROUP):
        assert said in message
    assert set(CODECS) == {"auto", *CODINGS}


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("model_id", "m" * 300),
        ("slots", 0),
        ("slots", -1),
        ("slots", 1_000_000),
        ("slot_mib", 0),
        ("slot_mib", 4096),
        ("session_timeout_s", 1e7),  # as "for ever" is sometimes written
        ("heartbeat_s", 1e-9),
        ("lease_s", 0),
        ("stall_timeout_s", -3.0),
        ("wait_timeout_s", float("nan")),
        ("connect_timeout_s", float("inf")),
        ("transports", []),
        ("transports", ["tcp", "shm", "tcp"]),
        ("session_timeout_s", 1.5),
        ("lease_s", 1.0),
        ("switch_interval_ms", 0),
        ("switch_interval_ms", 0.01),
        ("switch_interval_ms", 5.1),
        ("switch_interval_ms", float("nan")),
    ],
)
def test_a_value_that_cannot_work_is_refused_by_name(key: str, value: object) -> None:
    with pytest.raises(ConfigError, match=key):
        _load(**{key: value})


@pytest.mark.parametrize("host", ["", "*", "0.0.0.0", "::", "0::0", "::0"])
def test_a_wildcard_is_no_host_whatever_else_is_set(host: str) -> None:
    for permission in ({"key": KEY}, {"insecure": True}):
        with pytest.raises(ConfigError, match="not a wildcard"):
            _load(host=host, **permission)


@pytest.mark.parametrize(
    "host", ["10.0.0.1:8000", "http://10.0.0.1", "x..y", f"{'a' * 64}.example", "a b"]
)
def test_what_can_be_no_host_is_refused_with_what_it_should_be(host: str) -> None:
    with pytest.raises(ConfigError, match=r"a name or an address alone.*config key host"):
        _load(host=host, insecure=True)


@pytest.mark.parametrize("host", ["192.0.2.1", "prefill.example", "2001:db8::1", "127.0.0.1.evil"])
def test_without_a_key_a_host_other_than_loopback_is_refused(host: str) -> None:
    with pytest.raises(ConfigError, match=r"PD_CONNECTOR_KEY .* `insecure: true`"):
        _load(host=host)
    assert _load(host=host, key=KEY).permits(host)
    assert _load(host=host, insecure=True).permits(host)


def test_a_short_key_is_refused_and_not_shown() -> None:
    with pytest.raises(ConfigError, match="key of 7 characters") as caught:
        _load(key="hunter2")
    assert "hunter2" not in str(caught.value)


def test_the_key_is_in_no_message_and_not_in_what_a_config_looks_like() -> None:
    with pytest.raises(ConfigError, match="key: Expected `str`, got `array`") as caught:
        _load(key=[KEY])
    assert KEY not in str(caught.value)
    assert KEY not in f"{_load(key=KEY)} {_load(key=KEY)!r}"
    assert "key='***'" in repr(_load(key=KEY))
    assert "key=''" in repr(_load())


@pytest.mark.parametrize(
    "key",
    [
        "hunter2",
        "correct horse battery staple",
        "a" * 64,
        "passwordpasswordpasswordpassword",
        "abcdefgh12345678" * 4,
    ],
)
def test_a_key_that_can_be_guessed_is_refused_with_how_to_make_one(key: str) -> None:
    with pytest.raises(ConfigError, match=r"`pd-connector key` makes a strong key") as caught:
        _load(key=key)
    assert key not in str(caught.value)


def test_keys_that_are_made_are_taken() -> None:
    for made in (new_key(), secrets.token_hex(16), secrets.token_urlsafe(32)):
        assert _load(key=made).key == made


@pytest.mark.parametrize(
    ("entry", "within", "without"),
    [
        ("10.0.0.0/8", ["10.1.2.3", "::ffff:10.9.9.9"], ["11.0.0.1", "prefill", "10.1"]),
        ("192.0.2.7", ["192.0.2.7"], ["192.0.2.8"]),
        ("2001:db8::/32", ["2001:db8::1"], ["2001:db9::1", "10.0.0.1"]),
        ("prefill-0.example", ["prefill-0.example", "PREFILL-0.example"], ["prefill-0", "x"]),
        (
            "*.pods.example",
            ["a.pods.example", "a.b.pods.example"],
            ["pods.example", "apods.example"],
        ),
    ],
)
def test_peers_are_networks_addresses_and_names(
    entry: str, within: list[str], without: list[str]
) -> None:
    config = _load(peers=[entry])
    assert all(config.is_peer(host) for host in within)
    assert not any(config.is_peer(host) for host in without)


@pytest.mark.parametrize("entry", ["", "10.0.0.0/33", "a b", "http://p:1", "*", "*.", "[::1]"])
def test_what_is_no_peer_is_refused_by_name(entry: str) -> None:
    with pytest.raises(ConfigError, match="config key peers"):
        _load(peers=[entry])


def test_variables_fill_in_what_the_config_leaves_out() -> None:
    environment = {"PD_CONNECTOR_KEY": KEY, "PD_CONNECTOR_HOST": "10.0.0.1"}
    config = _load(environment)
    assert (config.key, config.host) == (KEY, "10.0.0.1")
    config = _load(environment, host="10.0.0.2")
    assert (config.key, config.host) == (KEY, "10.0.0.2")
    assert _load({"PD_CONNECTOR_HOST": ""}).host == "127.0.0.1"


def test_the_engines_own_host_comes_before_loopback_where_other_machines_may_come() -> None:
    environment = {"HOST_OF_THE_ENGINE": "10.0.0.7"}
    assert _load(environment, insecure=True).host == "10.0.0.7"
    assert _load(environment, key=KEY).host == "10.0.0.7"
    assert _load(environment | {"PD_CONNECTOR_KEY": KEY}).host == "10.0.0.7"
    assert _load(environment).host == "127.0.0.1", "without a key only loopback"
    assert _load({"HOST_OF_THE_ENGINE": "0.0.0.0"}, key=KEY).host == "127.0.0.1"
    assert _load({"HOST_OF_THE_ENGINE": ""}, key=KEY).host == "127.0.0.1"
    environment["PD_CONNECTOR_HOST"] = "10.0.0.1"
    assert _load(environment, key=KEY).host == "10.0.0.1"
    assert _load(environment, key=KEY, host="10.0.0.2").host == "10.0.0.2"


_json = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=5,
)


@given(st.dictionaries(st.sampled_from(Config.__struct_fields__) | st.text(), _json, max_size=4))
def test_any_config_loads_or_ends_in_a_config_error(extra: dict[str, Any]) -> None:
    try:
        config = Config.load(extra, {})
    except ConfigError:
        return
    assert config.permits(config.host)


@pytest.mark.parametrize(("value", "share"), [("first", 0.0), ("off", 0.0), (0.25, 0.25), (1, 1.0)])
def test_what_is_audited_is_a_word_or_a_part(value: object, share: float) -> None:
    assert Config.load({"audit": value}, {}).audit_share == share


@pytest.mark.parametrize("value", [0, 2, -0.5, True, None, "all"])
def test_no_other_audit_is_taken(value: object) -> None:
    with pytest.raises(ConfigError, match=r"^audit .*\(config key audit\)$"):
        Config.load({"audit": value}, {})


def test_a_key_that_is_no_text_is_refused_by_name() -> None:
    # As Python gives a variable whose bytes are not UTF-8.
    with pytest.raises(ConfigError, match="key has bytes that are not UTF-8 text"):
        _load(key="a long key that cannot be guessed \udcff")


@pytest.mark.parametrize("space", ["\n", "\r\n", " ", "\t"])
def test_the_end_of_a_line_is_no_part_of_a_key_or_of_a_host(space: str) -> None:
    key = new_key()
    told = _load({KEY_VARIABLE: key + space, HOST_VARIABLE: f"10.0.0.1{space}"})
    assert (told.key, told.host) == (key, "10.0.0.1")
    assert _load(key=key + space).key == key


@pytest.mark.parametrize("key", ["control_port", "data_port"])
@pytest.mark.parametrize("value", [0, 7100, "7100", "7100-7107"])
def test_a_port_or_a_range_of_ports_may_be_set(key: str, value: int | str) -> None:
    assert getattr(_load(**{key: value}), key) == value


@pytest.mark.parametrize("key", ["control_port", "data_port"])
@pytest.mark.parametrize("value", [-1, 65536, "7107-7100", "0-7", "7100-", "any", "", 7100.5, True])
def test_what_is_no_port_is_told(key: str, value: object) -> None:
    with pytest.raises(ConfigError, match=key):
        _load(**{key: value})


def test_control_and_data_share_no_port() -> None:
    with pytest.raises(ConfigError, match="must share no port with control_port"):
        _load(control_port="7100-7107", data_port=7107)


def test_a_key_of_the_release_before_has_no_effect_and_is_named(
    caplog: pytest.LogCaptureFixture,
) -> None:
    assert Config.load({"weights": "full"}, {}) == Config.load({}, {})
    assert "config key weights" in caplog.text


def test_the_variable_of_an_sglang_engine_has_each_key_once(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"PD_CONNECTOR_CONFIG: key 'slots' is there twice"):
        load_config('{"slots": 4, "slots": 8}')
    file = tmp_path / "config.json"
    file.write_text('{"slots": 4}')
    assert load_config(f"@{file}\n").slots == 4
    file.write_text('{"slots": 4, "slots": 8}')
    with pytest.raises(ConfigError, match=rf"{file}'?: key 'slots' is there twice"):
        load_config(f"@{file}")


def test_a_name_that_is_not_text_is_refused_before_it_is_sent() -> None:
    for name in ("\ud800", "a\nb", "a\x1b[1m", "a\x85"):
        with pytest.raises(ConfigError, match=r"model_id '.*': must be text") as raised:
            _load(model_id=name)
        str(raised.value).encode()


@pytest.mark.parametrize(
    "name", ["می\u200cخواهم", "क्\u200dष", "a\xa0b", "模型\u3000一", "📦\ufe0f"]
)
def test_a_name_may_be_of_any_script(name: str) -> None:
    assert _load(model_id=name).model_id == name


@pytest.mark.parametrize(
    "text", ['@{"key": "KEY"}', '{"key": "KEY"', '{"key": ["KEY"]}', '["KEY"]']
)
def test_the_key_in_the_variable_of_an_sglang_engine_is_not_shown(text: str) -> None:
    with pytest.raises(ConfigError) as raised:
        load_config(text.replace("KEY", KEY))
    assert KEY not in str(raised.value)
