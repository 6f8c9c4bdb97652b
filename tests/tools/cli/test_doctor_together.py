# SPDX-License-Identifier: Apache-2.0
"""What the doctor says of engines that were visited together: their wire schemas and their models."""

import json
from collections.abc import Mapping
from typing import Any

import msgspec
import pytest
from typer.testing import CliRunner

from pd_connector.kv.model import ModelFacts
from pd_connector.kv.model_config import served_config
from pd_connector.protocol.wire import about, messages
from pd_connector.protocol.wire.about import About
from pd_connector.tools.cli import doctor
from pd_connector.tools.cli.app import app
from pd_connector.tools.cli.checks import peer, together
from pd_connector.tools.cli.checks.finding import Finding, Status
from pd_connector.tools.cli.checks.together import EngineReport

P, D, E = "http://p:8100", "http://d:8200", "http://e:8200"
PRODUCER = {"describe": True, "remote_host": "10.0.0.2", "remote_port": 5555}


def facts(source: str = "/models/a", weights: bytes = b"weights", **config: Any) -> ModelFacts:
    served = served_config({"hidden_size": 8, **config}, dtype="torch.bfloat16")
    return ModelFacts(served.fingerprint, weights, source=source, fields=served.fields)


def of(model: ModelFacts | None = None, newest: int = 1, oldest: int = 1) -> About:
    return About("9.9", newest, oldest, model or facts())


def engine(url: str, told: About, *, model: str = "m") -> EngineReport:
    return EngineReport(url, told, url == P, model)


def visit(params: Any, *, server_info: Mapping[str, Any] | None = None) -> peer.Visit:
    """A peer whose answer to `describe` has these parameters."""
    known: dict[str, Any] = {
        "/health": "",
        "/version": json.dumps({"version": "0.32.0"}),
        "/v1/models": json.dumps({"data": [{"id": "m", "max_model_len": 4096}]}),
        "/v1/completions": json.dumps({"kv_transfer_params": params}),
        "/metrics": "pd_connector:x 0",
        "/server_info": json.dumps(server_info or {}),
    }

    def ask(path: str, body: Mapping[str, Any] | None) -> str:
        if path == "/tokenize":
            assert body is not None
            return json.dumps({"tokens": [9] if "messages" in body else [7, 8]})
        return str(known[path])

    return peer.check(P, ask, lambda *_: "", lambda *_: None)


def named(findings: list[Finding], name: str) -> list[Finding]:
    return [finding for finding in findings if finding.name == name]


@pytest.mark.parametrize("first", [PRODUCER, {}], ids=["prefill", "decode"])
@pytest.mark.parametrize(
    ("oldest", "newest", "behind"), [(messages.SCHEMA + 1, messages.SCHEMA + 2, "here"), (0, 0, P)]
)
def test_a_peer_of_another_wire_schema_fails_with_both_schemas_and_the_older_side(
    first: dict[str, Any], oldest: int, newest: int, behind: str
) -> None:
    said = {about.FIELD: msgspec.to_builtins(of(newest=newest, oldest=oldest))}
    (finding,) = named(visit({**first, **said}).findings, "wire schema")
    assert finding.status is Status.FAIL
    assert f"{P} speaks {oldest}-{newest} (9.9)" in finding.found
    assert f"here speaks {messages.OLDEST_SCHEMA}-{messages.SCHEMA}" in finding.found
    assert behind in finding.advice


def test_one_schema_apart_and_an_engine_that_does_not_say_are_well() -> None:
    said = {
        about.FIELD: msgspec.to_builtins(of(newest=messages.SCHEMA + 1, oldest=messages.SCHEMA))
    }
    for params in (said, {}, None, {**PRODUCER, **said}, PRODUCER):
        visited = visit(params)
        assert named(visited.findings, "wire schema") == []
        assert visited.report is not None


def test_what_a_later_version_says_of_its_model_in_another_form_still_tells_its_schema() -> None:
    later = {"version": "9.9", "newest": 7, "oldest": 6, "model": {"config": 5}}
    assert about.read({about.FIELD: later}) == About("9.9", 7, 6)
    for wrong in (7, {"newest": "x"}, [], {"version": 3}):
        assert about.read({about.FIELD: wrong}) == About()


@pytest.mark.parametrize("mode", ["prefill", "decode"])
def test_sglangs_engines_are_compared_by_their_state(mode: str) -> None:
    state = {"side": mode, **PRODUCER, about.FIELD: msgspec.to_builtins(of(newest=9, oldest=8))}
    info = {
        "disaggregation_mode": mode,
        "disaggregation_transfer_backend": "pd_connector",
        "served_model_name": "m",
        "internal_states": [{"pd_connector": state}],
    }
    visited = visit(None, server_info=info)
    assert visited.report == EngineReport(
        P, of(newest=9, oldest=8), mode == "prefill", "m", ([7, 8], [9]), 4096
    )
    assert "8-9" in named(visited.findings, "wire schema")[0].found


