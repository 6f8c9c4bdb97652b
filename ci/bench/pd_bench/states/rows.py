# SPDX-License-Identifier: Apache-2.0
"""The rows with vLLM engines. Pairs of one model run at once over one link, and are measured in turn."""

from __future__ import annotations

import contextlib
import json
import secrets
import tempfile
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from enum import StrEnum
from pathlib import Path
from typing import Any

from rich.console import Console

from pd_bench.command_output import noise_note, printing
from pd_bench.flow import two_steps
from pd_bench.handoff.contender import Contender
from pd_bench.handoff.measure import TurnMeasurement
from pd_bench.handoff.pair import Pair, PairSetup, Prompts
from pd_bench.handoff.vllm import BASELINE, VllmPair, engine_of
from pd_bench.harness import wait_for
from pd_bench.machine import Noise
from pd_bench.model import MADE_UP_WEIGHTS
from pd_bench.netns import Bed
from pd_bench.report import BenchError, Compared, Comparison
from pd_bench.sample import Sample, single
from pd_bench.states import step_probe
from pd_bench.states.model import wanted_bytes, write_states_model
from pd_connector.config import KEY_VARIABLE
from pd_connector.tools.demo import MODEL_DIR
from pd_connector.tools.launch import Client, stop_services, wait_all
from pd_connector.tools.launch.engine import PAGE_TOKENS


class Row(StrEnum):
    """What can be measured."""

    LINK = "link"
    BYTES = "bytes"
    LAYOUTS = "layouts"
    STEP = "step"
    STRIPES = "stripes"
    DRAFTS = "drafts"


OVER_LINK = frozenset((Row.LINK, Row.BYTES, Row.LAYOUTS, Row.STEP))
"""Rows that share pairs over the link."""
PROMPT_TOKENS = 3500
STEP_PROMPT_TOKENS, STEP_RUNS = 64, 100
STEP_S = 0.005
"""The bar of the row `step`, 99th percentile."""
DRAFTED, ANSWER, DRAFT_PROMPTS = 2, 60, 5
DRAFT_PROMPT_TOKENS = 6 * PAGE_TOKENS + 1
"""Whole pages and one token: with these pages cached, one engine computes the last token alone, as a decode engine does."""

_RAW = {"transports": ["tcp"], "codec": "raw", "overlap": "off"}
_DIMS_FIRST = {"VLLM_SSM_CONV_STATE_LAYOUT": "DS"}
"""The only layout that NixlConnector takes."""
_ALIKE = Contender("alike", "PDConnector", _RAW)
_UNLIKE = Contender("SD to DS, TP 2 to 1", "PDConnector", _RAW)


def over_link(
    rows: Sequence[Row], link_mbit: float, runs: int, warm_ups: int, logs: Path, console: Console
) -> tuple[list[Compared], list[str]]:
    """Measure these rows over the link: tables by baseline, and notes.

    Raises:
        PDConnectorError: they could not be measured.
    """
    with contextlib.ExitStack() as stack:
        bed = stack.enter_context(Bed(link_mbit))
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="pd-connector-model-"))
        # As a variable: every user on the machine can read arguments.
        env = {**_DIMS_FIRST, KEY_VARIABLE: secrets.token_hex(32)}
        model = str(write_states_model(Path(folder)))
        stage = PairSetup(model, 4096, logs, MADE_UP_WEIGHTS, env, bed.namespaces)
        probed = replace(stage, args=(*stage.args, *step_probe.ARGS), env={**env, **step_probe.ENV})
        others_order = replace(
            stage,
            args=(*stage.args, "--tensor-parallel-size", "2"),
            env={**env, "VLLM_SSM_CONV_STATE_LAYOUT": "SD"},
        )
        pairs = {_ALIKE.name: _pair(_ALIKE, stage, probed if Row.STEP in rows else stage)}
        if Row.LINK in rows:
            pairs[BASELINE.name] = _pair(BASELINE, stage, stage)
        if Row.LAYOUTS in rows:
            pairs[_UNLIKE.name] = _pair(_UNLIKE, others_order, stage)
        stack.enter_context(_running(list(pairs.values()), console))
        noise = Noise()
        tables, notes = _measured(rows, pairs, runs, warm_ups, console)
        return tables, [noise_note(noise.cores()), *notes]


