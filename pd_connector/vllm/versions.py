# SPDX-License-Identifier: Apache-2.0
"""Versions of vLLM that the connector is written for. Others may work."""

import re

SUPPORTED = ((0, 31), (0, 33))  # first and last, both included

DYNAMO_KNOWN = ("1.6.1",)
"""Versions of Dynamo (`ai-dynamo`) whose table of connectors was read and tried."""


def supported_range() -> tuple[str, str]:
    """The first and the last version."""
    first, last = (f"{major}.{minor}" for major, minor in SUPPORTED)
    return first, last


def advice(version: str, name: str = "vllm") -> str:
    """What to do about an unsupported version; empty for a supported one.

    Args:
        name: name of the distribution.
    """
    first, last = supported_range()
    match = re.match(r"(\d+)\.(\d+)", version)
    if match is None:
        return f"this version number is unreadable; {first} to {last} are supported"
    release = int(match[1]), int(match[2])
    if release < SUPPORTED[0]:
        return f"{first} to {last} are supported: upgrade {name}"
    if release > SUPPORTED[1]:
        return f"{first} to {last} are supported: look for a newer pd-connector, or install {name}=={last}.0"
    return ""
