# SPDX-License-Identifier: Apache-2.0
"""What there is to plan with: nodes, devices, links, prices, power, and what may not be used."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from math import inf
from pathlib import Path
from typing import Annotated

import msgspec

from pd_connector.errors import did_you_mean
from scheduler_plugins.cost.engine_profile import EngineProfile
from scheduler_plugins.planner.devices import SHEETS
from scheduler_plugins.planner.errors import PlanError
from scheduler_plugins.planner.estimate import Model, estimated
from scheduler_plugins.sim.fleet import FleetError, read
from scheduler_plugins.sim.links import Place

TPS = (1, 2, 4, 8)
"""Tensor parallelism of an engine."""
MOST_GPUS = 1024
MOST_TOGETHER = 512
"""GPUs of an inventory. Closed forms of more take minutes."""
CPU = "CPU"
"""Device whose "GPUs" are cores of a CPU. An engine has one rank on all of its cores."""
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}")
_PER_GBIT = 1e9 / 8

Count = Annotated[int, msgspec.Meta(ge=0, le=MOST_GPUS)]
Positive = Annotated[float, msgspec.Meta(gt=0, lt=1e12)]


class Device(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A kind of device."""

    price_per_h: float = 0.0
    """Price of one GPU."""
    watts: float = 0.0
    """Power of one GPU; 0: the data sheet's."""
    profiles: tuple[str, ...] = ()
    """Files of measured engines (`EngineProfile`), one for each tensor parallelism; empty: the data sheet."""


