# SPDX-License-Identifier: Apache-2.0
"""Whether the files of a plan's folder still belong together: `pd-connector check FOLDER`."""

from __future__ import annotations

import json
import os
import shlex
from collections import Counter
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from pd_connector.errors import PDConnectorError
from pd_connector.tools.cli.checks.finding import Finding, Status
from scheduler_plugins.planner.files import (
    COMPOSE,
    CORES,
    GPUS,
    PAGE,
    ROLES,
    ROUTER,
    VALUES,
    router_name,
    started_nodes,
)
from scheduler_plugins.router.policies.base import Role
from scheduler_plugins.router.settings.config import RouterConfig
from scheduler_plugins.router.settings.settings_file import parse
from scheduler_plugins.sim import fleet

FLEET = "fleet.yaml"
_AGAIN = "plan again with another --out, or take the change back"


class Started(NamedTuple):
    """An engine that a script starts."""

    role: str  # prefill, decode, or empty: it takes part in no handoff
    port: int
    gpus: int
    chunk_tokens: int


def check(folder: Path) -> list[Finding] | None:
    """What is wrong with the folder of a plan; None if it is none."""
    if not any(os.path.exists(folder / name) for name in (FLEET, ROUTER, PAGE)):
        return None
    return list(_findings(folder))


def _findings(folder: Path) -> Iterator[Finding]:
    def wrong(name: str, said: object) -> Finding:
        text = str(said).replace(f"{folder}/", "")
        return Finding(str(folder), name, Status.FAIL, text, _AGAIN)

    # A fleet that has a copy on each node has a router for each.
    of_nodes = [router_name(node) for node in started_nodes(folder)]
    copied = any(os.path.exists(folder / name) for name in of_nodes)
    routers = of_nodes if copied else [ROUTER]
    for name in (FLEET, *routers, PAGE):
        if not os.path.isfile(folder / name):
            yield wrong(name, "is missing")
    planned: fleet.Fleet | None = None
    for path in [folder / FLEET, *sorted(folder.glob("fleets/*.yaml"))]:
        try:
            read = fleet.load(path)
            planned = read if path.name == FLEET else planned
        except fleet.FleetError as error:
            if os.path.exists(path):
                yield wrong(path.name, error)
    started = dict[str, list[Started]]()
    for path in sorted(folder.glob("start-*.sh")):
        try:
            started[path.stem.removeprefix("start-")] = _started(path)
        except (OSError, ValueError, LookupError, TypeError) as error:  # an edited script
            yield wrong(path.name, error)
    if not started:
        yield wrong("start-NODE.sh", "is missing: nothing starts the engines")
    elif planned is not None:
        yield from (wrong("start-NODE.sh", said) for said in _unlike(planned, started))
    engines = Counter(engine.role for node in started.values() for engine in node)
    checks: dict[str, Callable[[Path], Iterator[str]]] = {
        **dict.fromkeys(routers, lambda path: _router(path, started)),
        VALUES: lambda path: _values(path, engines),
        COMPOSE: lambda path: _compose(path, engines),
    }
    for name, problems in checks.items():
        path = folder / name
        try:
            if os.path.exists(path):
                yield from (wrong(name, said) for said in problems(path))
        except (OSError, ValueError, msgspec.DecodeError, PDConnectorError) as error:
            yield wrong(name, error)


