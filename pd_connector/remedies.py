# SPDX-License-Identifier: Apache-2.0
"""What to set if no KV arrives, by the cause of the failures or by an engine's metrics."""

import re
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from pd_connector.errors import Cause

HARMLESS = frozenset(
    {
        Cause.ABORTED,
        Cause.ASLEEP,
        Cause.NOT_NEEDED,
        Cause.PREFILL_ENDED,
        Cause.UNAUDITED,
        Cause.UNREAD,
        Cause.WINDOW,
    }
)
"""Causes that say nothing about whether KV can arrive."""
FAILING_GAUGE = "failing_ranks"
"""The gauge (without prefix) that is above 0 while no KV arrives."""
_SAMPLE = re.compile(r"^pd_connector:(\w+?)(?:_total)?(?:\{(.*)\})? ([0-9.eE+-]+)", re.MULTILINE)
_MOST = 1e18
"""No count is larger. A larger number is not a count, and sums of some would be infinite."""
_LABELS = re.compile(r'(\w+)="([^"]*)"')

_REACH = (
    "set `host` (config key, or PD_CONNECTOR_HOST) of the prefill engine to an address that the "
    "decode engine reaches, the same PD_CONNECTOR_KEY on both, and let its TCP ports through the firewall"
)
_REMEDIES: dict[Cause, str] = {
    Cause.AUDIT: (
        "the prefill engine's KV differs from this engine's: compare both engines' checkpoints, flags and hardware, "
        "then restart the wrong engine (docs/trust.md, audit)"
    ),
    Cause.CODEC: (
        "the prefill engine has loaded KV in a lossy codec: set its `pool.codec` and `codec` to raw and restart it, or permit "
        "that codec here in `codec` (docs/pool.md#int8-at-rest)"
    ),
    Cause.UNREACHABLE: _REACH,
    Cause.SESSION_LOST: _REACH,
    Cause.AUTHENTICATION: "set PD_CONNECTOR_KEY to one secret on every engine",
    Cause.INSECURE_ADDRESS: (
        "set PD_CONNECTOR_KEY to one secret on every engine (`pd-connector key` makes one), or "
        "`insecure: true` on every engine if the network is trusted"
    ),
    Cause.NO_ROOM: "give the decode engine a larger cache, or send such prompts to another one",
    Cause.NO_TRANSPORT: "name a transport in `transports` of both engines that joins them, such as tcp",
    Cause.TRANSPORT: "look for the transport's error in both engines' logs; take it out of `transports` if it stays",
    Cause.MODEL: "serve the same weights and configuration, dtype and quantisation included, with both engines",
    Cause.GEOMETRY: "start both engines with settings that fit together; the message names the settings that do not fit",
    Cause.DRAFT: (
        "give both engines the same draft model and settings (--speculative-config; SGLang: --speculative-algorithm and what "
        "goes with it), or set one `model_id` on both if its weights are not files on their disks (docs/configuration.md#draft-models)"
    ),
    Cause.VERSION: "upgrade the older engine: one schema apart works",
    Cause.UNKNOWN_TRANSFER: "raise `lease_s` of the prefill engine, or `slots` of the decode engine",
    Cause.LEASE_EXPIRED: "raise `lease_s` of the prefill engine, or `slots` of the decode engine",
    Cause.STALLED: "raise `stall_timeout_s` if the link is slow; else look for the link's errors",
    Cause.MALFORMED_PARAMS: (
        "the proxy sends kv_transfer_params of another connector: set it to NixlConnector's protocol (docs/proxies.md)"
    ),
    Cause.ROLE: "start prefill engines with kv_role kv_producer and decode engines with kv_consumer (or all with kv_both), and send prompts to the prefill engines first",
    Cause.TOKENS: (
        "the two engines read unlike prompts: give both the same tokenizer, chat template and processor settings "
        "(--tokenizer, --chat-template, --mm-processor-kwargs), and let the proxy send both the same request"
    ),
    Cause.UNTRUSTED_ADDRESS: (
        "give all engines one PD_CONNECTOR_KEY and let the proxy pass on kv_transfer_params whole, or set `peers`"
    ),
    Cause.WAIT_TIMEOUT: "raise `wait_timeout_s`, or send the prefill engine fewer prompts",
}


_NO_REMEDY = "see the troubleshooting table in docs/configuration.md"

UNASKED: dict[str, str] = {
    "no_params": (
        "the proxy in front sends no kv_transfer_params: set it to NixlConnector's protocol, or use pd-router "
        "(docs/proxies.md)"
    ),
    "nothing_asked": (
        "its kv_transfer_params have neither do_remote_decode nor do_remote_prefill: set the proxy to NixlConnector's "
        "protocol, or use pd-router (docs/proxies.md)"
    ),
}
"""What to do if requests ask for no handoff, by the cause in `unmoved_prompts`."""
_USED = ("releases", "sent_chunks", "outgoing_transfers", "incoming_transfers")
"""Metrics that are above zero at an engine that a proxy has asked for a handoff; `handoffs` is another."""
_BY_CAUSE = ("failed_transfers", "handoffs", "ignored_params", "unmoved_prompts")


