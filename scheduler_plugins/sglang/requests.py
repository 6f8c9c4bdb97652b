# SPDX-License-Identifier: Apache-2.0
"""Requests of SGLang in the form that the queue uses, and the code that gives requests their class."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from scheduler_plugins.order.request import BlockHash, Waiting
from scheduler_plugins.qos.classes import default_class
from scheduler_plugins.qos.file import WatchedFile
from scheduler_plugins.qos.rules import class_of
from scheduler_plugins.qos.settings import QOS_KEY

CUSTOM = "custom_params"
"""Field of SGLang's sampling parameters that reaches the scheduler as the client wrote it."""


def describe(req: Any, grains: Sequence[BlockHash], priority_sign: int) -> Waiting:
    """A waiting `Req`.

    Args:
        grains: grains of its prompt, see `prefixes.cut`.
        priority_sign: 1 if small priorities go first in SGLang, -1 if large ones do.
    """
    return Waiting(
        id=req.rid,
        tokens=len(req.origin_input_ids) + len(req.output_ids),
        block_hashes=grains,
        arrival_s=req.time_stats.wait_queue_entry_time,
        qos=qos_of(req),
        max_tokens=req.sampling_params.max_new_tokens,
        priority=(req.priority or 0) * priority_sign,
    )


def qos_of(req: Any) -> str:
    """Name of the request's class; "" if it names none. A class with this name need not exist."""
    custom = req.sampling_params.custom_params
    named = custom.get(QOS_KEY) if isinstance(custom, dict) else None
    return named if isinstance(named, str) else ""


class ClassMarker:
    """Writes the class of each request into it, by the rules of the configuration file.

    Without rules nothing is written, and clients name their class themselves: `"custom_params": {"qos": NAME}`. With
    rules they cannot.
    """

    def __init__(self, path: Path | None) -> None:
        """Raises QosError: the file is invalid."""
        self._file = WatchedFile(path) if path else None

    @property
    def has_rules(self) -> bool:
        """Whether classes come from headers."""
        return self._file is not None and bool(self._file.current.request_router.routes)

    def mark(self, request: Any, headers: Mapping[str, str]) -> None:
        """Change a request of SGLang's API (`GenerateReqInput`, `EmbeddingReqInput`).

        Args:
            headers: names in lower case.
        """
        if self._file is None:
            return
        self._file.poll(time.monotonic())
        settings = self._file.current
        rules = settings.request_router.routes
        if not rules:
            return
        qos = class_of(rules, headers) or default_class(settings.scheduler.qos_classes).name
        given = request.sampling_params
        if isinstance(given, list):
            request.sampling_params = [_marked(sampling, qos) for sampling in given]
        else:
            request.sampling_params = _marked(given, qos)


def _marked(sampling: Any, qos: str) -> Any:
    """The sampling parameters with a class. Invalid sampling parameters stay unchanged, so SGLang reports them."""
    if sampling is not None and not isinstance(sampling, dict):
        return sampling
    before = dict(sampling or {})
    given = before.get(CUSTOM)
    return {**before, CUSTOM: {**(given if isinstance(given, dict) else {}), QOS_KEY: qos}}
