# SPDX-License-Identifier: Apache-2.0
"""`bench handoff --on ray`: time to first token through Ray Serve, beside Ray's `NixlConnectorBackend`.

One application runs at a time, with the same prompts. Serve logs the prefill replica's own time. The rest of the
time to the first token is the part after the prefill.
"""

from __future__ import annotations

import contextlib
import random
import secrets
import string
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from pd_bench.handoff.contender import Contender, by_name
from pd_bench.handoff.ray_stack import OURS, RAYS, RayStack
from pd_bench.harness import NIXL, missing_module, wait_for
from pd_bench.machine import Noise
from pd_bench.model import write_model
from pd_bench.netns import Bed, Namespace
from pd_bench.report import BenchError, Comparison, Param, Say
from pd_bench.sample import Sample
from pd_bench.serve.sending import Answer, completion_rate, send
from pd_bench.serve.trace import TimedRequest
from pd_connector.tools.launch.service import log_folder

BASELINE = Contender("NixlConnector", "NixlConnector")
_BARS: Mapping[str, Mapping[int, float]] = {BASELINE.name: {2048: 0.30}}
CONTENDERS = by_name(
    *(
        Contender(codec, "PDConnector", {"codec": codec}, {"codec": codec}, _BARS, together=True)
        for codec in ("raw", "int8")
    )
)
RATE_BAR = 1.2
LOAD = 0.8
"""Share of the baseline's capacity at which both are measured."""
AT_ONCE = 4
"""Requests under way at all times while capacity is measured."""
LOADED = 18
"""Requests in a run under load."""
ANSWER_TOKENS = 4
_LETTERS = string.ascii_lowercase + " "
_PROMPT_TOKENS = "ray_vllm_prompt_tokens_by_source_total"
_FAILED = "ray_pd_connector_failed_transfers_total"
_REPORT_TIMEOUT_S = 30.0


class TimedAnswer(NamedTuple):
    """One request through Serve."""

    ttft_s: float  # request sent -> first token streamed
    prefill_s: float  # the prefill replica's part of it

    @property
    def after_s(self) -> float:
        """The rest, without the prefill replica's part."""
        return self.ttft_s - self.prefill_s


@dataclass(frozen=True)
class RayMeasured:
    """Measurements of one application."""

    contender: Contender
    runs: Mapping[int, Sequence[TimedAnswer]]  # by prompt length
    capacity: float  # requests a second
    loaded: Sequence[Answer]
    others_cores: float


