# SPDX-License-Identifier: Apache-2.0
"""The simulated fleets: equal engines of one model on one GPU, and what their users are promised."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf

from scheduler_plugins.cost.model import CostModel
from scheduler_plugins.sim.links import Network
from scheduler_plugins.sim.simulate import Scenario

ENGINES = 8


@dataclass(frozen=True, kw_only=True)
class FleetKind:
    """A model on a GPU."""

    name: str
    costs: CostModel
    kv_tokens: float
    """Room for KV of one engine."""
    kv_bytes_per_token: float
    ttft_s: float
    """The promises."""
    tpot_s: float
    promised: bool = True
    """Whether the router knows the promises, and refuses what it cannot keep. If not, it assumes the usual ones."""
    engines: int = ENGINES
    latency_s: float = Network().latency_s
    """The fixed time of a handoff, added to the time of its bytes."""

    @property
    def ratios(self) -> range:
        """Every number of prefill engines that leaves an engine for decode."""
        return range(1, self.engines)

    def ratio_name(self, prefill: int) -> str:
        """Such as 4P4D."""
        return f"{prefill}P{self.engines - prefill}D"

    def scenario(self, prefill: int, decode: int | None = None) -> Scenario:
        """`prefill` engines for prompts, and the rest of the engines for decode. Steps are chunks (level 2)."""
        return Scenario(
            prefill=prefill,
            decode=self.engines - prefill if decode is None else decode,
            level=2,
            costs=self.costs,
            kv_tokens=self.kv_tokens,
            network=Network(kv_bytes_per_token=self.kv_bytes_per_token, latency_s=self.latency_s),
            ttft_slo_s=self.ttft_s if self.promised else inf,
            tpot_slo_s=self.tpot_s if self.promised else inf,
        )


OPT_13B = FleetKind(
    name="opt-13b-a100",
    # DistServe's fit for one A100 (simdistserve, its small batches). Decode is dear: 0.8 MB of KV a token.
    costs=CostModel(
        a=0.1019e-3, b=7.12e-9, c=18.1e-3, d0=19.93e-3, d1=38.5e-6, d2=0.627e-6, chunk_tokens=2048
    ),
    kv_tokens=55_000,  # 80 GB less weights of 26 GB and activations
    kv_bytes_per_token=819_200,
    ttft_s=2.0,
    tpot_s=0.1,
)
LLAMA_8B = FleetKind(
    name="8b-h100",
    # From the H100's data sheet at half its FLOPs and 0.7 of its bandwidth; not measured. Decode is cheap.
    costs=CostModel(a=33e-6, b=0.5e-9, c=5e-3, d0=7e-3, d1=25e-6, d2=57e-9, chunk_tokens=2048),
    kv_tokens=400_000,
    kv_bytes_per_token=131_072,
    ttft_s=1.0,
    tpot_s=0.05,
)
FLEETS = {fleet.name: fleet for fleet in (OPT_13B, LLAMA_8B)}
