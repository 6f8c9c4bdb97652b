# SPDX-License-Identifier: Apache-2.0
"""Audits of real engines: the first prompt of a pair is computed on both sides and compared. What the decode engine
would compute otherwise is found out, and answers are right all along."""

from __future__ import annotations

import itertools
import math
import re
from concurrent.futures import ThreadPoolExecutor

import pytest
from harness import assert_same_logprobs, completion, fresh_salt, prefill_step, two_step, wait_until
from pairs import EnginePool, Pair, Setup
from recipes import NEW
from test_handoff import PAGE, prompt_of
from test_models import MLA_ARGS
from test_unlike import PIPELINE_PARALLEL
from tiny_models import build
from tools import TOLERANCE, delta, probe, probe_all

from pd_connector.tools.launch.start_log import tail

SETUP = Setup.of(
    vllm=NEW,
    audit="first",
    session_timeout_s=3.0,
    heartbeat_s=0.5,
    args=["--worker-extension-cls", "probe.Saboteur", "--block-size", str(PAGE)],
)
RECEIVED = "pd_connector:received_transfers_total"
HANDOFFS = "pd_connector:handoffs_total"
_starts = itertools.count(100, 50)


def audits(pair: Pair, cause: str) -> float:
    return pair.d.metrics().total("pd_connector:audits_total", cause=cause)


def not_audited(pair: Pair) -> float:
    """Requests that have ended, and of which no audit comes."""
    samples = pair.d.metrics()
    return samples.total(HANDOFFS) - samples.total(HANDOFFS, cause="audited")


def audited(pair: Pair, reference, cause: str, tokens: int = 300, max_tokens: int = 32) -> None:
    """Ask until an audit has ended in this way. Every answer is right, and of computed prompts."""
    before = audits(pair, cause)
    with delta(pair.d, RECEIVED) as received:
        for _ in range(10):
            prompt, refused = prompt_of(tokens, start=next(_starts)), not_audited(pair)
            answer = two_step(pair.p, pair.d, prompt, max_tokens)
            assert_same_logprobs(answer, reference(prompt, max_tokens), TOLERANCE)
            if _grown(pair, cause, before, refused):
                break
        else:
            raise AssertionError(f"no audit has ended with {cause!r}")
    assert received.amount == 0


def _grown(pair: Pair, cause: str, before: float, refused: float = math.inf) -> bool:
    """Whether the metrics tell of an audit within two seconds, or before they tell of a request that is `not_audited`."""
    try:
        wait_until(
            lambda: audits(pair, cause) > before or not_audited(pair) > refused, "an audit", 2
        )
        return audits(pair, cause) > before
    except AssertionError:
        completion(pair.d, "a", 1)  # a step, so that metrics are told
        return audits(pair, cause) > before


def used(pair: Pair, reference, tokens: int = 300) -> int:
    """Ask once more; returns how many transfers were received for that."""
    prompt = prompt_of(tokens, start=next(_starts))
    with delta(pair.d, RECEIVED) as received:
        answer = two_step(pair.p, pair.d, prompt)
    assert_same_logprobs(answer, reference(prompt), TOLERANCE)
    return int(received.amount)


def start_anew(pair: Pair) -> None:
    """The prefill engine's agent starts again, as a new engine would."""
    probe_all(pair.p, "sabotage", "none")
    with delta(pair.d, "pd_connector:lost_sessions_total") as lost:
        sessions = pair.d.metrics().total("pd_connector:producer_sessions")
        probe_all(pair.p, "restart_agent")

        def noticed() -> bool:
            completion(pair.d, "a", 1)
            return not sessions or lost.so_far() > 0

        wait_until(noticed, "the session to be lost")


def test_the_first_prompt_is_computed_and_the_next_is_not(pair: Pair, reference) -> None:
    short = prompt_of(30, start=3)
    with delta(pair.d, RECEIVED) as received:
        answer = two_step(pair.p, pair.d, short)
    assert_same_logprobs(answer, reference(short), TOLERANCE)
    assert (received.amount, audits(pair, "passed")) == (0, 0), "too short to be audited"
    audited(pair, reference, "passed")
    assert used(pair, reference) == 1
    assert audits(pair, "passed") == 1, "one is enough"
    assert used(pair, reference, tokens=40) == 1, "short ones, too"


@pytest.mark.parametrize("max_tokens", [1, 32])
def test_of_many_at_once_one_is_audited_and_none_waits(pair: Pair, reference, max_tokens) -> None:
    """Also where the audited request has ended before the comparison has begun."""
    start_anew(pair)
    before = audits(pair, "passed")
    prompts = [prompt_of(200 + 61 * i, start=next(_starts)) for i in range(8)]
    with ThreadPoolExecutor(8) as threads:
        answers = list(
            threads.map(lambda prompt: two_step(pair.p, pair.d, prompt, max_tokens), prompts)
        )
    for prompt, answer in zip(prompts, answers, strict=True):
        assert_same_logprobs(answer, reference(prompt, max_tokens), TOLERANCE)
    if not _grown(pair, "passed", before):  # the first of them only found out that it is new
        audited(pair, reference, "passed")
    assert used(pair, reference) == 1


