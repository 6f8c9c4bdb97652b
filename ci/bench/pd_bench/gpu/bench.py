# SPDX-License-Identifier: Apache-2.0
"""`bench handoff --gpu`: KV moved between two processes on a GPU over NIXL. Compares payloads that the transfer
kernels collate with one descriptor per page.

Everything runs in the same two processes, one contender after the other, with the baseline first and last.
Received KV is verified after each run, outside the measured time.
"""

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pd_bench.harness import NIXL, require
from pd_bench.kernels.caches import MODELS, Model
from pd_bench.machine import Noise
from pd_bench.report import BenchError, Comparison, Param, Say
from pd_bench.sample import Sample
from pd_bench.wire.measure import WireFindings
from pd_bench.wire.pair import PartyProcess, WirePair, WireRun
from pd_connector.tools.launch import Family

CODECS = ("raw", "fp8_e4m3", "int8")
AGENTS = ("agent-device", "agent-host")
"""Whole agents, with their slots on the device or in pinned host memory."""
PROMPT_TOKENS = (512, 7_500, 32_000)
SLOTS = 4
SLOT_BYTES = 64 << 20
"""As much memory as a connector's slots have by default, in fewer and larger slots: launching a kernel takes
longer than the kernel needs for 16 MiB."""
_BARS = {("Llama-3.1-8B", 7_500, "raw"): 1 / 2.5}
_BASELINE = "NIXL pages"
_PATIENCE_S = 100.0
"""Warm-up runs of agents: kernels are compiled before the first chunk."""


@dataclass(frozen=True)
class GpuBench:
    """The parameters of one measurement.

    Args:
        devices: of the producer and the consumer, as torch names them, such as `cuda:0`. `cpu` tries the
            benchmark in host memory; its figures then mean nothing and have no bar.
        codecs: codecs of ours, or names of `AGENTS`, which send `raw`.
        prompt_tokens: prompt lengths.
        runs: measured runs of each contender.
        warm_ups: runs before them, not counted.
        models: the part of a model that one rank holds.
        slots: number of slots in each side's slab.
        slot_bytes: size of each.
    """

    devices: tuple[str, str]
    codecs: Sequence[str]
    prompt_tokens: Sequence[int]
    runs: int
    warm_ups: int
    models: Sequence[Model] = MODELS
    slots: int = SLOTS
    slot_bytes: int = SLOT_BYTES

    @property
    def on_gpu(self) -> bool:
        return all(device.startswith("cuda") for device in self.devices)

    def measure(self, say: Say) -> WireFindings:
        """Measure everything.

        Raises:
            BenchError: something is missing here, or KV did not arrive, or not all of it was right.
        """
        self._check_possible()
        with GpuPair(self.devices) as pair:
            noise = Noise()
            comparisons = [
                comparison
                for model in self.models
                for tokens in self.prompt_tokens
                for comparison in self._measure(pair, model, tokens, say)
            ]
            return WireFindings([(_BASELINE, comparisons)], noise.cores())

    def notes(self) -> list[str]:
        """Notes that a reader of the table must know."""
        if not self.on_gpu:
            return ["in host memory: the figures say nothing of a GPU"]
        import torch

        names = [torch.cuda.get_device_name(device) for device in self.devices]
        where = f"both processes on {self.devices[0]}"
        if self.devices[0] != self.devices[1]:
            where = f"from {self.devices[0]} to {self.devices[1]}"
        return [f"GPU: {names[0]}, CUDA {torch.version.cuda}, {where}"]

    def _check_possible(self) -> None:
        require(NIXL, ("triton", "every engine for GPUs brings it"))
        import torch

        count = torch.cuda.device_count() if self.on_gpu else 0
        for device in self.devices if self.on_gpu else ():
            if int(device.partition(":")[2] or 0) >= count:
                raise BenchError(
                    f"no GPU {device!r}: torch {torch.__version__} sees {count}; `--device cpu` "
                    "tries the benchmark out in host memory"
                )

    def _measure(self, pair: WirePair, model: Model, tokens: int, say: Say) -> list[Comparison]:
        by_contender: dict[str, list[WireRun]] = {}
        for contender in (_BASELINE, *self.codecs, _BASELINE):
            pair.open(_kind(contender), self._settings(model, tokens, contender))
            for number in range(self.warm_ups + self.runs):
                run = pair.run(lossy=contender in ("fp8_e4m3", "int8"))
                warming = number < self.warm_ups
                label = "warm-up" if warming else f"run {number - self.warm_ups + 1}/{self.runs}"
                say(
                    f"{model.name}, {tokens:,} tokens, {contender}, {label}: {run.seconds * 1e3:.2f} ms"
                )
                if not warming:
                    by_contender.setdefault(contender, []).append(run)
            pair.close()
        return [
            comparison
            for codec in self.codecs
            for comparison in self._compare(model, tokens, codec, by_contender)
        ]

    def _settings(self, model: Model, tokens: int, contender: str) -> dict[str, Any]:
        slab = {"slots": self.slots, "slot_bytes": self.slot_bytes}
        config = {
            "transports": ["nixl"],
            "slot_memory": contender.removeprefix("agent-"),
            "connect_timeout_s": _PATIENCE_S,
            "stall_timeout_s": _PATIENCE_S,
        }
        given = {"config": config} if contender in AGENTS else {"codec": contender, **slab}
        return {"model": model._asdict(), "tokens": tokens, **given}

    def _compare(
        self, model: Model, tokens: int, codec: str, by_contender: Mapping[str, Sequence[WireRun]]
    ) -> list[Comparison]:
        params: dict[str, Param] = {"model": model.name, "tokens": tokens, "codec": codec}

        def samples(figure: Callable[[WireRun], float]) -> tuple[Sample, Sample]:
            ours, baseline = (
                Sample(tuple(map(figure, by_contender[contender])))
                for contender in (codec, _BASELINE)
            )
            return ours, baseline

        bar = _BARS.get((model.name, tokens, codec)) if self.on_gpu else None
        gigabytes = model.bytes_of(tokens, 2) / 1e9
        took_ms = samples(lambda run: run.seconds * 1e3)
        rates = samples(lambda run: gigabytes / run.seconds)
        descriptors = samples(lambda run: float(run.descriptors))
        return [
            Comparison("handoff", params, *took_ms, "ms", bar),
            Comparison("rate", params, *rates, "GB/s", more_is_better=True),
            Comparison("descriptors", params, *descriptors, ""),
        ]


def _kind(contender: str) -> str:
    """The kind of mover that both processes open."""
    if contender in AGENTS:
        return "agent"
    return "pages" if contender == _BASELINE else "collated"


class GpuPair(WirePair):
    """Two processes with a cache each on these devices."""

    def __init__(self, devices: tuple[str, str]) -> None:
        super().__init__(tokens=0)
        self._devices = devices

    def _party(self, folder: Path, role: str, index: int) -> PartyProcess:
        path, log = folder / role, folder / f"{role}.log"
        program = [sys.executable, "-m", "pd_bench.gpu.party"]
        family = Family([*program, str(path), role, self._devices[index]], env=self._env, log=log)
        return PartyProcess(family, self._context, path, log)
