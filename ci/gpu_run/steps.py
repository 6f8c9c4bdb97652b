# SPDX-License-Identifier: Apache-2.0
"""The steps in their order: the most decisive first, the longest last."""

import sys
from collections.abc import Sequence
from dataclasses import dataclass

PYTHON = sys.executable
BENCH = (PYTHON, "-m", "pd_kernels.bench")
OURS = (PYTHON, "-m", "pd_connector.tools.cli")
PYTEST = (PYTHON, "-m", "pytest", "-q", "-p", "no:cacheprovider")

KERNELS = ("torch", "triton")
"""Modules that the decode kernels need."""

PAYLOADS = (*KERNELS, "msgspec", "numpy", "xxhash")
"""Modules that the transfer kernels need. They take the payload's format from pd_connector."""

CONNECTOR = (*PAYLOADS, "zmq", "cryptography", "prometheus_client", "typer", "rich")
NIXL = (*CONNECTOR, "nixl")
ROUTED = (*CONNECTOR, "vllm", "aiohttp", "httptools", "uvloop", "yaml")
"""Modules of a pair of engines behind the router."""

COMPARED = (*NIXL, "vllm")
"""Modules of pairs of engines, with our connector and with NixlConnector."""

JSON = "{json}"
"""Placeholder in a command for the file to which the step writes its figures."""


@dataclass(frozen=True)
class Step:
    """One program.

    Args:
        name: its name for `--only`.
        why: its purpose, in a line.
        command: program and arguments, run at the repository's root.
        rehearsal: the command for a machine without a GPU: on the CPU, or in Triton's interpreter.
        limit_s: seconds after which the step is ended.
        imports: modules that the step needs to begin.
        program: a program on PATH that the step needs to begin.
    """

    name: str
    why: str
    command: Sequence[str]
    rehearsal: Sequence[str]
    limit_s: float
    imports: Sequence[str] = KERNELS
    program: str = ""


_GPU_TESTS = (
    "tests/pages/test_kernel_pages.py",
    "tests/pages/test_paged_cache.py",
    "tests/memory/test_pins.py",
    "tests/memory/test_device_slab.py",
    "tests/tools/bench/test_bench_gpu.py",
)
_DECODE_TESTS = (*PYTEST, "tests/kernels/test_decode_command.py")
_TRANSFER_TESTS = (*PYTEST, "tests/kernels/test_transfer_command.py")
_SANITIZER = (
    *("compute-sanitizer", "--tool", "memcheck", "--error-exitcode", "1"),
    # torch asks CUDA questions that can fail, such as the owner of an address.
    *("--report-api-errors", "no"),
)
_GLUON = ("env", "PD_KERNELS_TUNING=gluon=1")
_MIXED = ("env", "PD_KERNELS_TUNING=mixed_steps=1")
_CUSTOM = ("--engine-arg=--attention-backend", "--engine-arg=CUSTOM")

_AGENTS = ("--ours", "agent-device", "--ours", "agent-host")


def _handoff(*tokens: int, runs: int) -> tuple[str, ...]:
    lengths = [part for count in tokens for part in ("--prompt-tokens", str(count))]
    return ("--runs", str(runs), *lengths, "--json", JSON)


def _decode(*arguments: str) -> tuple[str, ...]:
    return (*BENCH, "decode", "--cases", "0", "--json", JSON, *arguments)


