# SPDX-License-Identifier: Apache-2.0
"""A prefill and a decode engine with one connector, and requests through both."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

from pd_connector.tools.bench.flow import BenchError, Run
from pd_connector.tools.bench.handoff.contender import Contender
from pd_connector.tools.bench.machine import cpu_seconds
from pd_connector.tools.launch import Client, Samples, VllmEngine
from pd_connector.tools.launch.engine import Role
from pd_connector.tools.launch.netns import Namespace

_FAILURES = (
    "pd_connector:failed_transfers_total",
    "pd_connector:ignored_params_total",
    "vllm:nixl_num_failed_transfers_total",
)
_PROMPT_TOKENS = "vllm:prompt_tokens_by_source_total"
_POOL_TEXT = "In the beginning nobody knew what the seven quiet machines were counting, or why. "


@dataclass(frozen=True)
class PairSetup:
    """What all pairs of one comparison have in common.

    Args:
        model: folder or name.
        max_model_len: tokens of the longest request.
        logs: folder for the engines' logs.
        args: further arguments of vLLM's server.
        env: further variables of the engines.
        namespaces: where prefill and decode run; None for both on this machine's loopback.
    """

    model: str
    max_model_len: int
    logs: Path
    args: Sequence[str] = ()
    env: Mapping[str, str] = field(default_factory=dict)
    namespaces: tuple[Namespace, Namespace] | None = None


class Pair:
    """Two engines on this machine; starting and stopping them is up to the caller.

    Args:
        contender: the connector that both have.
        prefill: the producer.
        decode: the consumer.
    """

    def __init__(self, contender: Contender, prefill: VllmEngine, decode: VllmEngine) -> None:
        self.contender = contender
        self._prefill = prefill
        self._decode = decode
        self._model = ""
        self._pids: list[int] = []
        self._before = Samples()
        self._prompt_tokens = 0

    @classmethod
    def of(cls, contender: Contender, stage: PairSetup) -> Self:
        """Engines with this connector, not started."""

        # An audit would take the first prompt of a run from what is measured.
        ours = {"audit": "off"} if contender.connector == "PDConnector" else {}
        config = ours | dict(contender.config)

        def engine(side: str, role: Role, namespace: Namespace | None) -> VllmEngine:
            name = f"{contender.name} {side}"
            return VllmEngine(
                stage.model,
                role,
                contender.connector,
                config,
                name=name,
                max_model_len=stage.max_model_len,
                args=stage.args,
                env=stage.env,
                log_path=stage.logs / f"{name.replace(' ', '-')}.log",
                namespace=namespace,
            )

        producer, consumer = stage.namespaces or (None, None)
        prefill = engine("prefill", "kv_producer", producer)
        return cls(contender, prefill, engine("decode", "kv_consumer", consumer))

    @property
    def engines(self) -> tuple[VllmEngine, VllmEngine]:
        return self._prefill, self._decode

    @property
    def pids(self) -> list[int]:
        """Processes of both engines, as they were when the pair became ready."""
        if not self._pids:
            families = [engine.family for engine in self.engines if engine.family]
            self._pids = [process.pid for family in families for process in family.members()]
        return self._pids

    def cpu_seconds(self) -> float:
        """CPU time that both engines have used."""
        return cpu_seconds(self.pids)

    def pause(self) -> None:
        """Freeze both engines. Harmless to repeat."""
        for engine in self.engines:
            engine.pause()

    def resume(self) -> None:
        """Let frozen engines go on. Harmless to repeat."""
        for engine in self.engines:
            engine.resume()

    def run(self, prompt: Sequence[int], salt: str) -> Run:
        """Send one request through both engines, in the order that the contender asks for.

        Args:
            prompt: token ids.
            salt: keeps this run's pages apart from those that earlier runs left in the caches.
        """
        self._model = self._model or self._prefill.client.model()
        body = {
            "model": self._model,
            "prompt": list(prompt),
            "temperature": 0,
            "ignore_eos": True,
            "cache_salt": salt,
        }
        run = self.contender.flow(self._prefill.client, self._decode.client, body)
        self._prompt_tokens += len(prompt)
        return run

    def begin(self) -> None:
        """From now on `check` watches whether every prompt's KV arrives."""
        self._before = self._decode.metrics()
        self._prompt_tokens = 0

    def check(self) -> None:
        """Make sure that the decode engine has fetched the KV of every run since `begin`.

        Raises:
            BenchError: it computed some itself, so that its times are not those of a handoff.
        """
        grown = self._decode.metrics().since(self._before)
        fetched = grown.total(_PROMPT_TOKENS, source="external_kv_transfer")
        failures = {name: count for name in _FAILURES if (count := grown.total(name))}
        # The last token of a prompt is computed by whoever decodes.
        if failures or fetched < 0.95 * self._prompt_tokens:
            raise BenchError(
                f"{self._decode.name} fetched {fetched:.0f} of {self._prompt_tokens} prompt "
                f"tokens and computed the rest itself (failures: {failures or 'none counted'}): "
                f"its times are not those of a handoff. See {self._decode.log_path}"
            )


class Prompts:
    """Prompts of exactly the wanted length, none like another, for whatever model is served.

    Made anew with the same seed for the same model, it gives the same prompts.
    """

    def __init__(self, client: Client, seed: int = 0) -> None:
        body = {"model": client.model(), "prompt": _POOL_TEXT, "add_special_tokens": False}
        self._pool: list[int] = client.post("/tokenize", body)["tokens"]
        self._random = random.Random(seed)

    def make(self, tokens: int) -> list[int]:
        """The next prompt: token ids of some text in random order."""
        return self._random.choices(self._pool, k=tokens)