def _measured(
    rows: Sequence[Row],
    pairs: Mapping[str, Pair],
    runs: int,
    warm_ups: int,
    console: Console,
) -> tuple[list[Compared], list[str]]:
    tables: list[Compared] = []
    notes: list[str] = []
    alike = pairs[_ALIKE.name]
    params = {"prompt_tokens": PROMPT_TOKENS}
    if {*rows} & {Row.LINK, Row.BYTES, Row.LAYOUTS}:
        decode = alike.engines[1]
        turns = TurnMeasurement(list(pairs.values()), runs, warm_ups, printing(console))
        before = decode.metrics()
        measured = turns.measure([PROMPT_TOKENS])
        came = decode.metrics().since(before).total("pd_connector:received_bytes_total")
        handoffs = {
            series.contender.name: Sample(
                tuple(run.handoff_s * 1e3 for run in series.runs[PROMPT_TOKENS])
            )
            for series in measured.series
        }
        ours = handoffs[_ALIKE.name]
        if Row.LINK in rows:
            handoff = Comparison("handoff", params, ours, handoffs[BASELINE.name], "ms", 1.0)
            tables.append((BASELINE.name, [handoff]))
        if Row.LAYOUTS in rows:
            handoff = Comparison(_UNLIKE.name, params, handoffs[_UNLIKE.name], ours, "ms", 1.15)
            tables.append((_ALIKE.name, [handoff]))
        if Row.BYTES in rows:
            mean, needed = came / (warm_ups + runs), wanted_bytes(PROMPT_TOKENS)
            sides = single(mean / 1e6), single(needed / 1e6)
            bytes_moved = Comparison("bytes of a handoff", params, *sides, "MB", 1.01)
            tables.append(("wanted", [bytes_moved]))
        if measured.restless:
            notes.append(f"runs that began while some engine was busy: {measured.restless}")
        answers = zip(*(series.runs[PROMPT_TOKENS] for series in measured.series), strict=True)
        if unlike := sum(len({run.text for run in each}) > 1 for each in answers):
            notes.append(f"prompts that the pairs answered differently: {unlike}")
    if Row.STEP in rows:
        others = [pair for pair in pairs.values() if pair is not alike]
        tables.append(("bar", _steps(alike, others)))
    return tables, notes


