# SPDX-License-Identifier: Apache-2.0
"""For each alert: series of 40 minutes with which it fires, and nearly the same series with which it does not."""

from typing import NamedTuple

MINUTES = 40
Series = list[tuple[str, str]]
"""Names with labels, and values in the notation of promtool, one a minute: `0+5x40` grows by 5."""


class Case(NamedTuple):
    fires: Series
    quiet: Series


def of(name: str, values: str, **labels: str) -> tuple[str, str]:
    told = {"job": "j", "instance": "i", **labels}
    labels_shown = ",".join(f'{key}="{value}"' for key, value in told.items())
    return f"{name}{{{labels_shown}}}", values


STEADY, NONE, ONE, GROWS, FAST, ONCE = "3x40", "0x40", "1x40", "0+1x40", "0+50x40", "0x34 1x5"


def up(values: str, role: str = "decode") -> tuple[str, str]:
    return of("pd_router:engine_up", values, engine="e", role=role)


def addressable(values: str, engine: str = "e") -> tuple[str, str]:
    return of("pd_router:prefill_addressable", values, engine=engine)


def handoffs(cause: str, values: str) -> tuple[str, str]:
    return of("pd_connector:handoffs_total", values, cause=cause)


def releases(cause: str, values: str) -> tuple[str, str]:
    return of("pd_connector:releases_total", values, cause=cause)


def saves(cause: str, values: str) -> tuple[str, str]:
    return of("pd_connector:pool_saves_total", values, cause=cause)


def puts(cause: str, values: str) -> tuple[str, str]:
    return of("pd_connector:carrier_puts_total", values, cause=cause)


def moves(before: str, after: str, values: str, cause: str = "pressure") -> tuple[str, str]:
    return of("pd_router:role_moves_total", values, **{"from": before, "to": after, "cause": cause})


def outcome(name: str, values: str) -> tuple[str, str]:
    return of("pd_router:requests_total", values, outcome=name, route="/v1/completions")


_FLOWS = of("pd_router:flows_total", GROWS, flow="disaggregated", cause="")
_UNMOVED = of("pd_connector:unmoved_prompts_total", GROWS, cause="no_params")
_LEASED = of("pd_connector:leased_pages", STEADY)
_FULL = of("vllm:kv_cache_usage_perc", "0.97x40", engine="0")

CASES = {
    "PDNoDecodeEngine": Case(
        [up(NONE), up(ONE, "prefill")], [up(ONE, "both"), up(NONE), up(NONE, "prefill")]
    ),
    "PDNothingHandedOver": Case([addressable(NONE)], [addressable(NONE), addressable(ONE, "f")]),
    "PDNoHandoffs": Case(
        [_FLOWS, of("pd_router:handoffs_total", GROWS, outcome="recomputed", cause="stalled")],
        [_FLOWS, of("pd_router:handoffs_total", GROWS, outcome="handed_over", cause="")],
    ),
    "PDEngineAway": Case([up(NONE)], [up("1x38 0x1")]),
    "PDPrefillWithoutAddress": Case(
        [addressable(NONE), up(ONE, "prefill")], [addressable(NONE), up(NONE, "prefill")]
    ),
    "PDEnginePaused": Case(
        [of("pd_router:circuit_opened_total", ONCE, engine="e", cause="died")],
        [of("pd_router:circuit_opened_total", ONE, engine="e", cause="died")],
    ),
    "PDRequestsRefused": Case(
        [outcome("ok", "0+10x40"), outcome("unavailable", GROWS)],
        [outcome("ok", FAST), outcome("unavailable", GROWS)],
    ),
    "PDGPUsMissing": Case(
        [outcome("ok", FAST), of("pd_router:cpu_prefills_total", FAST, cause="late")],
        [outcome("ok", FAST), of("pd_router:cpu_prefills_total", FAST, cause="background")],
    ),
    "PDRolesFlap": Case(
        [moves("decode", "prefill", GROWS), moves("prefill", "decode", GROWS)],
        [
            moves("decode", "prefill", GROWS),
            moves("prefill", "decode", GROWS, "operator"),
            moves("prefill", "decode", ONCE),
        ],
    ),
    "PDRoleMoveFails": Case(
        [moves("decode", "prefill", ONCE, "failed_drain")], [moves("decode", "prefill", ONCE)]
    ),
    "PDPolicyFails": Case(
        [of("pd_router:policy_faults_total", GROWS, policy="theirs", cause="raised")],
        [of("pd_router:policy_faults_total", STEADY, policy="theirs", cause="raised")],
    ),
    "PDDistrustedProducer": Case(
        [of("pd_connector:distrusted_producers", ONE)],
        [of("pd_connector:distrusted_producers", NONE)],
    ),
    "PDFailingRanks": Case(
        [of("pd_connector:failing_ranks", ONE)], [of("pd_connector:failing_ranks", NONE)]
    ),
    "PDNoTransfers": Case([_UNMOVED], [_UNMOVED, handoffs("handed_over", GROWS)]),
    "PDRecomputed": Case(
        [handoffs("handed_over", "0+10x40"), handoffs("stalled", GROWS)],
        [
            handoffs("handed_over", FAST),
            handoffs("stalled", GROWS),
            handoffs("aborted", FAST),
            handoffs("unaudited", FAST),
        ],
    ),
    "PDLeasesPileUp": Case([_LEASED], [_LEASED, releases("delivered", GROWS)]),
    "PDCacheFull": Case(
        [_FULL, of("vllm:num_requests_waiting", STEADY, engine="0")],
        [_FULL, of("vllm:num_requests_waiting", NONE, engine="0")],
    ),
    "PDPoolFull": Case(
        [saves("saved", GROWS), saves("full", GROWS)], [saves("saved", FAST), saves("full", GROWS)]
    ),
    "PDPoolSilent": Case(
        [saves("unwell", GROWS)],
        [
            saves("full", GROWS),
            of("pd_connector:pool_misses_total", GROWS, cause="never_stored"),
        ],
    ),
    "PDFarUnreachable": Case(
        # It comes back now and then, and is opened again each time.
        [of("pd_connector:carrier_far_up", "1x15 0x8 1x0 0x8 1x0 0x8")],
        [of("pd_connector:carrier_far_up", "0x8 1x31")],
    ),
    "PDFarRefuses": Case(
        [puts("put", GROWS), puts("too_large", GROWS)],
        [puts("put", FAST), puts("refused", GROWS), puts("gone", FAST)],
    ),
    "PDAgentFails": Case(
        [of("pd_connector:agent_failures_total", ONCE)],
        [of("pd_connector:agent_failures_total", ONE)],
    ),
}
