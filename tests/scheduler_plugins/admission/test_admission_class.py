# SPDX-License-Identifier: Apache-2.0
"""The class of a request: from its headers into its body, whatever the body says."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
from admission_fakes import Bench
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from scheduler_plugins.admission.endpoints import GENERATE
from scheduler_plugins.middleware import middleware
from scheduler_plugins.middleware.engine_config import is_half_of_a_pair
from scheduler_plugins.qos.trust import HEADER, KEY_VARIABLE, class_key, signed

PREMIUM = [("X-Customer-Tier", "premium")]
SECRET = "a secret that all routers of a test share"
LATE = {"prompt": list(range(5000))}
"""Takes five seconds to compute, and premium users are promised one."""


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(tmp_path)


@pytest.mark.parametrize("path", middleware.PATHS)
def test_a_header_becomes_the_class_in_the_body(bench: Bench, path: str) -> None:
    assert bench.post({"prompt": "a"}, path, PREMIUM).status == 200
    assert bench.server.last_body == {"prompt": "a", "vllm_xargs": {"qos": "premium"}}


def test_a_request_of_token_ids_has_its_class_among_its_sampling_parameters(bench: Bench) -> None:
    extra = {"qos": "premium", "other": 3}
    sent = {"token_ids": [1], "sampling_params": {"max_tokens": 4, "extra_args": extra}}
    assert bench.post(sent, GENERATE).status == 200
    told = bench.server.last_body["sampling_params"]
    assert told == {"max_tokens": 4, "extra_args": {"qos": "free", "other": 3}}
    # The engine refuses what has no place for a class.
    for odd in (None, [], {"extra_args": "premium"}):
        raw = json.dumps({"token_ids": [1], "sampling_params": odd}).encode()
        bench.post(raw, GENERATE, PREMIUM)
        assert bench.server.bodies[-1] == raw


def test_a_request_of_token_ids_that_would_be_late_is_refused(bench: Bench) -> None:
    bench.board.write(waiting_s=4.0)
    sent = {"token_ids": LATE["prompt"], "sampling_params": {"max_tokens": 4}}
    assert bench.post(sent, GENERATE, PREMIUM).status == 429


def test_without_the_header_the_last_route_counts(bench: Bench) -> None:
    bench.post({"prompt": "a"})
    assert bench.server.last_body["vllm_xargs"] == {"qos": "free"}


def test_without_any_route_it_is_the_default_class(tmp_path: Path) -> None:
    bench = Bench(None)
    bench.post({"prompt": "a", "vllm_xargs": {"qos": "premium"}})
    assert bench.server.last_body["vllm_xargs"] == {"qos": "default"}


def test_a_client_does_not_choose_its_class(bench: Bench) -> None:
    bench.post({"prompt": "a", "vllm_xargs": {"qos": "premium", "other": 3}})
    assert bench.server.last_body["vllm_xargs"] == {"qos": "free", "other": 3}


def test_a_key_given_twice_does_not_help_either(bench: Bench) -> None:
    bench.post(b'{"vllm_xargs": {"qos": "a"}, "vllm_xargs": {"qos": "premium"}, "prompt": "a"}')
    assert bench.server.bodies[-1].count(b"vllm_xargs") == 1
    assert bench.server.last_body["vllm_xargs"] == {"qos": "free"}


def test_nor_does_a_header_given_twice(bench: Bench) -> None:
    bench.post({"prompt": "a"}, headers=[("x-customer-tier", "free"), *PREMIUM])
    assert bench.server.last_body["vllm_xargs"] == {"qos": "free"}


def test_the_length_in_the_header_is_that_of_the_new_body(bench: Bench) -> None:
    bench.post({"prompt": "ä"}, headers=PREMIUM)
    lengths = [v for k, v in bench.server.scopes[-1]["headers"] if k == b"content-length"]
    assert lengths == [str(len(bench.server.bodies[-1])).encode()]


@pytest.mark.parametrize("path", ["/v1/models", "/tokenize", "/v1/completions/x"])
def test_other_paths_pass_untouched(bench: Bench, path: str) -> None:
    raw = b'{ "prompt" : "a" }'
    bench.post(raw, path, PREMIUM)
    assert bench.server.bodies == [raw]


@pytest.mark.parametrize(
    "raw", [b"", b"no json", b"[1]", b'"a"', b'{"vllm_xargs": 3}', b"\xff\xfe", b"[" * 100_000]
)
def test_what_the_engine_will_refuse_passes_untouched(bench: Bench, raw: bytes) -> None:
    bench.post(raw, headers=PREMIUM)
    assert bench.server.bodies == [raw]


_json = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=12,
)


@settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(body=st.dictionaries(st.text(), _json, max_size=5), path=st.sampled_from(middleware.PATHS))
def test_nothing_but_the_class_changes(bench: Bench, body: dict, path: str) -> None:
    body.pop("vllm_xargs", None)
    assert bench.post(body, path).status == 200
    assert bench.server.last_body == {**body, "vllm_xargs": {"qos": "free"}}


def test_a_body_above_the_limit_is_refused_unread(bench: Bench, monkeypatch) -> None:
    monkeypatch.setattr(middleware, "BODY_BYTES", 1000)
    got = bench.post({"prompt": "a" * 1000})
    assert (got.status, got.error["code"], bench.server.bodies) == (413, 413, [])


def test_nor_does_a_false_length_get_it_in(bench: Bench, monkeypatch) -> None:
    monkeypatch.setattr(middleware, "BODY_BYTES", 1000)
    monkeypatch.setattr(
        "scheduler_plugins.middleware.middleware.headers_of", lambda scope: {"content-length": "10"}
    )
    assert bench.post({"prompt": "a" * 1000}).status == 413


def test_a_change_of_the_file_is_seen_within_a_second(bench: Bench) -> None:
    bench.post({"prompt": "a"})  # looks at the file; the next look comes a second later
    text = bench.settings.read_text()
    bench.settings.write_text(text.replace("x-customer-tier", "x-tier"))
    bench.post({"prompt": "a"}, headers=[("x-tier", "premium")])
    assert bench.server.last_body["vllm_xargs"] == {"qos": "free"}
    bench.clock.now_s += 1.1
    bench.post({"prompt": "a"}, headers=[("x-tier", "premium")])
    assert bench.server.last_body["vllm_xargs"] == {"qos": "premium"}


def test_a_file_that_is_broken_while_serving_leaves_the_old_settings(bench: Bench) -> None:
    bench.settings.write_text("scheduler: [")
    bench.clock.now_s += 1.1
    assert bench.post({"prompt": "a"}, headers=PREMIUM).status == 200
    assert bench.server.last_body["vllm_xargs"] == {"qos": "premium"}


def _is_touched(bench: Bench, headers, keys) -> bool:
    raw = json.dumps({"prompt": "a"}).encode()
    bench.post(raw, headers=headers, api_keys=keys)
    return bench.server.bodies[-1] != raw


def test_without_a_valid_key_a_request_is_left_to_the_check_that_refuses_it(bench: Bench) -> None:
    assert not _is_touched(bench, [], ["k1", "k2"])
    assert not _is_touched(bench, [("Authorization", "Bearer k")], ["k1", "k2"])
    assert not _is_touched(bench, [("Authorization", "k2")], ["k1", "k2"])


def test_with_a_valid_key_it_is_classified(bench: Bench, monkeypatch) -> None:
    assert _is_touched(bench, [("Authorization", "bearer k2")], ["k1", "k2"])
    monkeypatch.setenv("VLLM_API_KEY", "k3")
    assert _is_touched(bench, [("authorization", "Bearer k3")], [])
    assert not _is_touched(bench, [("authorization", "Bearer k2")], [])


def test_a_second_key_does_not_lead_past_the_class(bench: Bench) -> None:
    """vLLM reads the first of several headers: so must we, or the body would pass as it is."""
    twice = [("authorization", "Bearer k1"), ("authorization", "Bearer wrong")]
    assert _is_touched(bench, twice, ["k1"])


def test_with_a_routers_key_only_the_routers_word_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(KEY_VARIABLE, SECRET + "\n")
    bench = Bench(tmp_path)
    bench.board.write()
    given = [("X-Request-Id", "r1"), (HEADER, signed("premium", "r1", class_key(SECRET)))]
    assert bench.post(LATE, headers=given).status == 200, "the router has judged it"
    assert bench.server.last_body["vllm_xargs"] == {"qos": "premium"}
    bench.post({"prompt": "another"}, headers=given)
    assert bench.server.last_body["vllm_xargs"] == {"qos": "free"}, "it was sent again"
    for headers in (
        PREMIUM,
        [
            *PREMIUM,
            (
                HEADER,
                signed(
                    "premium", "r1", class_key("another secret that all routers of a test share")
                ),
            ),
        ],
    ):
        bench.post({"prompt": "a"}, headers=headers)
        assert bench.server.last_body["vllm_xargs"] == {"qos": "free"}, "the default class"
    unknown = [("X-Request-Id", "r1"), (HEADER, signed("gold", "r1", class_key(SECRET)))]
    bench.post({"prompt": "a"}, headers=unknown)
    assert bench.server.last_body["vllm_xargs"] == {"qos": "free"}


def test_an_engine_does_not_start_with_a_secret_that_can_be_guessed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(KEY_VARIABLE, "secret")
    bench = Bench(tmp_path)
    bench.board.write()
    with pytest.raises(ValueError, match="PD_ROUTER_KEY: a key of 6 characters"):
        bench.post({"prompt": "a"})  # of a server that ignores the failed start


def test_without_a_key_the_routers_header_is_nothing(bench: Bench) -> None:
    bench.board.write()
    bench.post({"prompt": "a"}, headers=[(HEADER, signed("premium", "", b""))])
    assert bench.server.last_body["vllm_xargs"] == {"qos": "free"}
    assert bench.post(LATE, headers=PREMIUM).status == 429, "this engine judges itself"


@pytest.mark.parametrize(
    ("connector", "half"), [("PDConnector", True), ("LMCacheConnectorV1", False), (None, False)]
)
def test_half_of_a_pair_does_not_judge(connector: str | None, half: bool) -> None:
    transfer = None if connector is None else SimpleNamespace(kv_connector=connector)
    config = SimpleNamespace(kv_transfer_config=transfer)
    assert is_half_of_a_pair(config) is half
    several = SimpleNamespace(
        kv_connector="MultiConnector",
        kv_connector_extra_config={
            "connectors": [{"kv_connector": "Other"}, {"kv_connector": connector}]
        },
    )
    assert is_half_of_a_pair(SimpleNamespace(kv_transfer_config=several)) is half
