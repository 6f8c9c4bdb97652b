# SPDX-License-Identifier: Apache-2.0
"""An engine's profile from AISimulate's predictions of its steps. It is called `estimated`, because no engine was
run."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import msgspec

from scheduler_plugins.cost.engine_profile import EngineProfile
from scheduler_plugins.cost.model import StepLoad
from scheduler_plugins.cost.profile import (
    Measurement,
    ProfileError,
    fitted,
    loads,
    mixed_loads,
)
from scheduler_plugins.planner.devices import SHEETS
from scheduler_plugins.planner.estimate import Model, estimated

NAME = "aisimulate"
PINNED = "0.13.0.dev202610270000000085"
"""The version that was tried. The releases without `dev` in their name are stubs."""
SYSTEMS = {
    "A100": "a100_sxm",
    "B200": "b200_sxm",
    "H100": "h100_sxm",
    "H200": "h200_sxm",
    "L4": "l4",
    "L40S": "l40s",
}
"""Its names of our devices."""
PAGE_SIZE, LONGEST_TOKENS, MOST_BATCH = 16, 8192, 64
_PROGRAM = Path(__file__).with_name("aisimulate_program.py")
_LIMIT_S = 600.0


def profile(
    model: Model, name: str, device: str, gpus: int, chunk_tokens: int, python: str = ""
) -> EngineProfile:
    """The profile of an engine on `gpus` GPUs.

    Args:
        model: gives the room for KV and the size of a token.
        name: the model as AISimulate knows it: a name on Hugging Face, or a folder.
        python: the Python that has AISimulate; empty: this one.

    Raises:
        ProfileError: the device is not known, the model does not fit, or AISimulate is not there or cannot predict it.
    """
    if device not in SYSTEMS:
        raise ProfileError(
            f"device {device!r}: AISimulate has no data of it; known are {', '.join(SYSTEMS)}"
        )
    room = estimated(model, SHEETS[device], gpus)
    if room is None:
        raise ProfileError(
            f"gpus {gpus}: too few for {model.weight_bytes / 1e9:.0f} GB of weights on {device}"
        )
    steps = [
        *loads(LONGEST_TOKENS, PAGE_SIZE, MOST_BATCH),
        *mixed_loads(LONGEST_TOKENS, MOST_BATCH, chunk_tokens),
    ]
    seconds = step_times(name, SYSTEMS[device], gpus, steps, python)
    measured = [Measurement(load, s) for load, s in zip(steps, seconds, strict=True)]
    costs, errors = fitted(measured)
    return msgspec.structs.replace(
        room, costs=replace(costs, chunk_tokens=chunk_tokens), errors=errors, source="estimated"
    )


def step_times(
    model: str, system: str, gpus: int, steps: Sequence[StepLoad], python: str = ""
) -> list[float]:
    """Predicted seconds of each step.

    Raises:
        ProfileError: AISimulate is not there, or cannot predict it.
    """
    rows = [
        (load.tokens, load.pairs // load.tokens - load.tokens >> 1 if load.tokens else 0, load.batch, load.context)
        for load in steps
    ]  # fmt: skip
    request = {"model": model, "system": system, "tp": gpus, "steps": rows}
    try:
        ended = subprocess.run(
            [python or sys.executable, "-P", str(_PROGRAM)],
            input=json.dumps(request),
            capture_output=True,
            text=True,
            timeout=_LIMIT_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ProfileError(f"{python or sys.executable}: cannot be run ({error})") from None
    if ended.returncode:
        last = (ended.stderr.strip().splitlines() or ["no message"])[-1]
        if "No module named" in last:
            raise ProfileError(
                f"{NAME} is not installed in {python or sys.executable}: pip install {NAME}=={PINNED}, or name another "
                f"Python that has it: --from {NAME}=/path/to/python"
            )
        raise ProfileError(f"{NAME} cannot predict {model} on {system}: {last}")
    try:
        seconds = msgspec.json.decode(ended.stdout, type=_Answer).seconds
    except msgspec.MsgspecError as error:
        raise ProfileError(
            f"{NAME}: printed something else than its times ({error}); use {PINNED}, in a Python whose packages print "
            "nothing when they are imported"
        ) from None
    if len(seconds) != len(steps):
        raise ProfileError(
            f"{NAME}: {len(seconds)} times came for {len(steps)} steps; use {PINNED}"
        )
    return seconds


class _Answer(msgspec.Struct):
    version: str
    seconds: list[float]