STEPS: Sequence[Step] = (
    Step(
        "probe",
        "versions, clocks, copies, pinned copies, memory registered for reading only",
        (PYTHON, "-m", "gpu_run.probe", JSON),
        (PYTHON, "-m", "gpu_run.probe", JSON),
        90,
        (),
    ),
    Step(
        "decode-check",
        "decode kernels equal their references",
        (*BENCH, "decode", "--check", "--cases", "24"),
        _DECODE_TESTS,
        240,
    ),
    Step(
        "transfer-check",
        "transfer kernels equal their references",
        (*BENCH, "transfer", "--check", "--cases", "30"),
        _TRANSFER_TESTS,
        180,
        PAYLOADS,
    ),
    Step(
        "mla",
        "MLA beside FlashMLA, and both settings of its A/B switches (pairing, small_tiles, latent_codes, column_merge)",
        _decode("--only", "mla_decode"),
        _DECODE_TESTS,
        270,
    ),
    Step(
        "transfer-quick",
        "gather, scatter, reshard beside a copy and torch; packed_codes on and off",
        (*BENCH, "transfer", "--cases", "0", "--quick", "--json", JSON),
        _TRANSFER_TESTS,
        150,
        PAYLOADS,
    ),
    Step(
        "paged-quick",
        "paged decode beside FlashInfer and FlexAttention; half_codes and column_merge on and off",
        _decode("--quick", "--only", "paged_decode"),
        _DECODE_TESTS,
        150,
    ),
    Step(
        "host",
        "what an eager call costs the host, and direct_launch on and off, with equal results",
        _decode("--only", "host of a call"),
        (*PYTEST, "tests/kernels/test_direct_launch.py"),
        60,
    ),
    Step(
        "mixed-quick",
        "prefill chunks and decodes in one launch beside two in turn, and SM-aware or not",
        _decode("--quick", "--only", "mixed_attention"),
        _DECODE_TESTS,
        60,
    ),
    Step(
        "handoff-gpu",
        "KV between two processes, beside NIXL with a descriptor per page",
        (*OURS, "bench", "handoff", "--gpu", *_handoff(512, 7500, runs=3)),
        (*OURS, "bench", "handoff", "--gpu", "--device", "cpu", *_handoff(64, runs=1)),
        180,
        NIXL,
    ),
    Step(
        "device-slots",
        "agents with slots on the device: every page is right, and the rate beside slots in host memory",
        (*OURS, "bench", "handoff", "--gpu", *_AGENTS, *_handoff(512, 7500, runs=3)),
        (*OURS, "bench", "handoff", "--gpu", "--device", "cpu", *_AGENTS, *_handoff(64, runs=1)),
        180,
        NIXL,
    ),
    Step(
        "tests",
        "tests that need a GPU",
        (*PYTEST, "-m", "gpu", *_GPU_TESTS),
        (*PYTEST, "-m", "gpu", *_GPU_TESTS),
        240,
        (*CONNECTOR, "pytest"),
    ),
    Step(
        "engines",
        "vLLM: prefill and decode on one GPU answer as one engine does",
        (*OURS, "demo"),
        (*OURS, "demo"),
        240,
        ROUTED,
    ),
    Step(
        "engines-kernels",
        "the same with our attention kernels",
        (*OURS, "demo", *_CUSTOM),
        (*OURS, "demo", *_CUSTOM),
        240,
        ROUTED,
    ),
    Step(
        "engines-mixed",
        "the same with prefill chunks and decodes in one launch, off by default",
        (*_MIXED, *OURS, "demo", *_CUSTOM),
        (*_MIXED, *OURS, "demo", *_CUSTOM),
        240,
        ROUTED,
    ),
    Step(
        "engines-handoff",
        "the same beside NixlConnector, timed",
        (*OURS, "bench", "handoff", "--local", *_handoff(512, 2048, 3500, runs=3)),
        (*OURS, "bench", "handoff", "--local", *_handoff(64, runs=1)),
        300,
        COMPARED,
    ),
    Step(
        "sanitizer",
        "transfer kernels stay within their memory",
        (*_SANITIZER, *BENCH, "transfer", "--check", "--cases", "4"),
        _TRANSFER_TESTS,
        120,
        PAYLOADS,
        program="compute-sanitizer",
    ),
    Step(
        "mla-gluon",
        "MLA's Gluon kernel, off by default: equal to its reference? Only then beside the Triton kernel and FlashMLA",
        (*_GLUON, *BENCH, "decode", "--cases", "24", "--json", JSON, "--only", "mla_decode"),
        (*PYTEST, "tests/kernels/test_mla_gluon.py"),
        240,
    ),
    Step(
        "paged",
        "paged decode in full",
        _decode("--only", "paged_decode"),
        _DECODE_TESTS,
        560,
    ),
    Step(
        "mixed",
        "prefill chunks and decodes in full",
        _decode("--only", "mixed_attention"),
        _DECODE_TESTS,
        120,
    ),
    Step(
        "transfer",
        "gather, scatter, reshard in full",
        (*BENCH, "transfer", "--cases", "60", "--json", JSON),
        _TRANSFER_TESTS,
        560,
        PAYLOADS,
    ),
)


def chosen(only: Sequence[str]) -> list[Step]:
    """The steps with these names, in their order; all steps if no name is given.

    Raises:
        ValueError: no step has such a name; the message lists the names.
    """
    names = [step.name for step in STEPS]
    if unknown := [name for name in only if name not in names]:
        raise ValueError(f"no step is called {', '.join(unknown)}: there are {', '.join(names)}")
    return [step for step in STEPS if not only or step.name in only]
