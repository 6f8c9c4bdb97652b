# SPDX-License-Identifier: Apache-2.0
"""`bench beside`: KV moved between two processes whose own threads compute in Python meanwhile, as engines'
do; with `switch_interval_ms` as it comes, and with Python's own.

Both ways are measured in turn, run by run, in the same two processes. What has arrived is verified.
"""

from collections.abc import Sequence
from typing import NamedTuple

from pd_connector.config import PYTHON_SWITCH_MS, Config
from pd_connector.tools.bench.machine import Noise
from pd_connector.tools.bench.report import Comparison
from pd_connector.tools.bench.sample import Sample
from pd_connector.tools.bench.wire.busy import KINDS
from pd_connector.tools.bench.wire.measure import Say
from pd_connector.tools.bench.wire.pair import WirePair

OURS_MS = Config().switch_interval_ms


class BesideFindings(NamedTuple):
    """Comparisons with Python's own interval, and how busy others kept the machine, in cores."""

    comparisons: list[Comparison]
    others_cores: float


class _Run(NamedTuple):
    ms: float  # asked for -> in the consumer's pages
    rounds_per_cpu_s: float  # of the computing threads


def measure(
    pair: WirePair, transports: Sequence[str], runs: int, warm_ups: int, say: Say
) -> BesideFindings:
    """Raises BenchError: KV did not arrive, or not all of it was right."""
    noise = Noise(pair.pids)
    comparisons: list[Comparison] = []
    for transport in transports:
        for kind in KINDS:
            found: dict[float, list[_Run]] = {OURS_MS: [], PYTHON_SWITCH_MS: []}
            for number in range(warm_ups + runs):
                for interval_ms, kept in found.items():
                    run = _run(pair, transport, kind, interval_ms)
                    say(f"{transport} beside {kind}, {interval_ms:g} ms: {run.ms:.0f} ms")
                    if number >= warm_ups:
                        kept.append(run)
            comparisons += _compare(transport, kind, found)
    return BesideFindings(comparisons, noise.cores())


def _run(pair: WirePair, transport: str, kind: str, interval_ms: float) -> _Run:
    settings = {"transports": [transport], "switch_interval_ms": interval_ms}
    pair.open("ours", settings)
    pair.run(False)  # connects
    pair.compute(kind)
    moved = pair.run(False)
    rounds, cpu_s = pair.computed()
    pair.close()
    return _Run(1000 * moved.seconds, rounds / cpu_s)


def _compare(transport: str, kind: str, found: dict[float, list[_Run]]) -> list[Comparison]:
    ours, python = found[OURS_MS], found[PYTHON_SWITCH_MS]
    params = {"transport": transport, "beside": kind}

    def sample(runs: Sequence[_Run], field: str) -> Sample:
        return Sample(tuple(getattr(run, field) for run in runs))

    return [
        Comparison("transfer", params, sample(ours, "ms"), sample(python, "ms"), "ms"),
        Comparison(
            "their rounds",
            params,
            sample(ours, "rounds_per_cpu_s"),
            sample(python, "rounds_per_cpu_s"),
            "/s",
            more_is_better=True,
        ),
    ]
