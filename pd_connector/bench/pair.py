# SPDX-License-Identifier: Apache-2.0
"""A prefill and a decode engine with one connector, and one request through both."""

from __future__ import annotations

import random
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, Self

from pd_connector.bench.machine import cpu_seconds
from pd_connector.errors import PDConnectorError
from pd_connector.launch import Client, Samples, VllmEngine
from pd_connector.launch.engine import Role

Setting = str | int | float | bool | Sequence[str]

DECODED_TOKENS = 2  # the first ends the measurement, the second shows that decoding goes on

_FETCH: Mapping[str, Any] = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}
_FAILURES = (
    "pd_connector:failed_transfers_total",
    "pd_connector:ignored_params_total",
    "vllm:nixl_num_failed_transfers_total",
)
_PROMPT_TOKENS = "vllm:prompt_tokens_by_source_total"
_POOL_TEXT = "In the beginning nobody knew what the seven quiet machines were counting, or why. "


class BenchError(PDConnectorError):
    """What was measured is not what was meant to be measured."""


@dataclass(frozen=True)
class Contender:
    """A connector with its config, as `--kv-transfer-config` has it."""

    name: str
    connector: str
    config: Mapping[str, Setting] = field(default_factory=dict)


class Run(NamedTuple):
    """One request through both engines."""

    prefill_s: float  # request sent -> answer with the KV's whereabouts
    handoff_s: float  # decode request sent -> first token streamed
    text: str  # what the decode engine answered


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
        self._pids: list[int] = []
        self._before = Samples()
        self._prompt_tokens = 0

    @classmethod
    def of(cls, contender: Contender, model: str, logs: Path, max_model_len: int) -> Self:
        """Engines with this connector, not started.

        Args:
            contender: the connector.
            model: folder or name of the model.
            logs: folder for the engines' logs.
            max_model_len: tokens of the longest request.
        """

        def engine(side: str, role: Role) -> VllmEngine:
            name = f"{contender.name} {side}"
            return VllmEngine(
                model,
                role,
                contender.connector,
                contender.config,
                name=name,
                max_model_len=max_model_len,
                log_path=logs / f"{name.replace(' ', '-')}.log",
            )

        return cls(contender, engine("prefill", "kv_producer"), engine("decode", "kv_consumer"))

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
        """Send one request through both engines as a two-step proxy does.

        Args:
            prompt: token ids.
            salt: keeps this run's pages apart from those that earlier runs left in the caches.
        """
        body = {
            "model": _model(self._prefill.client),
            "prompt": list(prompt),
            "temperature": 0,
            "ignore_eos": True,
            "cache_salt": salt,
        }
        started = time.perf_counter()
        answer = self._prefill.client.post(
            "/v1/completions", {**body, "max_tokens": 1, "kv_transfer_params": _FETCH}
        )
        prefilled = time.perf_counter()
        whereabouts = answer.get("kv_transfer_params")
        if not whereabouts:
            raise BenchError(f"{self._prefill.name} answers without kv_transfer_params: {answer}")
        fetch = {**body, "max_tokens": DECODED_TOKENS, "kv_transfer_params": whereabouts}
        sent = time.perf_counter()
        events = self._decode.client.stream("/v1/completions", fetch)
        first = next(event for event in events if event.get("choices"))
        decoded = time.perf_counter()
        texts = [choice["text"] for event in (first, *events) for choice in event["choices"]]
        self._prompt_tokens += len(prompt)
        return Run(prefilled - started, decoded - sent, "".join(texts))

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
    """Prompts of exactly the wanted length, none like another, for whatever model is served."""

    def __init__(self, client: Client, seed: int = 0) -> None:
        body = {"model": _model(client), "prompt": _POOL_TEXT, "add_special_tokens": False}
        self._pool: list[int] = client.post("/tokenize", body)["tokens"]
        self._random = random.Random(seed)

    def make(self, tokens: int) -> list[int]:
        """The next prompt: token ids of some text in random order."""
        return self._random.choices(self._pool, k=tokens)


_models: dict[str, str] = {}


def _model(client: Client) -> str:
    if client.base_url not in _models:
        _models[client.base_url] = client.model()
    return _models[client.base_url]