class Outage(NamedTuple):
    """No KV arrives at an engine.

    Attributes:
        finding: the finding from its metrics, as a sentence.
        advice: what to do.
    """

    finding: str
    advice: str


def remedy(cause: Cause) -> str:
    """What to set or do if transfers fail for this cause."""
    return _REMEDIES.get(cause, _NO_REMEDY)


def remedy_of(cause: str) -> str:
    """The remedy of a cause that a metric names."""
    return remedy(Cause(cause)) if cause in list(Cause) else _NO_REMEDY


def weights_read(read_bytes: float, nbytes: float) -> str:
    """How far an engine has read its weights, such as `weights read 3.1 of 16.0 GB`."""
    return f"weights read {read_bytes / 1e9:.1f} of {nbytes / 1e9:.1f} GB"


def unread_in(gauges: Mapping[str, float]) -> str:
    """`weights_read` of an engine, by its gauges (names without prefix); empty if it has read all."""
    read_bytes, nbytes = gauges.get("weights_read_bytes", 0.0), gauges.get("weights_bytes", 0.0)
    return weights_read(read_bytes, nbytes) if read_bytes < nbytes else ""


def counts_text(causes: Mapping[Cause, int] | Mapping[str, int]) -> str:
    """Counts by cause as text, most first, such as `unreachable 40, stalled 2`."""
    ordered = sorted(causes.items(), key=lambda item: -item[1])
    return ", ".join(f"{cause} {count}" for cause, count in ordered)


_STAGED: dict[str, str] = {
    "config": "its config wants slots in host memory (slot_memory)",
    "transport": "the chosen transport copies with the processors: `nixl` reaches device memory",
    "kernels": "install Triton there",
    "memory": "the GPU has no room for slots: lower the engine's share of its memory, or `slots`",
    "setup": "NIXL does not move the GPU's memory there: see its log, and `pd-connector doctor` on that machine",
    "peer": "the decode engine has no slots on a GPU: see its log",
}
"""What to do if chunks of a cache on a GPU pass through host memory, by the cause in `staged_sessions`."""


def samples_in(metrics: str) -> Iterator[tuple[str, dict[str, str], float]]:
    """The samples of our metrics in an engine's `/metrics`: name without prefix and `_total`, labels, value."""
    for name, labels, value in _SAMPLE.findall(metrics):
        try:
            number = float(value)
        except ValueError:
            continue
        if abs(number) <= _MOST:
            yield name, dict(_LABELS.findall(labels)), number


def staged_in(metrics: str) -> str:
    """Why chunks of a prefill engine's GPU pass through host memory, from its `/metrics`; empty if they do not."""
    causes = Counter[str]()
    for name, labels, value in samples_in(metrics):
        if name == "staged_sessions" and "cause" in labels and value > 0:
            causes[labels["cause"]] += int(value)
    counted = [
        f"{cause} {count} ({_STAGED.get(cause, '?')})" for cause, count in causes.most_common()
    ]
    return "; ".join(counted)


def handoffs_in(metrics: str) -> dict[str, int]:
    """Outcomes of requests whose prompts another engine computed, since a decode engine's start, from its
    `/metrics`."""
    outcomes = Counter[str]()
    for name, labels, value in samples_in(metrics):
        if name == "handoffs" and "cause" in labels:
            outcomes[labels["cause"]] += int(value)
    return dict(outcomes)


def outage_in(metrics: str) -> Outage | None:
    """The outage of an engine, from its `/metrics` (Prometheus' text). None if KV moves there, if there was no prompt
    to move, or if the engine has no PDConnector."""
    totals = Counter[str]()
    by_cause = {name: Counter[str]() for name in _BY_CAUSE}
    for name, labels, value in samples_in(metrics):
        totals[name] += int(value)
        if name in by_cause and "cause" in labels:
            by_cause[name][labels["cause"]] += int(value)
    if totals[FAILING_GAUGE] > 0:
        return _failing(by_cause["failed_transfers"])
    ignored, no_handoff = by_cause["ignored_params"], by_cause["unmoved_prompts"]
    # A request whose parameters were ignored counts as a handoff with that cause, too.
    handoffs = by_cause["handoffs"] - ignored
    if handoffs or any(totals[name] > 0 for name in _USED) or not +(ignored + no_handoff):
        return None
    return _unasked(ignored, no_handoff)


def _failing(failed: Counter[str]) -> Outage:
    by_cause = Counter(
        {Cause(cause): count for cause, count in failed.items() if cause in list(Cause)}
    )
    telling = [cause for cause in by_cause if cause not in HARMLESS]
    worst = max(telling, key=lambda cause: by_cause[cause], default=Cause.INTERNAL)
    finding = f"no KV has arrived there for a minute; transfers failed since its start: {counts_text(by_cause)}"
    return Outage(finding, remedy(worst))


def _unasked(ignored: Counter[str], no_handoff: Counter[str]) -> Outage:
    causes = +(ignored + no_handoff)
    finding = f"no KV has moved there since its start: no request has asked for it so that it can be followed ({counts_text(causes)})"
    worst = causes.most_common(1)[0][0]
    if worst in no_handoff:
        return Outage(finding, UNASKED.get(worst, ""))
    return Outage(finding, remedy(Cause(worst)) if worst in list(Cause) else "")
