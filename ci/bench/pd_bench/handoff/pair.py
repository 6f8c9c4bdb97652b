# SPDX-License-Identifier: Apache-2.0
"""A prefill and a decode engine with one connector, and requests through both."""

from __future__ import annotations

import random
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path

from pd_bench.flow import Run
from pd_bench.handoff.contender import Contender
from pd_bench.harness import Processes
from pd_bench.netns import Namespace
from pd_bench.report import BenchError
from pd_connector.tools.launch import Client, Samples, Service

_POOL_TEXT = "In the beginning nobody knew what the seven quiet machines were counting, or why. "


@dataclass(frozen=True)
class PairSetup:
    """What all pairs of one comparison share.

    Args:
        model: folder or name.
        max_model_len: tokens of the longest request.
        logs: folder for the engines' logs.
        args: further arguments of the engine's server.
        env: further variables of the engines.
        namespaces: where prefill and decode run; None for both on this machine's loopback.
    """

    model: str
    max_model_len: int
    logs: Path
    args: Sequence[str] = ()
    env: Mapping[str, str] = field(default_factory=dict)
    namespaces: tuple[Namespace, Namespace] | None = None


class Pair(ABC):
    """Two engines on this machine. The caller starts and stops them.

    Args:
        contender: the connector that both have.
        prefill: the producer.
        decode: the consumer.

    Attributes:
        measured_receiving: whether the cost of receiving is measured, too.
    """

    measured_receiving = False

    def __init__(self, contender: Contender, prefill: Service, decode: Service) -> None:
        self.contender = contender
        self.engines = (prefill, decode)
        self._processes = Processes(lambda: self.engines)
        self._before = Samples()

    def cpu_seconds(self) -> float:
        """CPU time used by both engines."""
        return self._processes.cpu_seconds()

    def pause(self) -> None:
        """Freeze both engines. Harmless to repeat."""
        for engine in self.engines:
            engine.pause()

    def resume(self) -> None:
        """Let frozen engines continue. Harmless to repeat."""
        for engine in self.engines:
            engine.resume()

    @abstractmethod
    def run(self, prompt: Sequence[int], salt: str) -> Run:
        """Send one request through both engines, in the order that the contender needs.

        Args:
            prompt: token ids.
            salt: separates this run's pages from pages of earlier runs in the caches.
        """

    def begin(self) -> None:
        """From now on `check` verifies that every prompt's KV arrives."""
        self._before = self.engines[1].metrics()

    @abstractmethod
    def check(self) -> None:
        """Make sure that the decode engine has fetched the KV of every run since `begin`.

        Raises:
            BenchError: it has not, so its times are not times of a handoff.
        """

    def _check_none_failed(self, names: Sequence[str]) -> None:
        """Raises BenchError if one of these counters of the decode engine has grown since `begin`."""
        decode = self.engines[1]
        grown = decode.metrics().since(self._before)
        if failures := {name: count for name in names if (count := grown.total(name))}:
            raise BenchError(f"{decode.name}: {failures}; see {decode.log_path}")

    def decoding(self, prompt: Sequence[int]) -> AbstractContextManager[Sequence[float]]:
        """A context in which the decode engine decodes one long answer. Yields the times of its tokens as they
        come, in seconds of `time.perf_counter`. Called if `measured_receiving`."""
        raise NotImplementedError

    def kv_gb(self, tokens: int) -> float:
        """GB of KV for `tokens` tokens in the engine's cache. Called if
        `measured_receiving`."""
        raise NotImplementedError


class Prompts:
    """Prompts of exactly the wanted length, all different, for any served model.

    For the same model it gives the same prompts again.
    """

    def __init__(self, client: Client) -> None:
        body = {"model": client.model(), "prompt": _POOL_TEXT, "add_special_tokens": False}
        self._pool: list[int] = client.post("/tokenize", body)["tokens"]
        self._random = random.Random(0)

    def make(self, tokens: int) -> list[int]:
        """The next prompt: token ids of a text in random order."""
        return self._random.choices(self._pool, k=tokens)
