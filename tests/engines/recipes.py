# SPDX-License-Identifier: Apache-2.0
"""What an engine of the tests is started with. Engines of one recipe can stand in for each other."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Literal, NamedTuple

from support.engine_nursery import fork_engine

from pd_connector.tools.launch import VllmEngine
from pd_connector.tools.launch.engine import Role

_HERE = Path(__file__).parent
MODEL = _HERE.parents[1] / "pd_connector" / "tools" / "demo" / "model"

# In bfloat16 an engine differs from itself by a hundredth when it computes a prompt in other
# portions; in float32 a comparison can be a thousand times sharper.
EXACT_ARGS = ("--dtype", "float32")
NAME_ARGS = ("--served-model-name", "tiny")  # one for all: a port may be taken by another model
PROBE_ARGS = ("--worker-extension-cls", "probe.Probe")
PROBE_ENVIRONMENT = {
    "VLLM_SERVER_DEV_MODE": "1",  # for the route /collective_rpc
    "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1",
    "PYTHONPATH": str(_HERE),
}
_VENV = _HERE.parents[1] / ".venv"
OLDER, NEWEST = _VENV / "vllm-0.31", _VENV / "vllm-0.33"
"""Where `ci/setup-tests` puts other versions of vLLM beside the 0.32 of the environment. That of `NEWEST` may lack."""
_TRITON = str(_HERE.parent / "support" / "triton_cpu")
# Its kernels are interpreted: a step takes about 0.1 s more.
_V2 = {"PYTHONPATH": _TRITON, "TRITON_INTERPRET": "1", "VLLM_USE_V2_MODEL_RUNNER": "1"}
Vllm = Literal["0.31", "0.32 V1", "0.32", "0.33"]
_CACHE = "VLLM_CACHE_ROOT"
VLLM: Mapping[Vllm, Mapping[str, str]] = {
    "0.31": {"PYTHONPATH": str(OLDER), _CACHE: str(OLDER / ".cache")},
    "0.32 V1": {},
    "0.32": _V2,
    "0.33": {**_V2, "PYTHONPATH": f"{NEWEST}:{_TRITON}", _CACHE: str(NEWEST / ".cache")},
}
"""Variables for each version and model runner of vLLM: V2 as on a GPU, if V1 is not named. Each version has a cache of its own: in one
that versions share, none can read what another has written of a model's class, and a started engine imports vLLM once more."""
USUAL: Vllm = "0.32 V1"
"""What engines of a test run, unless its subject is what the newest scheduler and runner do: a step is a tenth of a second shorter."""
NEW: Vllm = "0.33" if NEWEST.is_dir() else "0.32"
"""Model Runner V2 with steps scheduled ahead, as on a GPU."""
# --enforce-eager leaves vLLM's helpers compiled, each at its first use: the one that ranks logprobs
# costs every engine seconds.
COMPILE_NOTHING = {"TORCH_COMPILE_DISABLE": "1"}
# An engine's start is the import of vLLM, once in each of its processes. On a GPU a single rank's
# worker is in the engine core's process; vLLM's CPU build gives it a third one unless told this.
WORKER_IN_CORE = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}


class Recipe(NamedTuple):
    """Everything that an engine is told except its name, its log and its port."""

    model: str
    args: tuple[str, ...]
    env: tuple[tuple[str, str], ...]
    role: Role | None = None
    connector: str | None = None
    extra_config: str = "{}"
    """JSON, and so is the next: a recipe can be a key."""
    kv_transfer: str = "{}"
    forked: bool = True
    """Started within seconds (`support.engine_nursery`); False for as users start it."""

    def engine(self, name: str, log_path: Path) -> VllmEngine:
        """An engine of this recipe, not started."""
        engine = VllmEngine(
            self.model,
            self.role,
            self.connector,
            json.loads(self.extra_config),
            json.loads(self.kv_transfer),
            name=name,
            args=self.args,
            env=dict(self.env),
            log_path=log_path,
        )
        if self.forked:
            engine.popen = fork_engine
        return engine


def frozen(*environments: Mapping[str, str]) -> tuple[tuple[str, str], ...]:
    """Variables as a recipe has them. A later one wins, and folders of a later `PYTHONPATH` come first."""
    merged: dict[str, str] = {}
    for environment in environments:
        paths = environment.get("PYTHONPATH"), merged.get("PYTHONPATH")
        merged |= environment
        if any(paths):
            merged["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    return tuple(sorted(merged.items()))
