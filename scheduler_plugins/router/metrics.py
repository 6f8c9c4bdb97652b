# SPDX-License-Identifier: Apache-2.0
"""The router's Prometheus metrics."""

from functools import partial

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from scheduler_plugins.router.recent_history import RecentHistory

FIRST_TOKEN_BUCKETS_S = (
    0.01, 0.02, 0.05, 0.1, 0.2, 0.3, 0.5, 0.75, 1.0, 1.5, 2.0,
    3.0, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 300.0,
)  # fmt: skip

OUTCOMES = ("handed_over", "audited", "unaudited", "cached", "aborted")
"""Outcomes of requests to pairs, as decode engines count them. Any other outcome is the cause of a recomputed
prompt."""


class Metrics:
    """The metrics of one router, in their own registry."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.pulse = RecentHistory()
        """The last minutes, for the live page."""
        self.first_worker = True
        """Whether this process counts what engines report. All workers of a router read it, and one counts it."""
        counter = partial(Counter, registry=self.registry)
        gauge = partial(Gauge, registry=self.registry)
        histogram = partial(Histogram, registry=self.registry)
        self.requests = counter(
            "pd_router:requests", "Requests finished, by route and outcome.", ["route", "outcome"]
        )
        self.flows = counter(
            "pd_router:flows",
            "Attempts sent to engines, by flow (disaggregated, decode_alone, prefill_alone) "
            "and, if not disaggregated, by cause.",
            ["flow", "cause"],
        )
        self.pool_requests = counter(
            "pd_router:pool_requests",
            "Attempts whose prefill engine was expected to load the beginning of the prompt from the KV pool of its host.",
            ["pool"],
        )
        self.handoffs = counter(
            "pd_router:handoffs",
            "Requests by the outcome of their KV, as decode engines report: handed_over, audited, unaudited, cached, aborted, "
            "recomputed (with its cause); and alone: sent to one engine (with its cause).",
            ["outcome", "cause"],
        )
        self.retries = counter(
            "pd_router:retries",
            "Attempts that failed before a byte reached the client, by cause.",
            ["cause"],
        )
        self.rejected = counter(
            "pd_router:rejected",
            "Requests rejected because the promise of their class would be broken.",
            ["qos", "cause"],
        )
        self.cpu_prefills = counter(
            "pd_router:cpu_prefills",
            "Attempts whose prompt an engine without a GPU computes, by cause: background (nobody waits), late (all other "
            "prefill engines would be late).",
            ["cause"],
        )
        self.fellows = gauge(
            "pd_router:fellows", "Other routers of the same engines that are heard (--fellows)."
        )
        self.promise_margin = gauge(
            "pd_router:promise_margin",
            "Factor for predicted times to the first token, before they are compared with the promise.",
            ["qos"],
        )
        self.waiting = gauge(
            "pd_router:requests_waiting",
            "Requests that wait at the router because engines are busy.",
            ["qos"],
        )
        self.resumed = counter(
            "pd_router:resumed_streams",
            "Streams that went on at another engine after the answering engine was lost.",
        )
        self.circuit_opened = counter(
            "pd_router:circuit_opened",
            "Pauses of engines that failed requests in a row, by cause.",
            ["engine", "cause"],
        )
        self.role_moves = counter(
            "pd_router:role_moves",
            "Changes of an engine's role, by its old and new role, and by cause: the policy that decided, operator, "
            "settings, dry_run (nothing was changed), or failed_ with the step that failed.",
            ["from", "to", "cause"],
        )
        self.engines_wanted = gauge(
            "pd_router:engines_wanted",
            "Engines that a side of a group shall have, by a role policy that starts and stops engines. Only the router "
            "that decides on roles has it.",
            ["group", "role"],
        )
        self.engine_starts = counter(
            "pd_router:engine_starts",
            "Runs of start_command and stop_command, by what came of them: started, stopped, or failed_ with the step that "
            "failed (command, address, serving, stop).",
            ["group", "role", "outcome"],
        )
        self.policy_faults = counter(
            "pd_router:policy_faults",
            "Decisions that a policy did not make, so that the default policy made them (of a role policy: no engine "
            "moved), by policy and cause: raised, wrong (a decision that cannot be followed), late (ended after a "
            "second), paused (not asked because it was late), deferred (for too long).",
            ["policy", "cause"],
        )
        self.prefill_failures = counter(
            "pd_router:prefill_failures",
            "Prefill copies that failed. The decode side then computes the prompt itself.",
            ["cause"],
        )
        self.first_token_s = histogram(
            "pd_router:time_to_first_token_seconds",
            "From the request's arrival to the first byte sent to the client, streams only.",
            ["flow"],
            buckets=FIRST_TOKEN_BUCKETS_S,
        )
        self.expected_first_token_s = histogram(
            "pd_router:expected_time_to_first_token_seconds",
            "Predicted time to the first token of disaggregated streams, when their engines were chosen.",
            buckets=FIRST_TOKEN_BUCKETS_S,
        )
        self.cached_tokens = counter(
            "pd_router:cached_tokens",
            "Cached tokens of prompts: expected by the index, and actual by the engine's answer.",
            ["what"],
        )
        self.counted_prompt_tokens = counter(
            "pd_router:counted_prompt_tokens",
            "Tokens of the prompts whose cached tokens were counted.",
        )
        self.event_lag_s = gauge(
            "pd_router:kv_event_lag_seconds",
            "Age of the last batch of KV events when it was applied.",
            ["engine"],
        )
        self.events_connected = gauge(
            "pd_router:kv_events_connected",
            "1 while the KV events of an engine can be received, 0 while their port cannot be reached.",
            ["engine"],
        )
        self.in_flight = gauge("pd_router:requests_in_flight", "Client requests being served.")
        self.engine_in_flight = gauge(
            "pd_router:engine_requests_in_flight", "Requests open to an engine.", ["engine", "role"]
        )
        self.engine_up = gauge(
            "pd_router:engine_up",
            "1 while an engine gets requests, 0 while it does not.",
            ["engine", "role"],
        )
        self.workers = gauge(
            "pd_router:workers", "Processes that serve clients; 0 if the router is one process."
        )
        self.worker_restarts = counter(
            "pd_router:worker_restarts", "Processes that served clients and ended."
        )
        self.prefill_addressable = gauge(
            "pd_router:prefill_addressable",
            "1 while a prefill engine's address for KV transfers is known.",
            ["engine"],
        )

    def render(self) -> bytes:
        """All samples in Prometheus' text format."""
        return generate_latest(self.registry)
