# SPDX-License-Identifier: Apache-2.0
"""vLLM: PDConnector beside NixlConnector."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Self

from pd_bench.flow import Run, together, two_steps
from pd_bench.handoff.contender import Bars, Contender, by_name
from pd_bench.handoff.line_up import LineUp
from pd_bench.handoff.pair import Pair, PairSetup
from pd_bench.harness import NIXL, VLLM, missing_module
from pd_bench.netns import Namespace
from pd_bench.report import BenchError, Param
from pd_connector.tools.launch import VllmEngine
from pd_connector.tools.launch.engine import Role

BASELINE = Contender("NixlConnector", "NixlConnector")

_FAILURES = (
    "pd_connector:failed_transfers_total",
    "pd_connector:ignored_params_total",
    "vllm:nixl_num_failed_transfers_total",
)
_PROMPT_TOKENS = "vllm:prompt_tokens_by_source_total"
_RAW: Bars = {0: 0.97}
_HALF: Bars = {0: 0.65, 2048: 0.55}
_STREAMED: Bars = {2048: 0.30}

FAST_MBIT = 10_000.0
"""From this rate of the link on other bars hold: processors are then slower than the link, and a codec gains less."""
_RAW_FAST: Bars = {0: 1.0, 3500: 0.60}
_INT8_FAST: Bars = {0: 1.0, 3500: 0.50}
_STREAMED_FAST: Bars = {0: 0.10}


def _over_link(codec: str, overlap: str, bars: Bars) -> Contender:
    streams = overlap != "off"
    params: Mapping[str, Param] = {"codec": codec, "overlap": overlap}
    return Contender(
        f"{codec}+overlap" if streams else codec,
        "PDConnector",
        # Shared memory would bypass the link.
        {"transports": ["tcp"], "codec": codec, "overlap": overlap},
        params,
        {BASELINE.name: bars},
        together=streams,
    )


def _on_one_machine(transport: str) -> Contender:
    config = {"transports": [transport]}
    params: Mapping[str, Param] = {"transport": transport}
    return Contender(transport, "PDConnector", config, params, {BASELINE.name: {3500: 1.0}})


def engine_of(
    stage: PairSetup,
    name: str,
    role: Role,
    connector: str,
    config: Mapping[str, Any],
    namespace: Namespace | None,
) -> VllmEngine:
    """One engine of a pair, not started."""
    # An audit would take the first prompt of a run out of the measurement.
    ours = {"audit": "off"} if connector == "PDConnector" else {}
    return VllmEngine(
        stage.model,
        role,
        connector,
        ours | dict(config),
        name=name,
        max_model_len=stage.max_model_len,
        args=stage.args,
        env=stage.env,
        log_path=stage.logs / f"{name.replace(' ', '-')}.log",
        namespace=namespace,
    )


class VllmPair(Pair):
    """Two vLLM engines."""

    def __init__(self, contender: Contender, prefill: VllmEngine, decode: VllmEngine) -> None:
        super().__init__(contender, prefill, decode)
        self._prefill = prefill
        self._decode = decode
        self._model = ""
        self._prompt_tokens = 0

    @classmethod
    def of(cls, contender: Contender, stage: PairSetup) -> Self:
        """Engines with this connector, not started."""

        def engine(side: str, role: Role, namespace: Namespace | None) -> VllmEngine:
            name, config = f"{contender.name} {side}", contender.config
            return engine_of(stage, name, role, contender.connector, config, namespace)

        producer, consumer = stage.namespaces or (None, None)
        prefill = engine("prefill", "kv_producer", producer)
        return cls(contender, prefill, engine("decode", "kv_consumer", consumer))

    def run(self, prompt: Sequence[int], salt: str) -> Run:
        self._model = self._model or self._prefill.client.model()
        body = {
            "model": self._model,
            "prompt": list(prompt),
            "temperature": 0,
            "ignore_eos": True,
            "cache_salt": salt,
        }
        flow = together if self.contender.together else two_steps
        run = flow(self._prefill.client, self._decode.client, body)
        self._prompt_tokens += len(prompt)
        return run

    def begin(self) -> None:
        super().begin()
        self._prompt_tokens = 0

    def check(self) -> None:
        """A decode engine of vLLM computes a prompt itself if its KV does not come."""
        grown = self._decode.metrics().since(self._before)
        fetched = grown.total(_PROMPT_TOKENS, source="external_kv_transfer")
        failures = {name: count for name in _FAILURES if (count := grown.total(name))}
        # The decode engine computes the last token of a prompt itself.
        if failures or fetched < 0.95 * self._prompt_tokens:
            raise BenchError(
                f"{self._decode.name} fetched {fetched:.0f} of {self._prompt_tokens} prompt "
                f"tokens and computed the rest itself (failures: {failures or 'none counted'}): "
                f"its times are not those of a handoff. See {self._decode.log_path}"
            )


def _problem() -> str:
    return missing_module(VLLM, NIXL)


def _link(raw: Bars, fp8: Bars, int8: Bars, streamed: Bars) -> LineUp:
    codecs = {"raw": raw, "fp8_e4m3": fp8, "int8": int8}
    fixed = [_over_link(codec, "off", bars) for codec, bars in codecs.items()]
    fixed += [_over_link(codec, "auto", streamed) for codec in codecs]
    ours = by_name(*fixed, _over_link("auto", "off", {}))
    default = [contender.name for contender in fixed]
    return LineUp("vllm", by_name(BASELINE), ours, default, VllmPair.of, _problem, True)


_LOCAL = by_name(*map(_on_one_machine, ("shm", "tcp", "nixl")))

LINK = _link(_RAW, _HALF, _HALF, _STREAMED)
"""Over a link between two namespaces."""

FAST_LINK = _link(_RAW_FAST, {}, _INT8_FAST, _STREAMED_FAST)
"""The same from `FAST_MBIT` on."""

LOCAL = LineUp("vllm", by_name(BASELINE), _LOCAL, ("shm",), VllmPair.of, _problem, False)
"""On one machine."""