def _started(path: Path) -> list[Started]:
    """The engines of a script.

    Raises:
        ValueError: a line is not what a plan writes, or two engines have one port or GPU.
    """
    engines, used = list[Started](), Counter[str]()
    for n, line in enumerate(path.read_text().splitlines(), 1):
        if not line.startswith((GPUS, CORES)) and "vllm serve" not in line:
            continue
        if not line.endswith(" &"):
            raise ValueError(f"line {n}: is cut off; wanted is a command that ends with &")
        gpus, *words = shlex.split(line.removesuffix(" &"))
        given = dict(pairwise(words))
        name, _, listed = gpus.partition("=")
        role = ""
        if "--kv-transfer-config" in given:
            try:
                said = json.loads(given["--kv-transfer-config"])["kv_role"]
            except (LookupError, TypeError, ValueError):
                raise ValueError(
                    f"line {n}: --kv-transfer-config is not an object with kv_role"
                ) from None
            role = next((str(role) for role, its in ROLES.items() if its == said), str(said))
        try:
            port, tp, chunk = (
                int(given[f"--{option}"])
                for option in ("port", "tensor-parallel-size", "max-num-batched-tokens")
            )
        except KeyError as error:
            raise ValueError(f"line {n}: has no {error.args[0]}") from None
        here = listed.split(",")
        ranks = {GPUS: len(here), CORES: 1}.get(name)
        if ranks != tp:
            raise ValueError(f"line {n}: {gpus} for a tensor parallelism of {tp}")
        used.update([f"port {port}", *(f"GPU {gpu}" for gpu in here)])
        engines.append(Started(role, port, len(here), chunk))
    if twice := sorted(what for what, times in used.items() if times > 1):
        raise ValueError(f"two engines have {', '.join(twice)}")
    return engines


def _unlike(planned: fleet.Fleet, started: dict[str, list[Started]]) -> Iterator[str]:
    """How the scripts differ from the fleet, of which they may start several copies."""
    alone = not planned.number(Role.PREFILL)
    planned_engines = Counter[tuple[str, int, int]]()
    for part in planned.parts:
        role = "" if alone else str(part.role)
        planned_engines[role, part.profile.gpus, part.profile.costs.chunk_tokens] += part.number
    engines = [engine for node in started.values() for engine in node]
    started_engines = Counter((engine.role, engine.gpus, engine.chunk_tokens) for engine in engines)
    copies = len(engines) / max(1, sum(planned_engines.values()))
    if started_engines != Counter({kind: n * copies for kind, n in planned_engines.items()}):
        yield f"start {_text(started_engines)}; {FLEET} has {_text(planned_engines)}"


def _text(kinds: Counter[tuple[str, int, int]]) -> str:
    return (
        ", ".join(
            f"{n} {role or 'whole'} of {gpus} GPU with chunks of {chunk:,}"
            for (role, gpus, chunk), n in sorted(kinds.items())
        )
        or "nothing"
    )


def _router(path: Path, started: dict[str, list[Started]]) -> Iterator[str]:
    router: RouterConfig = parse(path.read_bytes(), {}, path.name)
    if node := path.stem.removeprefix("router").removeprefix("-"):
        started = {node: started.get(node, [])}
    for role, urls in (("prefill", router.prefill), ("decode", router.decode), ("", router.engine)):
        listed = sorted(int(url.rpartition(":")[2]) for url in urls)
        ports = sorted(
            engine.port for node in started.values() for engine in node if engine.role == role
        )
        if listed != ports:
            yield f"ports of {role or 'other'} engines are {listed}; the scripts start {ports}"


def _values(path: Path, engines: Counter[str]) -> Iterator[str]:
    values: Any = msgspec.yaml.decode(path.read_bytes(), type=dict[str, Any])
    if not isinstance(values.get("model"), str):
        yield "model: is missing"
    for role in ("prefill", "decode"):
        side = values.get(role)
        replicas = side.get("replicas") if isinstance(side, dict) else None
        if replicas != engines[role]:
            yield f"{role}.replicas {replicas}: the scripts start {engines[role]}"


def _compose(path: Path, engines: Counter[str]) -> Iterator[str]:
    file: Any = msgspec.yaml.decode(path.read_bytes(), type=dict[str, Any])
    services = file.get("services")
    names = services if isinstance(services, dict) else {}
    for role in ("prefill", "decode", ""):
        count = sum(str(name).startswith(f"{role or 'engine'}-") for name in names)
        if count != engines[role]:
            yield f"services: {count} {role or 'whole'} engines; the scripts start {engines[role]}"
    if "router" not in names:
        yield "services: has no router"
