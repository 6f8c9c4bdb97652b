# SPDX-License-Identifier: Apache-2.0
"""`pd-connector audit`: which pairs it makes, and its verdict from what the decode engine's metrics tell."""

import json
import socket
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import typer

from pd_connector.protocol.wire import about
from pd_connector.tools.cli.audit import Engine, audit, judge, look, pairs_of
from pd_connector.tools.cli.checks.asking import PeerError

PLACE = {"remote_host": "127.0.0.1", "remote_port": 1}


def engine(
    url: str, *, hands_over: bool, then: Callable[[], None] = lambda: None, metrics: Any = ()
) -> Engine:
    def ask(path: str, body: Mapping[str, Any] | None) -> str:
        if path == "/metrics":
            return "".join(
                f"pd_connector:{name} {value}\n" for name, value in dict(metrics).items()
            )
        if path == "/v1/models":
            return json.dumps({"data": [{"id": "m"}]})
        assert body is not None
        params = body.get("kv_transfer_params", {})
        if params.get("describe") or params.get("do_remote_decode"):
            described = {"describe": True} if params.get("describe") else {}
            told = {**PLACE, **described} if hands_over else None
            return json.dumps({"kv_transfer_params": told})
        if params:
            then()
        return "{}"

    return look(url, ask)


def verdict(*ends: str) -> tuple[bool, str]:
    """The verdict on a decode engine whose prompts end like that, one after the other; then nothing moves."""
    metrics: dict[str, float] = {'received_transfers_total{engine="0"}': 0.0}
    left = list(ends)

    def then() -> None:
        if left:
            end = left.pop(0)
            used = 'received_transfers_total{engine="0"}'
            name = used if end == "used" else f'audits_total{{cause="{end}",engine="0"}}'
            metrics[name] = metrics.get(name, 0.0) + 1

    p = engine("p", hands_over=True)
    d = engine("d", hands_over=False, then=then, metrics=metrics)
    return judge(p, d, sleep=lambda seconds: None)


def test_a_pair_passes_when_its_kv_is_used_after_the_audits() -> None:
    for ends in (["passed", "used"], ["passed", "passed", "used"], ["used"]):
        assert verdict(*ends)[0], ends


@pytest.mark.parametrize(
    ("ends", "said"),
    [
        (["audit"], "not what the decode engine computes"),
        (["passed", "audit"], "not what the decode engine computes"),
        (["prefill_ended"], "no verdict (prefill_ended)"),
        (["passed"], "neither used the KV nor compared it"),
        ([], "neither used the KV nor compared it"),
    ],
)
def test_anything_else_is_no_pass(ends: list[str], said: str) -> None:
    good, told = verdict(*ends)
    assert not good
    assert said in told


@pytest.mark.parametrize("needed", [0, 545])
def test_both_sides_get_one_prompt_of_the_length_that_the_decode_engine_needs(needed: int) -> None:
    sent: list[Mapping[str, Any]] = []

    def ask(path: str, body: Mapping[str, Any] | None) -> str:
        if body is not None:
            sent.append(body)
        return json.dumps({"kv_transfer_params": PLACE})

    judge(
        Engine("p", ask, "m", hands_over=True, audit_tokens=0),
        Engine("d", ask, "m", hands_over=False, audit_tokens=needed),
        sleep=lambda seconds: None,
    )
    prefill, decode = sent[:2]
    assert prefill["prompt"] == decode["prompt"]
    assert prefill.get("truncate_prompt_tokens", 0) == needed
    assert decode.get("truncate_prompt_tokens", 0) == needed
    assert len(decode["prompt"]) >= 8 * needed, "a token has seven characters at most"


def test_an_engine_tells_how_long_that_prompt_must_be() -> None:
    def ask(path: str, body: Mapping[str, Any] | None) -> str:
        told = {"kv_transfer_params": about.written(None, 545)}
        return json.dumps(told if body else {"data": [{"id": "m"}]})

    assert look("http://d", ask).audit_tokens == 545


def test_each_that_hands_over_is_paired_with_each_that_only_fetches() -> None:
    both = [engine(url, hands_over=True) for url in ("a", "b")]
    fetches = engine("d", hands_over=False)
    assert [(p.url, d.url) for p, d in pairs_of([*both, fetches])] == [("a", "d"), ("b", "d")]
    assert [(p.url, d.url) for p, d in pairs_of(both)] == [("a", "b"), ("b", "a")]
    assert list(pairs_of([fetches])) == []


def test_what_is_no_engine_is_named() -> None:
    with pytest.raises(PeerError, match="http://x does not answer as a vLLM engine"):
        look("http://x", lambda path, body: "no json")

    def ask(path: str, body: Mapping[str, Any] | None) -> str:
        return json.dumps({"kv_transfer_params": ["odd"]} if body else {"data": [{"id": "m"}]})

    assert not look("http://x", ask).hands_over


def test_each_engine_that_does_not_answer_is_named_by_its_url_with_what_to_do(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(typer.Exit):
        audit(["http://127.0.0.1:1", "http://127.0.0.1:2", "http://[::1]:bad"])
    told = capsys.readouterr().err
    for url in ("http://127.0.0.1:1", "http://127.0.0.1:2"):
        assert f"{url}/v1/models: no connection: nothing listens there: is the engine up" in told
    assert "http://[::1]:bad" in told
    assert "Errno" not in told


def test_a_name_that_nobody_knows_is_told_without_a_number(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def resolve(*place: Any, **more: Any) -> Any:
        raise socket.gaierror(-2, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    with pytest.raises(typer.Exit):
        audit(["http://nosuch.invalid:1"])
    told = capsys.readouterr().err
    assert "http://nosuch.invalid:1/v1/models: no connection: Name or service not known" in told
    assert "Errno" not in told
