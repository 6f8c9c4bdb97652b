# SPDX-License-Identifier: Apache-2.0
"""The steps in their order: the most decisive first, the longest last."""

import sys
from collections.abc import Sequence

from gpu_run.step import JSON, KERNEL_SOURCES, KERNELS, Step

PYTHON = sys.executable
BENCH = (PYTHON, "-m", "pd_bench.kernels")
OURS = (PYTHON, "-m", "pd_connector")
PYTEST = (PYTHON, "-m", "pytest", "-q", "-p", "no:cacheprovider")

PAYLOADS = (*KERNELS, "msgspec", "numpy", "xxhash")
"""Modules that the transfer kernels need. They take the payload's format from pd_connector."""

CONNECTOR = (*PAYLOADS, "zmq", "cryptography", "prometheus_client", "typer", "rich")
NIXL = (*CONNECTOR, "nixl")
ROUTED = (*CONNECTOR, "vllm", "aiohttp", "httptools", "uvloop", "yaml")
"""Modules of a pair of engines behind the router."""

COMPARED = (*NIXL, "vllm")
"""Modules of pairs of engines, with our connector and with NixlConnector."""

_ALL = (*KERNEL_SOURCES, "pd_connector", "scheduler_plugins")
_GPU_TESTS = (
    "tests/pages/test_kernel_pages.py",
    "tests/pages/test_paged_cache.py",
    "tests/memory/test_pins.py",
    "tests/memory/test_device_slab.py",
    "tests/bench/test_bench_gpu.py",
)
_SANITIZER = (
    *("compute-sanitizer", "--tool", "memcheck", "--error-exitcode", "1"),
    # torch asks CUDA questions that can fail, such as the owner of an address.
    *("--report-api-errors", "no"),
)
_NO_GLUON = ("env", "PD_KERNELS_TUNING=gluon=0")
_MIXED = ("env", "PD_KERNELS_TUNING=mixed_steps=1")
_CUSTOM = ("--engine-arg=--attention-backend", "--engine-arg=CUSTOM")
_MODEL = ("pd_connector/tools/demo/model/model.safetensors",)

# FlexAttention is compiled again for each batch, which takes longer than all else.
_NO_FLEX = ("--only=-FlexAttention", "--only=-mask_mod")


def _check(*arguments: str) -> tuple[str, ...]:
    return (*BENCH, *arguments[:1], "--check", *arguments[1:])


def _decode(*arguments: str) -> tuple[str, ...]:
    return (*BENCH, "decode", "--cases", "0", "--json", JSON, *arguments)


def _gpu_handoff(name: str, why: str, limit_s: float, ours: Sequence[str], *arguments: str) -> Step:
    told = [part for each in ours for part in ("--ours", each)]
    begin = (*OURS, "bench", "handoff", "--gpu", *told, "--json", JSON)
    tried = ("--device", "cpu", "--runs", "1", "--prompt-tokens", "64")
    return Step(name, why, (*begin, *arguments), limit_s, NIXL, (*begin, *tried), sources=_ALL)


def _local_handoff(*tokens: int, runs: int) -> tuple[str, ...]:
    lengths = [part for count in tokens for part in ("--prompt-tokens", str(count))]
    begin = (*OURS, "bench", "handoff", "--local", "--runs", str(runs))
    return (*begin, *lengths, "--json", JSON)


def _demo(name: str, why: str, limit_s: float, *arguments: str, first: Sequence[str] = ()) -> Step:
    command = (*first, *OURS, "demo", *arguments)
    return Step(name, why, command, limit_s, ROUTED, command, files=_MODEL, sources=_ALL)


def _random_batches(name: str, what: str, bench: str, cases: int, only: str) -> Step:
    """Side by side with the others like it, because compiling takes most of its time."""
    command = _check(bench, "--cases", str(cases), *(("--only", only) if only else ()))
    imports = PAYLOADS if bench == "transfer" else KERNELS
    return Step(name, f"{what}: equal to the reference", command, 134, imports, beside="checks")


_CHECKED = (
    ("paged-check", "paged decode and merges", "decode", 36, "paged_decode"),
    ("mla-check", "MLA", "decode", 36, "mla_decode"),
    ("mixed-check", "prefill and decodes in one launch", "decode", 40, "mixed_attention"),
    ("transfer-check", "transfer kernels", "transfer", 45, ""),
)

