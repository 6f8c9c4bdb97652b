# SPDX-License-Identifier: Apache-2.0
"""Another simulator as a witness: AISimulate plays the same requests on the same fleets, with the costs that are fitted from
its own step times.

Both are first come, first served, with round robin. Its results are kept with the requests in a file, so that CI compares
without it.
"""

from __future__ import annotations

import json
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from pd_bench.plan.stock import MODEL
from pd_bench.report import BenchError
from scheduler_plugins.cost.engine_profile import EngineProfile
from scheduler_plugins.order.request import Waiting
from scheduler_plugins.planner.goodput import Promise
from scheduler_plugins.profile.aisimulate import PINNED, SYSTEMS, profile
from scheduler_plugins.router.policies.base import Role
from scheduler_plugins.sim.capacity import kept
from scheduler_plugins.sim.fleet import Fleet, Part
from scheduler_plugins.sim.links import Network
from scheduler_plugins.sim.simulate import Scenario
from scheduler_plugins.sim.trace import at_rate

NAME = "meta-llama/Meta-Llama-3.1-8B"
DEVICE, GPUS = "H100", 8
APART = (3, 5, 6, 7)
"""Prefill engines of eight; the others decode."""
CHUNKS = (512, 1024, 2048, 8192)
"""Prompt tokens of a step of eight engines that do both."""
PREFILL_CHUNK = 8192
PROMISE = Promise(0.5, 0.05)
LINK_BYTES_PER_S = 25e9
BLOCK_TOKENS = 16
_PROGRAM = Path(__file__).with_name("witness_program.py")


class FleetKind(NamedTuple):
    """Eight engines: how many of them prefill; 0: all do both."""

    prefill: int
    chunk_tokens: int

    @property
    def name(self) -> str:
        if self.prefill:
            return f"{self.prefill}P{GPUS - self.prefill}D"
        return f"{GPUS} both, chunks of {self.chunk_tokens:,}"


FLEETS = [FleetKind(n, PREFILL_CHUNK) for n in APART] + [FleetKind(0, n) for n in CHUNKS]


class Traffic(msgspec.Struct, frozen=True):
    """Requests at a rate."""

    trace: str
    per_s: float
    requests: list[tuple[float, int, int]]  # arrival in seconds, prompt and answer in tokens


class Seen(msgspec.Struct, frozen=True):
    """What the witness saw."""

    traffic: int
    fleet: str
    in_time: float


class Witness(msgspec.Struct, frozen=True):
    """The file."""

    source: str
    version: str
    profiles: dict[str, EngineProfile]  # by chunk
    traffic: list[Traffic]
    seen: list[Seen]


def traffic(name: str, requests: Sequence[Waiting], per_s: float, number: int) -> Traffic:
    """The first requests of a trace at a rate."""
    played = at_rate(requests[:number], per_s, seed=0)
    return Traffic(
        name, per_s, [(round(it.arrival_s, 6), it.tokens, it.max_tokens) for it in played]
    )


def ask(traffics: Sequence[Traffic], python: str, source: str) -> Witness:
    """Have the witness play every fleet on every traffic.

    Raises:
        BenchError: it cannot.
    """
    profiles = {
        str(chunk): profile(MODEL, NAME, DEVICE, 1, chunk, python)
        for chunk in dict.fromkeys((*CHUNKS, PREFILL_CHUNK))
    }
    seen = list[Seen]()
    with tempfile.TemporaryDirectory() as folder:
        lines, questions = list[str](), list[tuple[int, FleetKind]]()
        for n, each in enumerate(traffics):
            path = Path(folder) / f"{n}.jsonl"
            path.write_text("\n".join(_rows(each)) + "\n")
            for fleet in FLEETS:
                room = profiles[str(fleet.chunk_tokens)].kv_tokens
                lines.append(json.dumps(config(path, fleet, room)))
                questions.append((n, fleet))
        answers = run(lines, python)
        for (n, fleet), answer in zip(questions, answers, strict=True):
            if "error" in answer:
                raise BenchError(f"{fleet.name}: {answer['error']}")
            part = answer["in_time"] / len(traffics[n].requests)
            seen.append(Seen(n, fleet.name, round(part, 4)))
    return Witness(source, PINNED, profiles, list(traffics), seen)