def test_engines_of_one_model_are_told_to_be_so() -> None:
    (finding,) = together.check([engine(D, of()), engine(P, of()), engine(E, of())])
    assert (finding.status, finding.name) == (Status.OK, "models")
    assert "3 engines serve m" in finding.found
    assert together.check([engine(P, of())]) == []


@pytest.mark.parametrize(
    ("other", "said"),
    [
        (facts(hidden_size=16), f"hidden_size is 8 at {P}, 16 at {E}"),
        (facts("/models/b", b"else"), f"({P} serves /models/a, {E} /models/b)"),
    ],
)
def test_two_decode_engines_of_unlike_models_behind_one_prefill_engine_are_named(
    other: ModelFacts, said: str
) -> None:
    findings = together.check([engine(D, of()), engine(E, of(other)), engine(P, of())])
    (finding,) = findings
    assert finding.status is Status.FAIL
    assert said in finding.found
    assert D not in finding.found


@pytest.mark.parametrize(
    ("tokens", "said", "flag"),
    [
        (((1, 3), (5,)), "unlike tokens of the same text", "--tokenizer"),
        (((1, 2), (6,)), "unlike tokens of the same chat", "--chat-template"),
    ],
)
def test_engines_with_unlike_tokenizers_are_named(
    tokens: tuple[object, ...], said: str, flag: str
) -> None:
    ours = engine(P, of())._replace(tokens=((1, 2), (5,)))
    (finding,) = together.check([ours, engine(D, of())._replace(tokens=tokens)])
    assert finding.status is Status.FAIL
    assert f"{P} and {D} make {said}" in finding.found
    assert flag in finding.advice
    for unknown in ((), (None, None), ((1, 2), None)):
        (finding,) = together.check([ours, engine(D, of())._replace(tokens=unknown)])
        assert finding.status is Status.OK


def test_a_peer_is_asked_how_it_reads_a_text_and_how_long_a_prompt_can_be() -> None:
    told = visit(PRODUCER).report
    assert told is not None
    assert told.tokens == ([7, 8], [9])
    assert told.context == 4096


def test_engines_with_unlike_contexts_are_named_beside_what_is_well() -> None:
    ours, theirs = engine(P, of())._replace(context=4096), engine(D, of())._replace(context=8192)
    models, contexts = together.check([ours, theirs, engine(E, of())])
    assert (models.name, models.status) == ("models", Status.OK)
    assert (contexts.name, contexts.status) == ("contexts", Status.WARN)
    assert contexts.found == f"{P} takes 4,096 tokens, {D} takes 8,192 tokens"
    assert "--max-model-len" in contexts.advice
    (models,) = together.check([ours, theirs._replace(context=4096)])
    assert models.name == "models"


def test_engines_of_unlike_schemas_are_named_also_where_the_doctor_speaks_to_both() -> None:
    (finding,) = together.check([engine(P, of()), engine(D, of(newest=3, oldest=2))])
    assert finding.status is Status.FAIL
    assert f"{P} speaks 1-1 (9.9), {D} speaks 2-3 (9.9)" in finding.found
    assert finding.advice.startswith(f"upgrade pd-connector at {P}")


def test_the_command_compares_all_engines_it_visits(monkeypatch: pytest.MonkeyPatch) -> None:
    told = {P: engine(P, of()), D: engine(D, of()), E: engine(E, of(facts(hidden_size=16)))}
    monkeypatch.setattr(doctor, "examine", lambda facts: [])
    monkeypatch.setattr(doctor, "visit", lambda url, key: peer.Visit([], told[url]))
    peers = [part for url in told for part in ("--peer", url)]
    ended = CliRunner().invoke(app, ["doctor", *peers, "--json"])
    (row,) = json.loads(ended.stdout)
    assert (row["area"], row["status"]) == (together.AREA, "fail")
    assert ended.exit_code == 1


def test_engines_that_do_not_tell_their_models_are_compared_by_name() -> None:
    (finding,) = together.check([engine(P, About()), engine(D, About(), model="n")])
    assert finding.status is Status.WARN
    assert f"{P} serves m, {D} serves n" in finding.found
    (finding,) = together.check([engine(P, About()), engine(D, of())])
    assert "weights were not compared" in finding.found


@pytest.mark.parametrize(
    ("prefill", "decode", "named"),
    [(b"", b"d", True), (b"e", b"d", True), (b"d", b"d", False), (b"d", b"", False)],
)
def test_a_decode_engine_that_drafts_and_a_prefill_engine_that_does_not_are_named(
    prefill: bytes, decode: bytes, named: bool
) -> None:
    models = [msgspec.structs.replace(facts(), draft=draft) for draft in (prefill, decode)]
    engines = [engine(url, of(model)) for url, model in zip((P, D), models, strict=True)]
    found = [one for one in together.check(engines) if one.name == "drafts"]
    assert len(found) == named
    if named:
        assert found[0].status is Status.WARN
        assert D in found[0].found
        assert "--speculative-config" in found[0].found
        assert f"no KV passes from {P} to {D}" in found[0].advice