def _steps(pair: Pair, others: Sequence[Pair]) -> list[Comparison]:
    """Landing of a state -> the decode engine's next step. The other pairs are frozen meanwhile."""
    client = pair.engines[1].client
    prompts = Prompts(pair.engines[0].client)
    try:
        for other in others:
            other.pause()
        pair.run(prompts.make(STEP_PROMPT_TOKENS), uuid.uuid4().hex)
        client.post("/collective_rpc", {"method": "watch_steps"})
        for _ in range(STEP_RUNS):
            pair.run(prompts.make(STEP_PROMPT_TOKENS), uuid.uuid4().hex)
        (delays_s,) = client.post("/collective_rpc", {"method": "step_delays"})["results"]
    finally:
        for other in others:
            other.resume()
    if len(delays_s) != STEP_RUNS:
        raise BenchError(f"{len(delays_s)} of {STEP_RUNS} loads were followed by a step")
    worst = sorted(delays_s)[-max(1, STEP_RUNS // 100) - 1]
    params = {"requests": STEP_RUNS}
    name, bar = "landed to next step", single(STEP_S * 1e3)
    every = Sample(tuple(delays_s)).scaled(1e3)
    return [
        Comparison(name, params, every, bar, "ms"),
        Comparison(f"{name}, p99", params, single(worst * 1e3), bar, "ms", 1.0),
    ]


def drafts(logs: Path, console: Console) -> Comparison:
    """Drafts accepted in answers after a handoff, and in the same answers of the decode engine alone.

    vLLM gives a request of which one token is left to compute placeholders for drafts in its first step, and counts them as
    drafts that were refused. So the engine alone is asked with all but one token in its prefix cache.

    Raises:
        PDConnectorError: it could not be measured.
    """
    speculation = {
        "method": "draft_model",
        "model": str(MODEL_DIR),
        "num_speculative_tokens": DRAFTED,
    }
    args = ("--speculative-config", json.dumps(speculation))
    stage = PairSetup(str(MODEL_DIR), 4096, logs, args)
    pair = _pair(Contender("drafts", "PDConnector"), stage, stage)
    with _running([pair], console):
        prefill, decode = (engine.client for engine in pair.engines)
        prompts, model = Prompts(prefill), decode.model()
        shares: dict[str, list[float]] = {"handed over": [], "one engine": []}
        pair.begin()
        before = decode.metrics()
        for number in range(DRAFT_PROMPTS):
            prompt = prompts.make(DRAFT_PROMPT_TOKENS)
            body: dict[str, Any] = {"model": model, "prompt": prompt, "temperature": 0}
            body |= {"ignore_eos": True, "max_tokens": ANSWER}
            with _share(decode, shares["handed over"]):
                two_steps(prefill, decode, {**body, "cache_salt": f"over {number}"})
            body["cache_salt"] = f"alone {number}"
            decode.post("/v1/completions", {**body, "max_tokens": 1})
            with _share(decode, shares["one engine"]):
                decode.post("/v1/completions", body)
        pair.check()
        grown = decode.metrics().since(before)
    if (came := grown.total("pd_connector:received_transfers_total")) != DRAFT_PROMPTS:
        raise BenchError(f"{came:.0f} of {DRAFT_PROMPTS} prompts were handed over")
    over, alone = (Sample(tuple(values)).scaled(100.0) for values in shares.values())
    params = {"prompts": DRAFT_PROMPTS, "answer_tokens": ANSWER}
    return Comparison("drafts accepted", params, over, alone, "%", 0.98, more_is_better=True)


@contextlib.contextmanager
def _share(decode: Client, shares: list[float]) -> Iterator[None]:
    """Adds the part of the drafts that was accepted in one answer."""
    before = decode.metrics()
    yield
    # vLLM counts drafts before the tokens of the same step.
    grown = wait_for(
        lambda: (
            grown if (grown := decode.metrics().since(before)).total(_TOKENS) >= ANSWER else None
        ),
        10.0,
        lambda: "the tokens of an answer were not counted",
        0.05,
    )
    drafted = grown.total("vllm:spec_decode_num_draft_tokens_total")
    shares.append(grown.total("vllm:spec_decode_num_accepted_tokens_total") / drafted)


_TOKENS = "vllm:generation_tokens_total"


def _pair(contender: Contender, prefill: PairSetup, decode: PairSetup) -> VllmPair:
    """Engines with unlike settings, not started."""
    first, second = prefill.namespaces or (None, None)
    connector, config = contender.connector, contender.config
    names = (f"{contender.name} {side}" for side in ("prefill", "decode"))
    return VllmPair(
        contender,
        engine_of(prefill, next(names), "kv_producer", connector, config, first),
        engine_of(decode, next(names), "kv_consumer", connector, config, second),
    )


@contextlib.contextmanager
def _running(pairs: Sequence[Pair], console: Console) -> Iterator[None]:
    engines = [engine for pair in pairs for engine in pair.engines]
    try:
        for engine in engines:
            engine.start()
        wait_all(engines, console=console)
        yield
    finally:
        stop_services(engines)