@pytest.mark.parametrize(
    "kind", ["k_proj of a layer", "layers", "rotation", "a damaged page", "a damaged token"]
)
def test_what_is_wrong_is_found_and_never_answers(pair: Pair, reference, kind: str) -> None:
    start_anew(pair)
    probe_all(pair.p, "sabotage", kind)
    for _ in range(10):
        before, refused = audits(pair, "audit"), not_audited(pair)
        prompt, salt = prompt_of(300, start=next(_starts)), fresh_salt()
        params = prefill_step(pair.p, prompt, cache_salt=salt)
        if kind == "a damaged page":
            probe(pair.p, "damage_page", params["remote_block_ids"][0][4])
        elif kind == "a damaged token":
            probe(pair.p, "damage_token", params["remote_block_ids"][0][4], 7)
        answer = completion(pair.d, prompt, 32, cache_salt=salt, kv_transfer_params=params)
        assert_same_logprobs(answer, reference(prompt), TOLERANCE)
        if _grown(pair, "audit", before, refused):
            break
    else:
        raise AssertionError("nothing was found")
    log = "\n".join(tail(pair.d.log_path, 400))
    assert "is wrong: layer" in log
    if kind == "a damaged page":
        assert "page 4, K" in log
    if kind == "a damaged token":
        assert f"layer 0, token {4 * PAGE + 7}, V" in log
    assert pair.d.metrics().total("pd_connector:distrusted_producers") > 0
    assert used(pair, reference) == 0, "it is believed no more"
    start_anew(pair)
    audited(pair, reference, "passed")
    assert used(pair, reference) == 1, "until it restarts"


def test_believed_without_an_audit_it_answers_wrongly(engines: EnginePool, reference) -> None:
    """The harm, with the guard off: its own pair, which is told so when it starts."""
    pair = engines.pair(
        Setup.of(
            audit="off", args=["--worker-extension-cls", "probe.Saboteur", "--block-size", "32"]
        )
    )
    probe_all(pair.p, "sabotage", "rotation")
    prompt = prompt_of(300, start=11)
    answer = two_step(pair.p, pair.d, prompt)
    with pytest.raises(AssertionError):
        assert_same_logprobs(answer, reference(prompt), TOLERANCE)
    pair.assert_idle()


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("hybrid", {"codec": "fp8_e4m3", "decode_args": ["--tensor-parallel-size", "2"]}),
        (
            "latent",
            {
                "args": MLA_ARGS,
                "reference_args": MLA_ARGS,
            },
        ),
    ],
    ids=["windows, fp8 on the wire, one rank to two", "MLA"],
)
def test_unlike_engines_pass(engines: EnginePool, tmp_path, reference, kind, options) -> None:
    """Pairs of their own, of other models and ranks."""
    folder = build(kind, tmp_path / kind)
    pair = engines.pair(Setup.of(model=folder, audit="first", **options))
    prompts = [prompt_of(600, start=5), prompt_of(700, start=99)]
    for count, prompt in enumerate(prompts):
        answer = two_step(pair.p, pair.d, prompt)
        if count == 0:  # computed here; answers from received KV are those of test_models.py
            assert_same_logprobs(answer, reference(prompt), 10 * TOLERANCE)
        wait_until(lambda: audits(pair, "passed") >= 1, "the audit to pass")
    ranks = 2 if "decode_args" in options else 1
    assert pair.d.metrics().total(RECEIVED) == ranks
    assert audits(pair, "passed") == ranks
    pair.assert_idle()


STAGES = Setup.of(
    audit="first",
    session_timeout_s=3.0,
    heartbeat_s=0.5,
    args=["--worker-extension-cls", "probe.Saboteur"],
    prefill_args=PIPELINE_PARALLEL.prefill_args,
    both=True,
)


def test_a_stage_that_computes_wrongly_is_found_from_either_side(
    engines: EnginePool, reference
) -> None:
    """Two pipeline stages and one rank, prefill on either: every rank audits the layers it holds."""
    pair = engines.pair(STAGES)
    for way, ranks in ((pair, 1), (pair.turned(), 2)):
        audited(way, reference, "passed")
        wait_until(lambda way=way, ranks=ranks: audits(way, "passed") == ranks, "all ranks", 20)
        assert used(way, reference) == ranks
        start_anew(way)
        probe_all(way.p, "sabotage", "rotation")  # where it has two stages, of the first
        audited(way, reference, "audit")
        assert re.search(r"is wrong: layer [01],", "\n".join(tail(way.d.log_path, 400)))
        assert used(way, reference) == 0
        probe_all(way.p, "sabotage", "none")
    pair.assert_idle()