class NodeEntry(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Equal nodes."""

    name: str
    device: str
    gpus: Count
    number: Annotated[int, msgspec.Meta(ge=1, le=MOST_GPUS)] = 1
    reserved: Count = 0
    """GPUs of each of these nodes that may not be used."""
    nic_gbit_per_s: Positive | None = None
    """Rate of a node's NICs together, in each direction."""
    rack: str = ""


class LinkRates(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Links that are not a node's NICs."""

    node_gbit_per_s: Positive = 1600.0
    """Rate of an engine, to engines of its node."""
    other_gbit_per_s: Positive | None = None
    """Rate of an engine, to engines of other racks; the default is the NIC's."""


class Budget(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The most that all engines together may take: one of both."""

    price_per_h: Positive | None = None
    watts: Positive | None = None


class InventoryFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The whole file."""

    nodes: tuple[NodeEntry, ...]
    devices: dict[str, Device] = {}
    links: LinkRates = LinkRates()
    budget: Budget = Budget()


@dataclass(frozen=True)
class PlanNode:
    """One node."""

    place: Place
    device: str
    gpus: int  # that may be used


@dataclass(frozen=True)
class Inventory:
    """Nodes, and the kinds of engines that they can run."""

    nodes: tuple[PlanNode, ...]
    kinds: dict[str, EngineProfile]
    """By name: `H100-tp2`."""
    node_bytes_per_s: float
    engine_bytes_per_s: float
    other_bytes_per_s: float
    budget: Budget

    @property
    def devices(self) -> list[str]:
        """Devices that can be used, in the order of the nodes."""
        return list(dict.fromkeys(node.device for node in self.nodes if node.gpus))

    def gpus(self, device: str = "") -> int:
        """GPUs that may be used: of a device, or of all."""
        return sum(node.gpus for node in self.nodes if device in ("", node.device))

    def of(self, device: str) -> dict[str, EngineProfile]:
        """Kinds of engines of a device, by name."""
        return {name: profile for name, profile in self.kinds.items() if device_of(name) == device}

    def cost(self, kind: str) -> float:
        """What an engine takes of the budget."""
        profile = self.kinds[kind]
        return profile.watts if self.budget.watts else profile.price_per_h

    @property
    def most_cost(self) -> float:
        """The budget, with room for the rounding of sums; infinite if there is none."""
        return (self.budget.watts or self.budget.price_per_h or inf) * (1 + 1e-9)

    @property
    def binds(self) -> bool:
        """Whether engines can be on several nodes whose NICs are known."""
        return sum(node.gpus > 0 for node in self.nodes) > 1


def device_of(kind: str) -> str:
    """The device of a kind of engine."""
    return kind.rpartition("-tp")[0]


def load(path: Path, model: Model | None, *, force: bool = False) -> Inventory:
    """Read an inventory, and make the profile of every kind of engine that fits.

    Args:
        model: for devices without profiles.
        force: use profiles although their error is above 15 %.

    Raises:
        PlanError: the file is wrong, a device is not known, a profile does not fit, or no engine fits the GPUs.
    """
    try:
        file, text = read(path, InventoryFile)
    except FleetError as error:
        raise PlanError(str(error)) from None
    try:
        return _checked(file, path.parent, model, force)
    except PlanError as error:
        raise PlanError(text.wrong(error)) from None


def one_device(device: str, gpus: int, model: Model) -> Inventory:
    """An inventory of one node: `--device NAME --gpus N`."""
    if not 0 <= gpus <= MOST_TOGETHER:
        raise PlanError(f"gpus {gpus}: must be from 1 to {MOST_TOGETHER}")
    node = NodeEntry(name="node", device=device, gpus=gpus)
    return _checked(InventoryFile(nodes=(node,)), Path(), model, False)


def _checked(file: InventoryFile, folder: Path, model: Model | None, force: bool) -> Inventory:
    nodes = tuple(_nodes(file))
    total = sum(node.gpus for node in nodes)
    if not total:
        raise PlanError("nodes: no GPU may be used; give gpus, or fewer reserved")
    if total > MOST_TOGETHER:
        raise PlanError(
            f"nodes: have {total:,} GPUs, at most {MOST_TOGETHER} are planned together; plan a part of them that has a router to "
            "itself, and start it several times"
        )
    if file.budget.watts and file.budget.price_per_h:
        raise PlanError("budget: has both price_per_h and watts; give one")
    kinds = dict[str, EngineProfile]()
    devices = dict.fromkeys(node.device for node in nodes)
    for name in devices:
        most = max(node.gpus for node in nodes if node.device == name)
        kinds |= _kinds(name, file.devices.get(name, Device()), most, folder, model, force)
    for name in file.devices:
        if name not in devices:
            near = did_you_mean(name, devices) or f"nodes have {', '.join(devices)}"
            raise PlanError(f"device '{name}': no node has it; {near}")
    if not kinds:
        weights = f"{model.weight_bytes / 1e9:.0f} GB of weights" if model else "the profiles' GPUs"
        raise PlanError(
            f"gpus: too few for {weights} on any node; use devices with more memory, or more GPUs a node"
        )
    for name in ("price_per_h", "watts"):
        free = [kind for kind, profile in kinds.items() if not getattr(profile, name)]
        if getattr(file.budget, name) and free:
            raise PlanError(
                f"budget: {name} needs a {name} of every device, {free[0]} has none (devices: {{NAME: {{{name}: 2.5}}}})"
            )
    if len({profile.kv_bytes_per_token for profile in kinds.values()}) > 1:
        raise PlanError(
            "profiles: kv_bytes_per_token differ; all engines must have one model and one dtype of KV"
        )
    nics = [node.place.nic_bytes_per_s for node in nodes if node.place.nic_bytes_per_s < inf]
    engine = max(nics, default=25e9)
    other = file.links.other_gbit_per_s
    return Inventory(
        nodes, kinds, file.links.node_gbit_per_s * _PER_GBIT, engine,
        engine if other is None else other * _PER_GBIT, file.budget,
    )  # fmt: skip


def _nodes(file: InventoryFile) -> Iterator[PlanNode]:
    several, names = sum(entry.number for entry in file.nodes) > 1, set[str]()
    for entry in file.nodes:
        texts = {"name": entry.name, "device": entry.device, "rack": entry.rack or "r"}
        for kind, name in texts.items():
            if not _NAME.fullmatch(name):
                raise PlanError(
                    f"{kind} '{name}': must be letters, digits, dots and dashes: it becomes part of commands"
                )
        if entry.reserved > entry.gpus:
            raise PlanError(
                f"reserved {entry.reserved}: node '{entry.name}' has only {entry.gpus} GPUs"
            )
        if several and entry.nic_gbit_per_s is None:
            raise PlanError(
                f"nic_gbit_per_s: node '{entry.name}' has none; with several nodes KV passes over it"
            )
        for n in range(entry.number):
            name = f"{entry.name}{n}" if entry.number > 1 else entry.name
            if name in names:
                raise PlanError(f"name '{name}': two nodes have it; names must be unique")
            names.add(name)
            rate = inf if entry.nic_gbit_per_s is None else entry.nic_gbit_per_s * _PER_GBIT
            yield PlanNode(
                Place("", name, entry.rack, rate), entry.device, entry.gpus - entry.reserved
            )


def _kinds(
    name: str, device: Device, most: int, folder: Path, model: Model | None, force: bool
) -> dict[str, EngineProfile]:
    """Kinds of engines of a device that fit on one of its nodes."""
    if device.profiles:
        made = [_measured(folder / file, model, force) for file in device.profiles]
        if len({profile.gpus for profile in made}) < len(made):
            gpus = ", ".join(str(profile.gpus) for profile in made)
            raise PlanError(
                f"profiles of device '{name}': are of {gpus} GPUs; give one for each number of GPUs"
            )
    elif name not in SHEETS:
        near = did_you_mean(name, SHEETS) or f"known are {', '.join(SHEETS)}"
        raise PlanError(
            f"device '{name}': has no profile and no data sheet here; {near}; or measure: `pd-connector profile`"
        )
    elif model is None:
        raise PlanError(
            f"device '{name}': has no profile; give --model, or measure one with `pd-connector profile`"
        )
    else:
        made = [
            profile for tp in TPS if tp <= most and (profile := estimated(model, SHEETS[name], tp))
        ]
    return {
        f"{name}-tp{profile.gpus}": msgspec.structs.replace(
            profile,
            price_per_h=device.price_per_h * profile.gpus or profile.price_per_h,
            watts=device.watts * profile.gpus or profile.watts,
        )
        for profile in made
        if profile.gpus <= most
    }


def _measured(path: Path, model: Model | None, force: bool) -> EngineProfile:
    try:
        profile, _ = read(path, EngineProfile)
    except FleetError as error:
        raise PlanError(str(error)) from None
    if model is not None and profile.model and profile.model != model.name:
        raise PlanError(
            f"profile '{path.name}': is of model {profile.model}, wanted is {model.name}; measure this model"
        )
    if model is not None and profile.dtype and profile.dtype != model.dtype:
        raise PlanError(
            f"profile '{path.name}': is of dtype {profile.dtype}, wanted is {model.dtype}; measure this dtype"
        )
    if not profile.kv_bytes_per_token or profile.kv_tokens == inf:
        raise PlanError(
            f"profile '{path.name}': kv_tokens and kv_bytes_per_token are missing; the engine's log has its KV cache size"
        )
    if profile.doubt and not force:
        raise PlanError(
            f"profile '{path.name}': {profile.doubt} is above 15 %; measure on an idle machine, or give --force"
        )
    return profile
