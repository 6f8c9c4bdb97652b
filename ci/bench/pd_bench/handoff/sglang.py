# SPDX-License-Identifier: Apache-2.0
"""SGLang: PDConnector beside SGLang's own NIXL backend.

Both engines are asked at once, as SGLang's router does. Each prompt is computed in one step. The prefill engine
answers after its KV was fetched; the answer tells when its prefill ended.
"""

from __future__ import annotations

import random
import subprocess
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from pd_bench.flow import DECODED_TOKENS, Run
from pd_bench.handoff.contender import Bars, Contender, Contenders, by_name
from pd_bench.handoff.line_up import LineUp
from pd_bench.handoff.nixl_host_memory import with_plugin
from pd_bench.handoff.pair import Pair, PairSetup
from pd_bench.model import kv_bytes_per_token
from pd_bench.netns import Namespace
from pd_bench.report import BenchError
from pd_connector.errors import PDConnectorError
from pd_connector.tools.launch import Service
from pd_connector.tools.launch.sglang import (
    SglangEngine,
    SglangRole,
    sglang_on_cpu,
    sglang_python,
)

NIXL_BACKEND = "nixl"
MODEL_ID = "bench"
"""Model id for made-up weights. They are the same on every engine, but are not files to compare."""
LONG_ANSWER_TOKENS = 7000
BESIDE_TOKENS = 8192
"""Room in a cache beside the longest request, for one long answer with its prompt."""

_FAILURES = (
    "pd_connector:failed_transfers_total",
    "sglang:num_bootstrap_failed_reqs_total",
    "sglang:num_transfer_failed_reqs_total",
)
_RAW: Bars = {0: 0.97}
_HALF: Bars = {0: 0.65}
_STREAMED: Bars = {2048: 0.30}
_NO_SLOWER: Bars = {0: 1.00}
_UNLIKE: Bars = {0: 1.10}


@dataclass(frozen=True)
class SglangContender(Contender):
    """An SGLang backend, with the page sizes and ranks of its two engines.

    Args:
        pages: tokens of a page, of the prefill and of the decode engine.
        tp: tensor-parallel ranks of both.
    """

    pages: tuple[int, int] = (16, 16)
    tp: tuple[int, int] = (1, 1)


def engine_of(
    stage: PairSetup,
    name: str,
    role: SglangRole,
    connector: str,
    config: Mapping[str, Any],
    namespace: Namespace | None,
    env: Mapping[str, str],
    *,
    page_size: int = 16,
    tp: int = 1,
) -> SglangEngine:
    """One engine of a pair, not started. It computes each prompt in one step."""
    return SglangEngine(
        stage.model,
        role,
        connector,
        config,
        page_size=page_size,
        tp=tp,
        max_tokens=stage.max_model_len + BESIDE_TOKENS,
        name=name,
        args=[*stage.args, "--chunked-prefill-size", str(2 * stage.max_model_len)],
        env=env,
        log_path=stage.logs / f"{name.replace(' ', '-')}.log",
        namespace=namespace,
    )