def run(lines: Sequence[str], python: str) -> list[dict[str, Any]]:
    """The witness's answers to its own configs, as JSON.

    Raises:
        BenchError: it does not run.
    """
    ended = subprocess.run(
        [python, "-P", str(_PROGRAM)],
        input="\n".join(lines) + "\n",
        capture_output=True,
        text=True,
        check=False,
    )
    answers = [json.loads(line) for line in ended.stdout.splitlines() if line.startswith("{")]
    if len(answers) != len(lines):
        last = (ended.stderr.strip().splitlines() or ["no message"])[-1]
        raise BenchError(f"{python}: {len(answers)} answers to {len(lines)} questions: {last}")
    return answers


def _rows(each: Traffic) -> Iterator[str]:
    """Mooncake's lines, in which prompts share nothing."""
    block = 0
    for arrival_s, tokens, more in each.requests:
        blocks = -(-tokens // 512)
        yield json.dumps(
            {
                "timestamp": arrival_s * 1e3,
                "input_length": tokens,
                "output_length": more,
                "hash_ids": list(range(block, block + blocks)),
            }
        )
        block += blocks


def config(path: Path, fleet: FleetKind, kv_tokens: float) -> dict[str, Any]:
    """AISimulate's config of a fleet."""

    def worker(replicas: int) -> dict[str, Any]:
        return {
            "parallelism": {"replicas": replicas},
            "scheduler": {"max_batched_tokens": fleet.chunk_tokens, "max_sequences": 256},
            "kv_cache": {
                "block_size": BLOCK_TOKENS,
                "capacity": {"type": "fixed", "blocks": int(kv_tokens) // BLOCK_TOKENS},
            },
        }

    engine: dict[str, Any] = {"model": NAME, "hardware": SYSTEMS[DEVICE], "backend": "vllm"}
    if fleet.prefill:
        engine |= {
            "mode": "disaggregated",
            "workers": {"prefill": worker(fleet.prefill), "decode": worker(GPUS - fleet.prefill)},
            "kv_transfer": {"bandwidth_gb_per_second": LINK_BYTES_PER_S / 1e9},
        }
    else:
        engine |= {"mode": "aggregated", "workers": {"aggregated": worker(GPUS)}}
    sla = {"ttft_ms": PROMISE.ttft_s * 1e3, "itl_ms": PROMISE.tpot_s * 1e3}
    return {
        "traffic": {
            "source": {"type": "trace", "format": "mooncake", "paths": [str(path)]},
            "load": {"type": "trace_timestamps"},
        },
        "engine": engine,
        "evaluation": {"sla": sla},
    }


def ours(witness: Witness, n: int, fleet: FleetKind) -> float:
    """The part in time that our simulator sees."""
    like = witness.profiles[str(fleet.chunk_tokens)]
    parts = (
        (
            Part(role=Role.PREFILL, profile=like, number=fleet.prefill),
            Part(role=Role.DECODE, profile=like, number=GPUS - fleet.prefill),
        )
        if fleet.prefill
        else (Part(role=Role.DECODE, profile=like, number=GPUS),)
    )
    network = Network(
        bytes_per_s=LINK_BYTES_PER_S, kv_bytes_per_token=like.kv_bytes_per_token, overlap=False
    )
    scenario = Scenario(fleet=Fleet(parts=parts, network=network), level=2, order="fcfs")
    requests = [
        Waiting(
            id=str(i),
            tokens=tokens,
            block_hashes=(),
            arrival_s=arrival_s,
            max_tokens=more,
            priority=tokens,
        )
        for i, (arrival_s, tokens, more) in enumerate(witness.traffic[n].requests)
    ]
    scenario = replace(scenario, ttft_slo_s=PROMISE.ttft_s, tpot_slo_s=PROMISE.tpot_s)
    return kept(scenario.cluster("round_robin").run(requests), *PROMISE)
