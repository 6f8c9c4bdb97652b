# SPDX-License-Identifier: Apache-2.0
"""Handoffs between engines of two kinds, beside pairs of one kind: vLLM and SGLang, all with PDConnector.

In every pair both engines are asked at once, and KV is sent when the prefill has ended.
"""

from __future__ import annotations

import json
import random
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, Self

from pd_bench.flow import DECODED_TOKENS, Run
from pd_bench.handoff import sglang, vllm
from pd_bench.handoff.contender import Bars, Contender, by_name
from pd_bench.handoff.line_up import LineUp
from pd_bench.handoff.pair import Pair, PairSetup
from pd_bench.netns import Namespace
from pd_bench.report import BenchError
from pd_connector.protocol.wire.params import (
    ProducerAddress,
    decode_params,
    describe_params,
    parse_address,
    prefill_params,
)
from pd_connector.tools.launch import Client, Service, VllmEngine
from pd_connector.tools.launch.engine import Role
from pd_connector.tools.launch.sglang import SglangEngine, SglangRole

Kind = Literal["vLLM", "SGLang"]

_SLOWER: Bars = {0: 1.10}
_FAILURES = (
    "pd_connector:failed_transfers_total",
    "pd_connector:ignored_params_total",
    "sglang:num_transfer_failed_reqs_total",
)


class Whereabouts(NamedTuple):
    """The addresses at which a prefill engine is asked for KV."""

    ranks: ProducerAddress  # for a vLLM decode engine
    bootstrap: tuple[str, int]  # for an SGLang decode engine


class Side(ABC):
    """One engine of a pair."""

    engine: Service

    @property
    def client(self) -> Client:
        return self.engine.client

    @abstractmethod
    def whereabouts(self) -> Whereabouts:
        """The addresses of a running prefill engine. Raises BenchError if the engine does not report them."""

    @abstractmethod
    def prefill(self, prompt: Sequence[int], room: int, salt: str, where: Whereabouts) -> float:
        """Compute a prompt; returns the time of its end, in seconds of `time.time`."""

    @abstractmethod
    def decode(
        self, prompt: Sequence[int], room: int, salt: str, where: Whereabouts
    ) -> tuple[float, str]:
        """Decode from a prompt's KV; returns the time of the first token, and the text."""


class VllmSide(Side):
    """A vLLM engine."""

    def __init__(self, role: str, stage: PairSetup, namespace: Namespace | None, name: str) -> None:
        side: Role = "kv_producer" if role == "prefill" else "kv_consumer"
        config = {**_CONFIG, "overlap": "off"}
        self.engine: VllmEngine = vllm.engine_of(
            stage, name, side, "PDConnector", config, namespace
        )

    def whereabouts(self) -> Whereabouts:
        body = self._body([1], "", 1, describe_params())
        params = self.client.post(_COMPLETIONS, body).get("kv_transfer_params")
        return _whereabouts(self.engine, params, None)

    def prefill(self, prompt: Sequence[int], room: int, salt: str, where: Whereabouts) -> float:
        self.client.post(_COMPLETIONS, self._body(prompt, salt, 1, prefill_params(str(room))))
        return time.time()

    def decode(
        self, prompt: Sequence[int], room: int, salt: str, where: Whereabouts
    ) -> tuple[float, str]:
        params = decode_params(where.ranks, str(room))
        body = self._body(prompt, salt, DECODED_TOKENS, params)
        first_at, text = 0.0, ""
        for event in self.client.stream(_COMPLETIONS, body):
            if event.get("choices"):
                first_at = first_at or time.time()
                text += event["choices"][0]["text"]
        return first_at, text

    def _body(
        self, prompt: Sequence[int], salt: str, tokens: int, params: Mapping[str, Any]
    ) -> dict[str, Any]:
        return {
            "model": self.engine.model,
            "prompt": list(prompt),
            "max_tokens": tokens,
            "temperature": 0,
            "ignore_eos": True,
            "kv_transfer_params": dict(params),
            **({"cache_salt": salt} if salt else {}),
        }


