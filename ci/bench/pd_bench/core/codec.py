# SPDX-License-Identifier: Apache-2.0
"""`pd-connector bench core codec`: speed of coding bfloat16 on one core, with the compiled loops beside torch's operations."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

import torch

from pd_bench.report import BenchError, Comparison
from pd_bench.sample import Sample
from pd_connector.codec import CODECS, COMPILER, Elements, Part, Shape

SHAPE: Shape = (8, 512, 128)
_BFLOAT16 = Elements("bfloat16")
_CALLS = 8
"""Planes timed together, because one plane takes only a tenth of a millisecond."""


def measure(runs: int, shape: Shape = SHAPE) -> list[Comparison]:
    """GB/s of bfloat16 on one core, for every lossy codec, K and V, encoding and decoding.

    Args:
        runs: runs of each, after one uncounted run; ours and torch's run in turn.

    Raises:
        BenchError: numba is missing.
    """
    if not COMPILER.wait():
        raise BenchError("numba is not installed, or cannot compile: vLLM brings it")
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return [
            _compare({"codec": name, "part": part.value, "way": direction}, call, nbytes, runs)
            for name in CODECS
            if name != "raw"
            for part in Part
            for direction, call, nbytes in _calls(name, part, shape)
        ]
    finally:
        torch.set_num_threads(threads)


def _calls(name: str, part: Part, shape: Shape) -> Iterator[tuple[str, Callable[[], object], int]]:
    codec = CODECS[name]
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)
    coded = torch.empty(codec.coding.coded_bytes(part, shape, _BFLOAT16), dtype=torch.uint8)
    yield "encode", lambda: codec.encode(part, x, _BFLOAT16, _BFLOAT16, coded), x.nbytes
    yield "decode", lambda: codec.decode(part, coded, shape, _BFLOAT16, _BFLOAT16), x.nbytes


def _compare(
    params: dict[str, str | int | float], call: Callable[[], object], nbytes: int, runs: int
) -> Comparison:
    ours, torchs = [], []
    for _ in range(runs + 1):
        ours.append(_rate(call, nbytes))
        with COMPILER.off():
            torchs.append(_rate(call, nbytes))
    samples = Sample(tuple(ours[1:])), Sample(tuple(torchs[1:]))
    return Comparison("codec", params, *samples, "GB/s", more_is_better=True)


def _rate(call: Callable[[], object], nbytes: int) -> float:
    began = time.perf_counter()
    for _ in range(_CALLS):
        call()
    return _CALLS * nbytes / (time.perf_counter() - began) / 1e9
