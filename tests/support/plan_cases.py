# SPDX-License-Identifier: Apache-2.0
"""Models, inventories and traces for tests of the planner."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from random import Random

from scheduler_plugins.order.request import Waiting
from scheduler_plugins.planner import files
from scheduler_plugins.planner.command import _generated
from scheduler_plugins.planner.estimate import Model, read_model
from scheduler_plugins.planner.goodput import Late, Promise, windows_of
from scheduler_plugins.planner.inventory import Inventory, load
from scheduler_plugins.planner.mix import Mix, gpus_of, name_of, placed
from scheduler_plugins.planner.page import page
from scheduler_plugins.planner.plan import Plan, Row
from scheduler_plugins.planner.search import Candidate

CONFIG = {
    "_name_or_path": "llama-8b", "hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32,
    "num_key_value_heads": 8, "intermediate_size": 14336, "vocab_size": 128256, "torch_dtype": "bfloat16",
    "max_position_embeddings": 131072,
}  # fmt: skip


def model(folder: Path, **changes: object) -> Model:
    """The 8B model, with changes of its config."""
    path = folder / "config.json"
    path.write_text(json.dumps({**CONFIG, **changes}))
    return read_model(path)


def requests(number: int = 120, prompt: int = 2000, answer: int = 60) -> Sequence[Waiting]:
    """Poisson arrivals, one a second on average."""
    random, at_s, found = Random(3), 0.0, list[Waiting]()
    for n in range(number):
        at_s += random.expovariate(1.0)
        tokens, more = (max(1, round(one * random.uniform(0.5, 1.5))) for one in (prompt, answer))
        found.append(Waiting(id=str(n), tokens=tokens, block_hashes=(), arrival_s=at_s, max_tokens=more, priority=tokens))  # fmt: skip
    return found


TWO_NODES = """
nodes:
  - {name: a, device: H100, gpus: 2, nic_gbit_per_s: 100}
  - {name: b, device: A100, gpus: 2, nic_gbit_per_s: 100}
devices:
  H100: {price_per_h: 2.5}
  A100: {price_per_h: 1.2}
"""


CPU = """
nodes:
  - {name: host, device: CPU, gpus: 2}
devices:
  CPU: {profiles: [one.yaml, two.yaml]}
"""
CPU_PROFILE = """
costs: {{a: 3.0e-04, b: 5.0e-09, c: 0.008, d0: 0.008, d1: 2.0e-04, d2: 5.0e-07, chunk_tokens: 512}}
kv_tokens: 40000
kv_bytes_per_token: 4096
layers: 4
gpus: {cores}
source: assumed
"""
PROMISE = Promise(0.3, 0.05)


def cpu_stock(folder: Path) -> Inventory:
    """A host with two cores: engines of one or two."""
    (folder / "inventory.yaml").write_text(CPU)
    for cores, name in ((1, "one.yaml"), (2, "two.yaml")):
        (folder / name).write_text(CPU_PROFILE.format(cores=cores))
    return load(folder / "inventory.yaml", None)


def inputs(folder: Path) -> Path:
    """A folder with a model's config, an inventory and a trace."""
    (folder / "config.json").write_text(json.dumps(CONFIG))
    (folder / "inventory.yaml").write_text(TWO_NODES)
    (folder / "trace.csv").write_text("\n".join([*_generated(2000, 60)][:301]) + "\n")
    return folder


def written(
    folder: Path,
    mix: Mix,
    stock: Inventory | None = None,
    name: str = "it's $(x)",
    promise: Promise = PROMISE,
    copies: int = 1,
) -> Path:
    """The folder of a plan that recommends this mix, without a search."""
    inventory = stock or load(folder / "inventory.yaml", read_model(folder / "config.json"))
    fleet = placed(mix, inventory)
    assert fleet is not None
    candidate = Candidate(name_of(mix), mix, fleet, 1.0, copies)
    row = Row(
        "planner", candidate, gpus_of(mix, inventory), 0.0, 0.0, [1.0] * 4, 0, 0.9, Late(0, 0, 0, 0)
    )
    windows = windows_of(requests(), 30)
    made = Plan(inventory, promise, windows, [row], "of a test", [], 0, 0, "srjf_calibrated", "")
    engines = files.engines_of(candidate, inventory)
    values, problem = files.chart_values(engines, name)
    compose, its = files.compose_services(made, engines, name)
    text = page(made, "trace.csv", [problem, its])
    files.write(made, folder / "out", name, text, values=values, compose=compose)
    return folder / "out"