class SglangSide(Side):
    """An SGLang engine."""

    def __init__(
        self,
        role: SglangRole,
        stage: PairSetup,
        namespace: Namespace | None,
        name: str,
        peers: Sequence[str],
    ) -> None:
        config = {**_CONFIG, "overlap": "step", **({"peers": list(peers)} if peers else {})}
        self.engine: SglangEngine = sglang.engine_of(
            stage, name, role, "pd_connector", config, namespace, stage.env
        )

    def whereabouts(self) -> Whereabouts:
        states = json.loads(self.client.get("/server_info"))["internal_states"]
        return _whereabouts(self.engine, states[0].get("pd_connector"), self.engine.bootstrap_port)

    def prefill(self, prompt: Sequence[int], room: int, salt: str, where: Whereabouts) -> float:
        answer = self.client.post("/generate", self._body(prompt, room, salt, 1, where))
        return float(answer["meta_info"]["prefill_finished_time"])

    def decode(
        self, prompt: Sequence[int], room: int, salt: str, where: Whereabouts
    ) -> tuple[float, str]:
        return sglang.decoded(self.engine, self._body(prompt, room, salt, DECODED_TOKENS, where))

    @staticmethod
    def _body(
        prompt: Sequence[int], room: int, salt: str, tokens: int, where: Whereabouts
    ) -> dict[str, Any]:
        return {
            "input_ids": list(prompt),
            "sampling_params": {"max_new_tokens": tokens, "temperature": 0, "ignore_eos": True},
            "cache_salt": salt,
            "bootstrap_host": where.bootstrap[0],
            "bootstrap_port": where.bootstrap[1],
            "bootstrap_room": room,
        }


@dataclass(frozen=True)
class CrossContender(Contender):
    """The kinds of the prefill and the decode engine."""

    kinds: tuple[Kind, Kind] = ("vLLM", "SGLang")


class CrossPair(Pair):
    """Two engines, each of any kind."""

    def __init__(self, contender: Contender, prefill: Side, decode: Side) -> None:
        super().__init__(contender, prefill.engine, decode.engine)
        self._prefill = prefill
        self._decode = decode
        self._where: Whereabouts | None = None

    @classmethod
    def of(cls, contender: Contender, stage: PairSetup) -> Self:
        """Engines of these kinds, not started."""
        assert isinstance(contender, CrossContender)
        namespaces = stage.namespaces or (None, None)
        peers = [space.address for space in namespaces if space is not None]

        def side(index: int, role: SglangRole) -> Side:
            name, namespace = f"{contender.name} {role}", namespaces[index]
            if contender.kinds[index] == "vLLM":
                return VllmSide(role, stage, namespace, name)
            return SglangSide(role, stage, namespace, name, peers)

        return cls(contender, side(0, "prefill"), side(1, "decode"))

    def run(self, prompt: Sequence[int], salt: str) -> Run:
        if self._where is None:
            self._where = self._prefill.whereabouts()
        request = (prompt, random.getrandbits(62) + 1, salt, self._where)
        with ThreadPoolExecutor(1) as threads:
            started = time.time()
            prefilling = threads.submit(self._prefill.prefill, *request)
            first_at, text = self._decode.decode(*request)
            prefilled = prefilling.result()
        if not first_at:
            raise BenchError(f"{self._decode.engine.name} ended its answer without a token")
        return Run(prefilled - started, first_at - prefilled, text)

    def check(self) -> None:
        self._check_none_failed(_FAILURES)


def _whereabouts(engine: Service, params: object, port: int | None) -> Whereabouts:
    """The addresses that an engine reports. Without a registry's `port`, an SGLang engine is given the control port of
    one rank."""
    address = parse_address(params)
    if address is None:
        raise BenchError(f"{engine.name} does not report where it hands KV over: {params}")
    return Whereabouts(address, (address.host, port or address.port))


def _pair(prefill: Kind, decode: Kind) -> CrossContender:
    alike = _name("vLLM", "vLLM"), _name("SGLang", "SGLang")
    return CrossContender(
        _name(prefill, decode),
        "PDConnector",
        _CONFIG,
        {"engines": f"{prefill} to {decode}"},
        {} if prefill == decode else dict.fromkeys(alike, _SLOWER),
        True,
        slowest=True,
        kinds=(prefill, decode),
    )


def _name(prefill: Kind, decode: Kind) -> str:
    return f"{prefill} to {decode}"


def _problem() -> str:
    return vllm.LINK.problem() or sglang.LINK.problem()


_COMPLETIONS = "/v1/completions"
_CONFIG: Mapping[str, Any] = {
    "transports": ["tcp"],
    "codec": "raw",
    "model_id": sglang.MODEL_ID,  # made-up weights are not files to compare
}
_BASELINES = by_name(_pair("vLLM", "vLLM"), _pair("SGLang", "SGLang"))
_OURS = by_name(_pair("vLLM", "SGLang"), _pair("SGLang", "vLLM"))

LINK = LineUp("cross", _BASELINES, _OURS, tuple(_OURS), CrossPair.of, _problem, True)
"""Over a link between two namespaces."""
