# SPDX-License-Identifier: Apache-2.0
"""A fleet of unlike engines, and its file."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from importlib import import_module
from math import inf
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from pd_connector.errors import did_you_mean
from scheduler_plugins.cost.engine_profile import EngineProfile
from scheduler_plugins.qos.yaml_text import YamlText
from scheduler_plugins.router.policies.base import Role
from scheduler_plugins.sim.links import NOWHERE, Network, Place

MOST_ENGINES = 10_000
"""The most engines of each kind. A larger number is a typing mistake, and memory would run out."""
MOST_BYTES = 1 << 20
"""The largest file that is read."""


class FleetError(ValueError):
    """A fleet file that cannot be played; the message names file, line and key."""


class Part(msgspec.Struct, frozen=True, kw_only=True):
    """Equal engines."""

    role: Role
    profile: EngineProfile
    number: int = 1
    place: Place = NOWHERE

    def __post_init__(self) -> None:
        """Raises: ValueError: naming the number found and the number wanted."""
        if not 0 <= self.number <= MOST_ENGINES:
            raise ValueError(
                f"{self.role} {self.number}: must be a number of engines up to {MOST_ENGINES:,}"
            )


@dataclass(frozen=True, kw_only=True)
class Fleet:
    """Engines, and the links between them."""

    parts: tuple[Part, ...]
    network: Network | None = None
    """None: the scenario's."""

    def number(self, *roles: Role) -> int:
        """Engines of these roles."""
        return sum(part.number for part in self.parts if part.role in roles)


class NodeFile(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True):
    """A node of a fleet file."""

    rack: str = ""
    nic_bytes_per_s: float = inf


class LinksFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """Rates of an engine's transfers by the kind of pair, in bytes a second and direction."""

    device: float = Network.device_bytes_per_s
    node: float = Network.node_bytes_per_s
    rack: float = Network.bytes_per_s
    other: float = Network.bytes_per_s
    latency_s: float = Network.latency_s


class PartFile(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True, kw_only=True):
    """A part of a fleet file."""

    role: Role
    profile: str
    number: int = 1
    node: str = ""


class FleetFile(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True, kw_only=True):
    """A fleet file. KV bytes of a token and layers are those of the first profile that knows them."""

    profiles: dict[str, EngineProfile]
    parts: list[PartFile]
    nodes: dict[str, NodeFile] = {}
    links: LinksFile = LinksFile()

    def fleet(self) -> Fleet:
        """The fleet.

        Raises:
            ValueError: a part names a profile or node that is not there, or a rate is not above 0.
        """
        parts = tuple(self._part(part) for part in self.parts)
        return Fleet(parts=parts, network=self._network())

    def _part(self, part: PartFile) -> Part:
        profile = named("profile", part.profile, self.profiles)
        place = NOWHERE
        if part.node:
            node = named("node", part.node, self.nodes)
            place = Place("", part.node, node.rack, node.nic_bytes_per_s)
        return Part(role=part.role, profile=profile, number=part.number, place=place)

    def _network(self) -> Network:
        links, profiles = self.links, self.profiles.values()
        network = Network(
            bytes_per_s=max(links.rack, links.other),
            device_bytes_per_s=links.device,
            node_bytes_per_s=links.node,
            rack_bytes_per_s=links.rack,
            other_bytes_per_s=links.other,
            latency_s=links.latency_s,
        )
        size = next(
            (profile.kv_bytes_per_token for profile in profiles if profile.kv_bytes_per_token), None
        )
        layers = next((profile.layers for profile in profiles if profile.layers), None)
        return replace(
            network,
            kv_bytes_per_token=network.kv_bytes_per_token if size is None else size,
            layers=layers or network.layers,
        )


T = TypeVar("T", bound=msgspec.Struct)


def named(kind: str, name: str, by_name: Mapping[str, T]) -> T:
    """The entry of this name.

    Raises:
        ValueError: naming the one that was probably meant.
    """
    if name not in by_name:
        near = did_you_mean(name, by_name) or f"known are {', '.join(by_name) or 'none'}"
        raise ValueError(f"{kind} '{name}': is not in the file; {near}")
    return by_name[name]


def read(path: Path, kind: type[T]) -> tuple[T, YamlText]:
    """A YAML file as this type, and its text, which finds the lines of later mistakes.

    Raises:
        FleetError: it cannot be read, is larger than 1 MiB, has aliases (a few lines of them stand for gigabytes), or is
            not of this type.
    """
    yaml: Any = import_module("yaml")
    try:
        with path.open("rb") as file:
            raw = file.read(MOST_BYTES + 1)
        if len(raw) > MOST_BYTES:
            raise FleetError(f"{path}: has more bytes than are read, at most {MOST_BYTES:,}")
        aliases = [token for token in yaml.scan(raw) if isinstance(token, yaml.AliasToken)]
        if aliases:
            line = aliases[0].start_mark.line + 1
            raise FleetError(
                f"{path}:{line}: aliases (*{aliases[0].value}) are not read; write the value"
            )
    except OSError as error:
        raise FleetError(f"{path}: cannot be read ({error.strerror})") from None
    except yaml.YAMLError:
        pass  # `decode` says where
    text = YamlText(raw, str(path))
    try:
        return text.decode(kind), text
    except ValueError as error:
        raise FleetError(str(error)) from None


def load(path: Path) -> Fleet:
    """Read a fleet file.

    Raises:
        FleetError: as of `read`; or a part names what is not there, or no engine could answer.
    """
    file, text = read(path, FleetFile)
    try:
        return file.fleet()
    except ValueError as error:
        raise FleetError(text.wrong(error)) from None
