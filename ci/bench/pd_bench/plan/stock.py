# SPDX-License-Identifier: Apache-2.0
"""What the benchmark plans with: Llama 3.1 8B on nodes of eight GPUs. Costs are estimated from data sheets."""

from __future__ import annotations

import tempfile
from dataclasses import replace
from pathlib import Path

from scheduler_plugins.planner.estimate import Model
from scheduler_plugins.planner.inventory import Inventory, load, one_device

MODEL = Model(
    name="llama-8b",
    dtype="bfloat16",
    layers=32,
    parameters=8.03e9,
    active=7.5e9,
    pair_flops=262_144,
    kv_bytes_per_token=131_072,
    context=131_072,
    weight_bytes=16.06e9,
)
TPS = (1, 2, 4)


def alike() -> Inventory:
    """Eight H100."""
    return _small(one_device("H100", 8, MODEL))


def nodes(*devices: str, gpus: int = 8, nic_gbit_per_s: float = 400) -> Inventory:
    """A node of each of these devices."""
    entries = [
        f"- {{name: n{n}, device: {device}, gpus: {gpus}, nic_gbit_per_s: {nic_gbit_per_s}}}"
        for n, device in enumerate(devices)
    ]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "inventory.yaml"
        path.write_text("nodes:\n" + "\n".join(entries))
        return _small(load(path, MODEL))


def _small(inventory: Inventory) -> Inventory:
    kinds = {name: kind for name, kind in inventory.kinds.items() if kind.gpus in TPS}
    return replace(inventory, kinds=kinds)
