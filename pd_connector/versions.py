# SPDX-License-Identifier: Apache-2.0
"""Versions of Python and of engines that this package is for, and what was done with each. Others may work."""

import re

PYTHON = ((3, 11), (3, 13))
"""First and last, both included. `requires-python`, the classifiers and `ci/setup` say the same."""
VLLM = {(0, 31): "run", (0, 32): "run", (0, 33): "run on the CPU kernels of 0.32"}
"""Supported versions of vLLM, and what was done with each."""
SGLANG = ("0.5.23",)
"""Versions of SGLang that were run."""
DYNAMO = ("1.6.1",)
"""Versions of Dynamo (`ai-dynamo`) that were run."""


def supported_range() -> tuple[str, str]:
    """The first and the last supported version of vLLM."""
    first, last = (f"{major}.{minor}" for major, minor in (min(VLLM), max(VLLM)))
    return first, last


def seen(version: str) -> str:
    """What was done with this version of vLLM; empty: nothing."""
    return VLLM.get(_release(version) or (0, 0), "")


def advice(version: str, name: str = "vllm") -> str:
    """What to do about an unsupported version of vLLM; empty for a supported one.

    Args:
        name: name of the distribution.
    """
    first, last = supported_range()
    release = _release(version)
    if release is None:
        return f"this version number is unreadable; {first} to {last} are supported"
    if release < min(VLLM):
        return f"{first} to {last} are supported: upgrade {name}"
    if release > max(VLLM):
        return f"{first} to {last} are supported: look for a newer pd-connector, or install {name}=={last}.0"
    return ""


def python_advice(version: tuple[int, ...]) -> str:
    """What to do about an unsupported version of Python; empty for a supported one."""
    first, last = (".".join(map(str, version_parts)) for version_parts in PYTHON)
    return "" if PYTHON[0] <= version[:2] <= PYTHON[1] else f"{first} to {last} are supported"


def _release(version: str) -> tuple[int, int] | None:
    match = re.match(r"(\d+)\.(\d+)", version)
    return (int(match[1]), int(match[2])) if match else None