@dataclass
class RayBench:
    """One comparison of ours with Ray's connector.

    Args:
        ours: by codec.
        link_mbit: rate of the link between the two nodes.
        prompt_tokens: prompt lengths.
        runs: measured requests of each length.
        warm_ups: requests before them, not counted.
    """

    ours: Sequence[Contender]
    link_mbit: float
    prompt_tokens: Sequence[int]
    runs: int
    warm_ups: int
    _seed: int = field(default=0, init=False)
    _sent_tokens: int = field(default=0, init=False)

    def problem(self) -> str:
        """Why nothing can be measured here, with advice; empty if it can."""
        return missing_module(
            ("ray", "use an environment that has it: pip install 'pd-connector[ray]'"), NIXL
        )

    def measure(self, say: Say) -> list[RayMeasured]:
        """Measure everything, the baseline first. At the end no process and no namespace is left.

        Raises:
            PDConnectorError: an application does not start, or fails requests.
        """
        logs = log_folder()
        say(f"logs in {logs}")
        measured: list[RayMeasured] = []
        with contextlib.ExitStack() as stack:
            bed = stack.enter_context(Bed(self.link_mbit))
            folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="pd-connector-model-"))
            model = str(write_model(Path(folder)))
            for contender in (BASELINE, *self.ours):
                say(f"{contender.name}: starting two Ray nodes and their engines")
                with self._stack(contender, model, bed.namespaces, logs) as running:
                    capacity = measured[0].capacity if measured else None
                    measured.append(self._measure(contender, running, capacity, say))
        return measured

    def _stack(
        self, contender: Contender, model: str, namespaces: tuple[Namespace, Namespace], logs: Path
    ) -> RayStack:
        longest = max(4096, max(self.prompt_tokens) + 64)
        engine = {"max_model_len": longest, "load_format": "dummy"}
        transfer: dict[str, Any] = {"kv_connector": contender.connector}
        if contender.is_baseline:
            transfer |= {"kv_role": "kv_both", "kv_buffer_device": "cpu"}
        else:  # shared memory would bypass the link, and an audit would take the first prompt
            config = {"transports": ["tcp"], "audit": "off", **contender.config}
            transfer["kv_connector_extra_config"] = config
        builder = RAYS if contender.is_baseline else OURS
        key = secrets.token_hex(32)
        folder = logs / contender.name
        return RayStack(builder, transfer, model, engine, namespaces, folder, key)

    def _measure(
        self, contender: Contender, stack: RayStack, capacity: float | None, say: Say
    ) -> RayMeasured:
        self._seed = self._sent_tokens = 0  # the same prompts for all
        # The ingress answers before engines do. A request waits for the engines; then all processes exist.
        self._run(stack, self.prompt_tokens[0])
        noise = Noise()
        runs: dict[int, list[TimedAnswer]] = {}
        for tokens in self.prompt_tokens:
            answered = [self._run(stack, tokens) for _ in range(self.warm_ups + self.runs)]
            runs[tokens] = answered[self.warm_ups :]
            times = ", ".join(
                f"{answer.ttft_s:.2f} ({answer.after_s:.2f})" for answer in runs[tokens]
            )
            say(f"{contender.name}, {tokens:,} tokens: {times} s")
        client = stack.serve.client
        model = client.model()
        rate, answers = completion_rate(client, model, self._requests(1.0), AT_ONCE)
        say(f"{contender.name}: {rate:.2f} requests/s with {AT_ONCE} under way")
        loaded = send(client, model, self._requests(LOAD * (capacity or rate)))
        failures = [answer.failure for answer in (*answers, *loaded) if answer.failure]
        if failures:
            raise BenchError(
                f"{contender.name}: {len(failures)} requests failed, one of them: {failures[0]}; see "
                f"{stack.head.folder}"
            )
        self._check(contender, stack)
        return RayMeasured(contender, runs, rate, loaded, noise.cores())

    def _check(self, contender: Contender, stack: RayStack) -> None:
        """Verify that all prompts' KV came over the link."""

        def counts() -> tuple[float, float]:
            samples = stack.head.metrics()
            fetched = samples.total(_PROMPT_TOKENS, source="external_kv_transfer")
            return fetched, samples.total(_FAILED)

        def came() -> bool | None:
            fetched, failed = counts()
            return True if not failed and fetched >= 0.95 * self._sent_tokens else None

        def problem() -> str:
            fetched, failed = counts()
            return (
                f"{contender.name}: the decode engine fetched {fetched:.0f} of "
                f"{self._sent_tokens} prompt tokens ({failed:.0f} transfers failed): its times "
                f"are not those of a handoff. See {stack.head.folder}"
            )

        wait_for(came, _REPORT_TIMEOUT_S, problem, 0.5)

    def _run(self, stack: RayStack, tokens: int) -> TimedAnswer:
        """One request, alone."""
        before = len(stack.prefills_s())
        request = TimedRequest(0.0, self._prompt(tokens), ANSWER_TOKENS)
        (answer,) = send(stack.serve.client, stack.serve.client.model(), [request])
        if answer.failure:
            raise BenchError(f"a request failed: {answer.failure}; see {stack.serve.log_path}")
        problem = (
            f"the prefill replica has not logged a request of {tokens} tokens within "
            f"{_REPORT_TIMEOUT_S:.0f} s: the decode replica computed it itself; see {stack.head.folder}"
        )

        def logged() -> float | None:
            prefills_s = stack.prefills_s()
            return prefills_s[-1] if len(prefills_s) == before + 1 else None

        prefill_s = wait_for(logged, _REPORT_TIMEOUT_S, lambda: problem, 0.1)
        return TimedAnswer(answer.ttft_s, prefill_s)

    def _requests(self, per_s: float) -> list[TimedRequest]:
        """All lengths in turn, at random times, `per_s` requests a second."""
        moves = random.Random(LOADED)
        at_s, requests = 0.0, []
        for number in range(LOADED):
            tokens = self.prompt_tokens[number % len(self.prompt_tokens)]
            requests.append(TimedRequest(at_s, self._prompt(tokens), ANSWER_TOKENS))
            at_s += moves.expovariate(per_s)
        return requests

    def _prompt(self, tokens: int) -> str:
        """A prompt of `tokens` tokens. Each letter is a token of the served model, which adds a first one."""
        self._seed += 1
        self._sent_tokens += tokens
        return "".join(random.Random(self._seed).choices(_LETTERS, k=tokens - 1))


def compared(measured: Sequence[RayMeasured]) -> list[Comparison]:
    """Ours beside the baseline, which is the first."""
    baseline, *ours = measured
    return [row for application in ours for row in _rows(application, baseline)]


def _rows(ours: RayMeasured, baseline: RayMeasured) -> list[Comparison]:
    codec = ours.contender.params
    rows = []
    for tokens in baseline.runs:
        params: dict[str, Param] = {"prompt_tokens": tokens, **codec}
        for name, part, bar in (
            ("after the prefill", "after_s", ours.contender.bar(BASELINE.name, tokens)),
            ("first token", "ttft_s", None),
            ("prefill", "prefill_s", None),
        ):
            mine, theirs = (
                _ms([getattr(run, part) for run in application.runs[tokens]])
                for application in (ours, baseline)
            )
            rows.append(Comparison(name, params, mine, theirs, "ms", bar))
    mine, theirs = (
        _ms([answer.ttft_s for answer in application.loaded]) for application in (ours, baseline)
    )
    rows.append(Comparison("first token", {"load": LOAD, **codec}, mine, theirs, "ms"))
    mine, theirs = (Sample((application.capacity,)) for application in (ours, baseline))
    rows.append(Comparison("requests", codec, mine, theirs, "/s", RATE_BAR, True))
    return rows


def _ms(seconds: Sequence[float]) -> Sample:
    return Sample(tuple(seconds)).scaled(1e3)
