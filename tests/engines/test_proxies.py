# SPDX-License-Identifier: Apache-2.0
"""Other people's proxies in front of real engines: which move KV, which overlap, and what is told of the others."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from harness import (
    Answer,
    answer_of,
    assert_same_logprobs,
    fresh_salt,
    request_body,
    url_of,
    wait_until,
)
from pairs import EnginePool, Pair, Setup
from proxy_clients import (
    AIBrixNixl,
    AppendingProxy,
    LMCacheMode,
    MooncakeSidecar,
    MoriSidecar,
    ProductionStack,
    Proxy,
    PushSidecar,
    Sidecar,
    ToyProxy,
    VllmRouter,
)
from recipes import COMPILE_NOTHING, EXACT_ARGS, MODEL, NAME_ARGS, WORKER_IN_CORE
from test_handoff import prompt_of
from tools import TOLERANCE, delta

from pd_bench.netns import Bed, available
from pd_connector.config import KEY_VARIABLE
from pd_connector.control.keys import new_key
from pd_connector.remedies import outage_in
from pd_connector.tools.launch import Client, VllmEngine, stop_services
from pd_connector.tools.launch.progress import wait_all

LONG = 1500
PORTIONS = ("--max-num-batched-tokens", "256")
# Pages that no decode engine asks for are kept for a lease.
SETUP = Setup.of(args=PORTIONS, lease_s=6)
TRANSFERS = "pd_connector:received_transfers_total"
EARLY = "pd_connector:early_chunks_total"


def asked(proxy: Proxy, start: int, tokens: int = LONG) -> Answer:
    """What a proxy's user gets for a prompt that no engine has cached."""
    body = request_body(proxy.prefill, prompt_of(tokens, start=start))
    return answer_of(proxy({**body, "cache_salt": fresh_salt()}))


def made(kind: type[Proxy], pair: Pair) -> Proxy:
    return kind(url_of(pair.p), url_of(pair.d))


@pytest.mark.parametrize("kind", [ToyProxy, VllmRouter, Sidecar, ProductionStack])
def test_a_proxy_that_asks_one_engine_after_the_other_moves_kv(
    pair: Pair, reference, kind: type[Proxy]
) -> None:
    with delta(pair.d, TRANSFERS) as moved, delta(pair.p, EARLY) as early:
        answer = asked(made(kind, pair), 10)
        wait_until(lambda: moved.so_far() == 1, "the transfer is counted")
    assert_same_logprobs(answer, reference(prompt_of(LONG, start=10)), TOLERANCE)
    assert early.amount == 0, "there is nothing to overlap"


def test_a_sidecar_in_push_mode_overlaps_from_its_second_request_on(pair: Pair, reference) -> None:
    proxy = made(PushSidecar, pair)
    with delta(pair.d, TRANSFERS) as moved, delta(pair.p, EARLY) as early:
        assert_same_logprobs(asked(proxy, 10), reference(prompt_of(LONG, start=10)), TOLERANCE)
        wait_until(lambda: moved.so_far() == 1, "the transfer is counted")
        assert early.so_far() == 0
        assert_same_logprobs(asked(proxy, 30), reference(prompt_of(LONG, start=30)), TOLERANCE)
        wait_until(lambda: moved.so_far() == 2, "the second as well")
    assert early.amount > 0


def test_kv_of_a_prompt_that_a_proxy_continues_is_not_taken_for_that_of_another(
    pair: Pair, reference
) -> None:
    prompt = prompt_of(300, start=50)
    body = request_body(url_of(pair.p), prompt)
    answer = answer_of(made(AppendingProxy, pair)({**body, "cache_salt": fresh_salt()}))
    wanted = reference(prompt)
    assert answer.tokens == wanted.tokens[1:]


@pytest.mark.parametrize(
    ("kind", "named"), [(MooncakeSidecar, "Mooncake's"), (MoriSidecar, "MoRI-IO's")]
)
def test_a_protocol_that_is_not_spoken_is_refused_by_name_and_answered_all_the_same(
    pair: Pair, reference, kind: type[Proxy], named: str
) -> None:
    with delta(pair.d, "pd_connector:ignored_params_total", cause="malformed_params") as ignored:
        answer = asked(made(kind, pair), 70, 300)
        wait_until(lambda: ignored.so_far() == 1, "it is counted")
    assert_same_logprobs(answer, reference(prompt_of(300, start=70)), TOLERANCE)


@pytest.fixture
def fresh(pair: Pair) -> Pair:
    """A pair whose engines no proxy has asked for KV yet."""
    pair.stop()
    pair.start()
    return pair


@pytest.mark.parametrize("kind", [LMCacheMode, AIBrixNixl])
def test_a_proxy_that_asks_for_no_kv_is_told_of(fresh: Pair, reference, kind: type[Proxy]) -> None:
    answer = asked(made(kind, fresh), 90, 300)
    assert_same_logprobs(answer, reference(prompt_of(300, start=90)), TOLERANCE)
    for engine in fresh.engines:
        count = delta(engine, "pd_connector:unmoved_prompts_total", cause="no_params")
        with count as no_handoff:
            asked(made(kind, fresh), 90, 300)
            wait_until(lambda counted=no_handoff: counted.so_far() == 1, "it is counted")
        outage = outage_in(Client(url_of(engine)).get("/metrics"))
        assert outage is not None
        assert "sends no kv_transfer_params" in outage.advice


@pytest.fixture(scope="module")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[VllmEngine, VllmEngine]]:
    """Engines with unlike pages in two network namespaces, with a key and defaults otherwise."""
    if why := available():
        pytest.skip(why)
    logs = tmp_path_factory.mktemp("hosts")
    key = {KEY_VARIABLE: new_key()}
    with Bed() as bed:
        engines = []
        for side, role, page, place in zip(
            ("prefill", "decode"),
            ("kv_producer", "kv_consumer"),
            ("128", "64"),
            bed.namespaces,
            strict=True,
        ):
            engine = VllmEngine(
                MODEL,
                role,
                extra_config={"control_port": 7100, "data_port": 7200, "transports": ["tcp"]},
                name=side,
                args=[*EXACT_ARGS, *NAME_ARGS, *PORTIONS, "--block-size", page],
                env={**COMPILE_NOTHING, **WORKER_IN_CORE, **key},
                log_path=logs / f"{side}.log",
                namespace=place,
            )
            engines.append(engine.start())
        try:
            wait_all(engines)
            yield engines[0], engines[1]
        finally:
            stop_services(engines)


@pytest.mark.netns
def test_two_hosts_with_a_key_unlike_pages_and_fixed_ports(
    hosts: tuple[VllmEngine, VllmEngine], engines: EnginePool
) -> None:
    """The first prompt is audited; then the sidecar's serial way moves KV, and its parallel way overlaps."""
    prefill, decode = hosts
    serial, push = (kind(url_of(prefill), url_of(decode)) for kind in (Sidecar, PushSidecar))
    wanted = {start: engines.reference(prompt_of(LONG, start=start)) for start in (10, 30)}
    assert_same_logprobs(asked(serial, 10), wanted[10], TOLERANCE)
    passed = "pd_connector:audits_total"
    wait_until(lambda: decode.metrics().total(passed, cause="passed") == 1, "the audit has passed")
    with delta(decode, TRANSFERS) as moved, delta(prefill, EARLY) as early:
        for proxy, start in ((serial, 10), (push, 30), (push, 10)):
            assert_same_logprobs(asked(proxy, start), wanted[start], TOLERANCE)
        wait_until(lambda: moved.so_far() == 3, "three transfers are counted")
    assert early.amount > 0
