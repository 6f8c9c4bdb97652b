# SPDX-License-Identifier: Apache-2.0
"""Memory of a long prefill in a real engine, with and without hybrid prefilling."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.metadata import entry_points
from pathlib import Path
from typing import NamedTuple

from pd_bench.machine import Noise
from pd_bench.model import MADE_UP_WEIGHTS, write_model
from pd_bench.report import BenchError, Comparison, Say
from pd_bench.sample import Sample
from pd_bench.scheduler.live import Findings
from pd_connector.tools.launch import VllmEngine
from pd_connector.tools.launch.progress import wait_all
from scheduler_plugins.vllm.hybrid import VARIABLE, register

SHAPE = {
    "hidden_size": 512,
    "intermediate_size": 1792,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
    "max_position_embeddings": 1 << 16,
}
"""An MLP 3.5 times as wide as the model, like in Llama 3. Everything else is small, so a CPU takes only seconds."""
STEP_TOKENS = 2048
_WARM_TOKENS = 512
# glibc would keep freed tensors below a growing limit, and so hide the memory of later tensors.
_ENVIRONMENT = {"MALLOC_MMAP_THRESHOLD_": str(256 << 10), "MALLOC_TRIM_THRESHOLD_": "0"}


class Prefill(NamedTuple):
    """One prompt, prefilled in one step."""

    peak_mib: float  # memory beyond the engine's earlier memory
    taken_s: float
    logprob: float  # log probability of the chosen token


async def compare(
    off_tokens: Sequence[int], most_tokens: int, chunk_tokens: int, folder: Path, say: Say
) -> Findings:
    """Peak memory of prompts with both engines, and the longest prompt that fits the same memory with hybrid
    prefilling.

    Args:
        off_tokens: lengths of prompts that both engines prefill. The last sets the memory budget.
        most_tokens: upper end of the search for the longest prompt.
        chunk_tokens: tokens of a chunk of hybrid prefilling.
    """
    _check_installed()
    with _engine(folder, most_tokens, None, say) as off:
        noise = Noise()
        without = {tokens: _prefill(off, tokens, say) for tokens in off_tokens}
    budget = off_tokens[-1]
    budget_mib = without[budget].peak_mib
    with _engine(folder, most_tokens, chunk_tokens, say) as on:
        hybrid = {tokens: _prefill(on, tokens, say) for tokens in off_tokens}
        longest = budget
        for tokens in range(budget + STEP_TOKENS, most_tokens + 1, STEP_TOKENS):
            if _prefill(on, tokens, say).peak_mib > budget_mib:
                break
            longest = tokens
    comparisons = [
        comparison
        for tokens in off_tokens
        for comparison in _comparisons(tokens, hybrid[tokens], without[tokens])
    ]
    comparisons.append(
        Comparison(
            f"longest prompt in {budget_mib:.0f} MiB",
            {"tokens": ""},
            Sample((float(longest),)),
            Sample((float(budget),)),
            "tokens",
            1.0,
            more_is_better=True,
        )
    )
    apart = max(abs(hybrid[token].logprob - without[token].logprob) for token in off_tokens)
    notes = [
        f"chunks of {chunk_tokens} tokens; lengths in steps of {STEP_TOKENS}",
        f"largest difference of a chosen token's logprob between both: {apart:.2g}",
    ]
    return Findings(comparisons, notes, noise.cores())


@contextmanager
def _engine(
    folder: Path, most_tokens: int, chunk_tokens: int | None, say: Say
) -> Iterator[VllmEngine]:
    name = "whole" if chunk_tokens is None else "hybrid"
    model = write_model(folder / "model")
    config = json.loads((model / "config.json").read_text())
    head = {"head_dim": SHAPE["hidden_size"] // SHAPE["num_attention_heads"]}
    (model / "config.json").write_text(json.dumps(config | SHAPE | head))
    longest = str(most_tokens + 64)
    engine = VllmEngine(
        model,
        connector=None,
        name=name,
        max_model_len=most_tokens + 64,
        args=[*MADE_UP_WEIGHTS, "--max-num-batched-tokens", longest, "--no-enable-prefix-caching"],
        env=_ENVIRONMENT if chunk_tokens is None else _ENVIRONMENT | {VARIABLE: str(chunk_tokens)},
        log_path=folder / f"{name}.log",
    )
    say(f"starting {name} (log: {engine.log_path})")
    with engine:
        wait_all([engine])
        _ask(engine, _WARM_TOKENS)
        yield engine


def _prefill(engine: VllmEngine, tokens: int, say: Say) -> Prefill:
    # Sent twice. Only the second counts, because the first may touch memory for the first time.
    _ask(engine, tokens)
    before = _resident(engine, peak=False)
    for pid in before:
        Path(f"/proc/{pid}/clear_refs").write_text("5")  # resets the peak
    taken_s, logprob = _ask(engine, tokens)
    peak = _resident(engine, peak=True)
    grown = max(peak[pid] - before[pid] for pid in before if pid in peak)
    say(f"  {engine.name}: {tokens:,} tokens: {grown / 1024:.0f} MiB more, {taken_s:.1f} s")
    return Prefill(grown / 1024, taken_s, logprob)


def _ask(engine: VllmEngine, tokens: int) -> tuple[float, float]:
    """Seconds that a prompt of this length took, and its answer's logprob."""
    prompt = random.Random(tokens).choices(range(32, 120), k=tokens)
    body = {"model": engine.client.model(), "prompt": prompt, "max_tokens": 1, "temperature": 0}
    before = engine.metrics()
    answer = engine.client.post("/v1/completions", {**body, "logprobs": 1})
    grown = engine.metrics().since(before)
    taken_s = grown.total("vllm:time_to_first_token_seconds_sum")
    return taken_s, float(answer["choices"][0]["logprobs"]["token_logprobs"][0])


def _resident(engine: VllmEngine, *, peak: bool) -> dict[int, int]:
    """KiB of each of the engine's processes: now, or the peak since it was last reset."""
    key = "VmHWM:" if peak else "VmRSS:"
    kib = {}
    for process in engine.family.members() if engine.family else ():
        lines = Path(f"/proc/{process.pid}/status").read_text().splitlines()
        for line in lines:
            if line.startswith(key):
                kib[process.pid] = int(line.split()[1])
    return kib


def _comparisons(tokens: int, on: Prefill, off: Prefill) -> list[Comparison]:
    params = {"tokens": tokens}
    memory = Sample((on.peak_mib,)), Sample((max(off.peak_mib, 1e-3),))
    times = Sample((on.taken_s,)), Sample((off.taken_s,))
    return [
        Comparison("peak memory", params, *memory, "MiB", 1.0),
        Comparison("prefill", params, *times, "s"),
    ]


def _check_installed() -> None:
    """The engine finds the plug-in by the metadata of installed packages."""
    target = f"{register.__module__}:{register.__name__}"
    if not any(
        entry_point.value == target for entry_point in entry_points(group="vllm.general_plugins")
    ):
        raise BenchError(
            f"no entry point of group vllm.general_plugins is {target}: install this version "
            "(pip install -e .)"
        )