def answer(engine: Service, body: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Events of an engine's answer that bring tokens. Raises BenchError if the answer is an error."""
    for event in engine.client.stream("/generate", body):
        if "error" in event:
            raise BenchError(f"{engine.name} answers with an error: {event['error']}")
        yield event


def decoded(engine: Service, body: Mapping[str, Any]) -> tuple[float, str]:
    """The time of an answer's first token, in seconds of `time.time` (0: no token came), and the text."""
    first_at, text = 0.0, ""
    for event in answer(engine, body):
        first_at = first_at or time.time()
        text = event["text"]
    return first_at, text


class SglangPair(Pair):
    """Two SGLang engines."""

    measured_receiving = True

    def __init__(
        self, contender: Contender, prefill: SglangEngine, decode: SglangEngine, model: str
    ) -> None:
        super().__init__(contender, prefill, decode)
        self._prefill = prefill
        self._decode = decode
        self._model = model

    @classmethod
    def of(cls, contender: Contender, stage: PairSetup) -> Self:
        """Engines with this backend, not started."""
        assert isinstance(contender, SglangContender)
        ours = contender.connector != NIXL_BACKEND
        namespaces = stage.namespaces or (None, None)
        config = dict(contender.config) if ours else {}
        if ours:
            config |= {"model_id": MODEL_ID}
        if ours and namespaces[0] is not None:
            config |= {"peers": [namespaces[0].address]}
        env = dict(stage.env)
        if not ours and sglang_on_cpu(sglang_python()):
            env |= with_plugin(stage.logs / "nixl-host-memory")

        def engine(index: int, role: SglangRole) -> SglangEngine:
            return engine_of(
                stage,
                f"{contender.name} {role}",
                role,
                contender.connector,
                config,
                namespaces[index],
                env,
                page_size=contender.pages[index],
                tp=contender.tp[index],
            )

        return cls(contender, engine(0, "prefill"), engine(1, "decode"), stage.model)

    def run(self, prompt: Sequence[int], salt: str) -> Run:
        body = self._body(prompt, DECODED_TOKENS)
        with ThreadPoolExecutor(1) as threads:
            started = time.time()
            prefilling = threads.submit(self._prefill.client.post, "/generate", body)
            first_at, text = decoded(self._decode, body)
            prefilled = prefilling.result()["meta_info"]["prefill_finished_time"]
        if not first_at:
            raise BenchError(f"{self._decode.name} ended its answer without a token")
        return Run(prefilled - started, first_at - prefilled, text)

    def check(self) -> None:
        """A decode engine of SGLang computes no prompt: if KV does not come, the request fails."""
        self._check_none_failed(_FAILURES)

    @contextmanager
    def decoding(self, prompt: Sequence[int]) -> Iterator[Sequence[float]]:
        body = self._body(prompt, LONG_ANSWER_TOKENS)
        times: list[float] = []
        begun, ended = threading.Event(), threading.Event()

        def read() -> None:
            with ThreadPoolExecutor(1) as threads:
                prefilling = threads.submit(self._prefill.client.post, "/generate", body)
                for _ in answer(self._decode, body):
                    times.append(time.perf_counter())
                    begun.set()
                    if ended.is_set():
                        break  # closes the connection, and the engine stops
                else:
                    raise BenchError(
                        f"{self._decode.name} ended its long answer of {LONG_ANSWER_TOKENS} tokens "
                        "before the measurement did: ask for fewer --runs"
                    )
                prefilling.result()

        with ThreadPoolExecutor(1) as threads:
            reading = threads.submit(read)
            try:
                while not begun.wait(0.1):
                    if reading.done():
                        break
                yield times
            finally:
                ended.set()
                reading.result()

    def kv_gb(self, tokens: int) -> float:
        return tokens * kv_bytes_per_token(Path(self._model)) / 1e9

    def _body(self, prompt: Sequence[int], max_tokens: int) -> dict[str, Any]:
        namespace = self._prefill.namespace
        return {
            "input_ids": list(prompt),
            "sampling_params": {
                "max_new_tokens": max_tokens,
                "temperature": 0,
                "ignore_eos": True,
            },
            "bootstrap_host": namespace.address if namespace else self._prefill.host,
            "bootstrap_port": self._prefill.bootstrap_port,
            "bootstrap_room": random.getrandbits(62) + 1,
        }


def _nixl(page_size: int) -> SglangContender:
    name = f"NIXL page {page_size}"
    return SglangContender(name, NIXL_BACKEND, pages=(page_size, page_size))


def _ours(
    codec: str,
    against: Mapping[str, Bars],
    *,
    overlap: str = "step",
    pages: tuple[int, int] = (16, 16),
    tp: tuple[int, int] = (1, 1),
    transport: str = "tcp",
) -> SglangContender:
    engines = [f"page {pages[0]}" if pages[0] == pages[1] else f"page {pages[0]}/{pages[1]}"]
    engines += [f"TP {tp[0]}/{tp[1]}"] if tp != (1, 1) else []
    name = codec if transport == "tcp" else f"{transport} {codec}"
    name += "+layers" if overlap == "layer" else ""
    return SglangContender(
        " ".join([name, *(part for part in engines if part != "page 16")]),
        "pd_connector",
        {"transports": [transport], "codec": codec, "overlap": overlap},
        {"codec": codec, "overlap": overlap, "engines": ", ".join(engines)},
        against,
        True,
        pages=pages,
        tp=tp,
    )


def _problem() -> str:
    try:
        python = sglang_python()
    except PDConnectorError as error:
        return str(error)
    for module, mend in (
        ("pd_connector", "install this package there, too"),
        ("nixl", "the baseline needs it: pip install nixl"),
    ):
        command = [python, "-c", f"import {module}"]
        if subprocess.run(command, capture_output=True, check=False).returncode:
            return f"{module} cannot be imported by {python}: {mend}"
    return ""


_PAGE_16, _PAGE_1 = _nixl(16), _nixl(1)
_ALIKE = _ours("raw", {_PAGE_16.name: _RAW})
_OVER_LINK: Contenders = by_name(
    _ALIKE,
    _ours("int8", {_PAGE_16.name: _HALF}),
    _ours("raw", {_PAGE_16.name: _STREAMED}, overlap="layer"),
    _ours("int8", {_PAGE_16.name: _STREAMED}, overlap="layer"),
    _ours("raw", {_PAGE_1.name: _RAW, _ALIKE.name: _NO_SLOWER}, pages=(1, 1)),
    # The baseline refuses these pairs of engines; ours is held to pairs of like engines instead.
    _ours("raw", {_PAGE_16.name: {}, _ALIKE.name: _UNLIKE}, pages=(1, 64)),
    _ours("raw", {_PAGE_16.name: {}, _ALIKE.name: _UNLIKE}, tp=(2, 1)),
)
_LOCAL: Contenders = by_name(
    _ours("raw", {_PAGE_16.name: _NO_SLOWER}, transport="shm"),
    _ours("raw", {_PAGE_16.name: _NO_SLOWER}, overlap="layer", transport="shm"),
    _ours("int8", {_PAGE_16.name: {}}, transport="shm"),
)

_BASELINES = by_name(_PAGE_16, _PAGE_1)
LINK = LineUp("sglang", _BASELINES, _OVER_LINK, tuple(_OVER_LINK), SglangPair.of, _problem, True)
"""Over a link between two namespaces."""

_BY_DEFAULT = ("shm raw", "shm raw+layers")
LOCAL = LineUp("sglang", _BASELINES, _LOCAL, _BY_DEFAULT, SglangPair.of, _problem, True)
"""On one machine."""