# The first call: about 9 minutes without engines.
FIRST: Sequence[Step] = (
    Step(
        "probe",
        "versions, clocks, copies, pinned copies, memory registered for reading only",
        (PYTHON, "-m", "gpu_run.probe", JSON),
        30,
        (),
        (PYTHON, "-m", "gpu_run.probe", JSON),
        sources=("ci/gpu_run",),
    ),
    *(_random_batches(*told) for told in _CHECKED),
    Step(
        "mla",
        "MLA beside FlashMLA; above 32 lines Gluon beside Triton",
        _decode("--only", "mla_decode"),
        80,
    ),
    Step(
        "mla-triton",
        "MLA's Triton kernel in Gluon's place, should that be wrong or slow: equal to its reference? Only then beside FlashMLA",
        (
            *(*_NO_GLUON, *BENCH, "decode", "--cases", "36", "--json", JSON),
            *("--only", "mla_decode", "--only", "bfloat16"),
        ),
        75,
    ),
    Step(
        "transfer-quick",
        "gather with sums and scatter beside a copy and torch, Llama in pages of 16 and 64",
        (*BENCH, "transfer", "--cases", "0", "--quick", "--json", JSON),
        50,
        PAYLOADS,
    ),
    Step(
        "paged-quick",
        "paged decode beside FlashInfer, if it is there",
        _decode("--quick", "--only", "paged_decode", "--only=-merge", *_NO_FLEX),
        60,
    ),
    Step(
        "host",
        "what an eager call costs the host, and direct_launch on and off, with equal results",
        _decode("--only", "host of a call"),
        18,
    ),
    _gpu_handoff(
        "handoff-gpu",
        "KV between two processes, beside NIXL with a descriptor per page",
        55,
        ("raw", "int8"),
        *("--prompt-tokens", "7500", "--runs", "3"),
    ),
    _gpu_handoff(
        "device-slots",
        "agents with slots on the device: every page is right, and the rate beside slots in host memory",
        55,
        ("agent-device", "agent-host"),
        *("--prompt-tokens", "7500", "--runs", "2"),
    ),
)

# The second and third call, with vLLM.
ENGINES: Sequence[Step] = (
    _demo("engines", "vLLM: prefill and decode on one GPU answer as one engine does", 220),
    _demo("engines-kernels", "the same with our attention kernels", 220, *_CUSTOM),
    Step(
        "engines-handoff",
        "the same beside NixlConnector, timed",
        _local_handoff(512, 2048, 3500, runs=3),
        300,
        COMPARED,
        _local_handoff(64, runs=1),
        files=_MODEL,
        sources=_ALL,
    ),
)

LATER: Sequence[Step] = (
    Step(
        "tests",
        "tests that need a GPU",
        (*PYTEST, "-m", "gpu", *_GPU_TESTS),
        200,
        (*CONNECTOR, "pytest", "hypothesis"),
        (*PYTEST, "-m", "gpu", *_GPU_TESTS),
        sources=(*_ALL, "tests/pages", "tests/memory", "tests/bench"),
    ),
    Step(
        "mixed-quick",
        "prefill chunks and decodes in one launch beside two in turn, and SM-aware or not",
        _decode("--quick", "--only", "mixed_attention"),
        60,
    ),
    _demo(
        "engines-mixed",
        "the same with prefill chunks and decodes in one launch, off by default",
        220,
        *_CUSTOM,
        first=_MIXED,
    ),
    Step(
        "flex",
        "paged decode beside FlexAttention",
        _decode("--quick", "--only", "FlexAttention"),
        240,
    ),
    Step(
        "paged",
        "paged decode, mask mods and merges in full",
        _decode("--only", "paged_decode", _NO_FLEX[0]),
        540,
    ),
    Step(
        "mixed",
        "prefill chunks and decodes in full",
        _decode("--only", "mixed_attention"),
        150,
    ),
    Step(
        "transfer",
        "gather, scatter, reshard in full",
        (*BENCH, "transfer", "--cases", "0", "--json", JSON),
        540,
        PAYLOADS,
    ),
    _gpu_handoff(
        "handoff-gpu-full",
        "KV between two processes in full",
        540,
        ("raw", "fp8_e4m3", "int8", "agent-device", "agent-host"),
        *("--runs", "5"),
    ),
    Step(
        "sanitizer",
        "transfer kernels stay within their memory",
        (*_SANITIZER, *_check("transfer", "--cases", "4")),
        120,
        PAYLOADS,
        _check("transfer", "--cases", "4"),
        program="compute-sanitizer",
    ),
)

STEPS: Sequence[Step] = (*FIRST, *ENGINES, *LATER)


def chosen(only: Sequence[str]) -> list[Step]:
    """The steps with these names, in their order; all steps if no name is given.

    Raises:
        ValueError: no step has such a name; the message lists the names.
    """
    names = [step.name for step in STEPS]
    if unknown := [name for name in only if name not in names]:
        raise ValueError(f"no step is called {', '.join(unknown)}: there are {', '.join(names)}")
    return [step for step in STEPS if not only or step.name in only]
