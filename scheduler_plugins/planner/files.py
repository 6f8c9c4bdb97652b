# SPDX-License-Identifier: Apache-2.0
"""The files of a plan: the fleets, the commands that start the recommended one, the router's file, and the chart's values."""

from __future__ import annotations

import shlex
from collections import Counter
from collections.abc import Iterator
from math import ceil, inf
from pathlib import Path
from typing import NamedTuple

import msgspec

from pd_connector.errors import PDConnectorError
from scheduler_plugins.planner.goodput import Promise
from scheduler_plugins.planner.inventory import CPU, Inventory
from scheduler_plugins.planner.plan import Plan, Row
from scheduler_plugins.planner.search import Candidate
from scheduler_plugins.qos.classes import ONLY, Slo
from scheduler_plugins.router.policies.base import Role
from scheduler_plugins.router.policies.registry import DEFAULT
from scheduler_plugins.sim.fleet import Fleet, FleetFile, LinksFile, NodeFile, PartFile
from scheduler_plugins.sim.links import Network
from scheduler_plugins.sim.simulate import CHUNK_TOKENS

FIRST_PORT = 8100
PAGE, ROUTER, VALUES, COMPOSE = "plan.md", "router.yaml", "values.yaml", "compose.yaml"
_PATTERNS = (PAGE, ROUTER, "router-*.yaml", VALUES, COMPOSE, "fleet.yaml", "fleets/*.yaml", "start-*.sh")  # fmt: skip
"""Names of a plan's files."""
TITLE = "# Plan: "
"""How `plan.md` begins."""
ROLES = {Role.PREFILL: "kv_producer", Role.DECODE: "kv_consumer"}
GPUS, CORES = "CUDA_VISIBLE_DEVICES", "VLLM_CPU_OMP_THREADS_BIND"
"""Variables that bind an engine, as commands begin with them."""
_CPU_SERVER = ("python", "-m", "vllm.entrypoints.openai.api_server")
_END_ALL = "trap 'kill $engines ${!-} || :; wait; exit 143' HUP INT TERM"
"""Shells start commands in the background with Ctrl-C ignored: engines would outlive the script. `$!` is an engine that is
not listed yet."""
_SCHEDULER = "scheduler_plugins.vllm.PrefixAwareScheduler"
Values = dict[str, object] | None


class Engine(NamedTuple):
    """An engine to start."""

    role: Role
    node: str
    port: int
    gpus: tuple[int, ...]
    chunk_tokens: int
    alone: bool  # it takes part in no handoff
    cpu_gib: int = 0  # room for KV, if `gpus` are cores of a CPU
    copy: int = 0  # of the fleet

    def command(self, model: str, apart: bool) -> str:
        """The line that starts it. `apart`: other engines are on other nodes."""
        listed = ",".join(map(str, self.gpus))
        if self.cpu_gib:  # vLLM's CPU build has no working command `vllm`
            words = [*_CPU_SERVER, "--model", model, *self.options(apart)]
            return f"{CORES}={listed} VLLM_CPU_KVCACHE_SPACE={self.cpu_gib} {shlex.join(words)}"
        return f"{GPUS}={listed} {shlex.join(['vllm', 'serve', model, *self.options(apart)])}"

    def options(self, apart: bool) -> list[str]:
        """What it is told besides its model."""
        words = ["--host", "0.0.0.0"] if apart else []
        ranks = 1 if self.cpu_gib else len(self.gpus)
        words += ["--port", str(self.port), "--tensor-parallel-size", str(ranks)]
        words += ["--max-num-batched-tokens", str(self.chunk_tokens)]
        # Compiling takes minutes, and a C++ compiler.
        words += ["--enforce-eager"] if self.cpu_gib else []
        words += ["--scheduler-cls", _SCHEDULER]
        if not self.alone:
            transfer = dict[str, object](kv_connector="PDConnector", kv_role=ROLES[self.role])
            if apart:
                transfer["kv_connector_extra_config"] = {"host": self.node}
            words += ["--kv-transfer-config", msgspec.json.encode(transfer).decode()]
        return words


def engines_of(chosen: Candidate, inventory: Inventory) -> list[Engine]:
    """The engines of a fleet, every copy of it, with their ports and GPUs."""
    engines, next_gpu = list[Engine](), Counter[str]()
    nodes = [node.place.node for node in inventory.nodes]
    cpus = {node.place.node for node in inventory.nodes if node.device == CPU}
    alone = not any(part.role is Role.PREFILL for part in chosen.fleet.parts)
    for copy in range(chosen.copies):
        for part in chosen.fleet.parts:
            # Copies of a fleet are on one node each.
            node = part.place.node if chosen.copies == 1 else nodes[copy]
            for _ in range(part.number):
                first, size = next_gpu[node], part.profile.gpus
                next_gpu[node] += size
                number = sum(engine.node == node for engine in engines)
                gpus = tuple(range(first, first + size))
                chunk = part.profile.costs.chunk_tokens or CHUNK_TOKENS
                room = part.profile.kv_tokens * part.profile.kv_bytes_per_token
                gib = ceil(room / (1 << 30)) if node in cpus else 0
                port = FIRST_PORT + number
                engines.append(Engine(part.role, node, port, gpus, chunk, alone, gib, copy))
    return engines


def fleet_file(fleet: Fleet) -> FleetFile:
    """The file of a fleet, from which `pd-router simulate --fleet` makes the same fleet."""
    names = dict[object, str]()
    profiles, nodes, parts = {}, dict[str, NodeFile](), list[PartFile]()
    for part in fleet.parts:
        if part.profile not in names:
            names[part.profile] = f"profile{len(names)}"
            profiles[names[part.profile]] = part.profile
        place = part.place
        if place.node:
            nodes[place.node] = NodeFile(place.rack, place.nic_bytes_per_s)
        parts.append(
            PartFile(
                role=part.role, profile=names[part.profile], number=part.number, node=place.node
            )
        )
    net = fleet.network or Network()
    links = LinksFile(
        net.device_bytes_per_s, net.node_bytes_per_s, net.rack_bytes_per_s, net.other_bytes_per_s, net.latency_s
    )  # fmt: skip
    return FleetFile(profiles=profiles, parts=parts, nodes=nodes, links=links)


def simulate_command(plan: Plan, row: Row, trace: str, file: str) -> str:
    """The command whose column `in time` is that of the row."""
    window = plan.windows[row.worst]
    words = ["pd-router", "simulate", trace, "--skip", str(window.skip)]
    words += ["--limit", str(len(window.requests))]
    words += ["--fleet", file, "--level", "2", "--per-s", f"{row.candidate.unit_per_s:.4f}"]
    words += [
        f"--{name}-ms={value * 1e3:g}"
        for name, value in zip(("ttft", "tpot"), plan.promise, strict=True)
        if value < inf
    ]
    words += ["--order", plan.order] if plan.order != "srjf_calibrated" else []
    words += ["--policy", plan.policy] if plan.policy not in ("", DEFAULT) else []
    return shlex.join(words)


def fleet_name(n: int) -> str:
    """The file of the n-th row's fleet."""
    return "fleet.yaml" if n == 0 else f"fleets/{n}.yaml"


def router_name(node: str) -> str:
    """The router's file of a node that has a copy of the fleet to itself."""
    return f"router-{node}.yaml"


def started_nodes(folder: Path) -> list[str]:
    """The nodes for which the folder has a script. Files of other names are not a plan's."""
    scripts = sorted(folder.glob("start-*.sh"))
    return [path.stem.removeprefix("start-") for path in scripts]


def write(
    plan: Plan, folder: Path, model: str, page: str, *, values: Values, compose: Values
) -> None:
    """Write the files.

    Args:
        values: of the chart; None: it cannot start the fleet.
        compose: services for the compose file; None: it cannot start the fleet.

    Raises:
        PDConnectorError: the folder cannot be written.
    """
    try:
        (folder / "fleets").mkdir(parents=True, exist_ok=True)
        if _is_plan(folder / PAGE):  # another plan's files
            for old in (
                *folder.glob("fleets/*.yaml"),
                *folder.glob("start-*.sh"),
                *(folder / router_name(node) for node in started_nodes(folder)),
                *(folder / name for name in (ROUTER, VALUES, COMPOSE)),
            ):
                old.unlink(missing_ok=True)
        (folder / PAGE).write_text(page)  # first: after a failure the folder is still a plan's
        for n, row in enumerate(plan.rows):
            (folder / fleet_name(n)).write_bytes(
                msgspec.yaml.encode(fleet_file(row.candidate.fleet))
            )
        engines = engines_of(plan.chosen.candidate, plan.inventory)
        copies = [
            [engine for engine in engines if engine.copy == copy]
            for copy in range(plan.chosen.candidate.copies)
        ]
        for of_copy in copies:
            for name, text in _scripts(of_copy, model):
                path = folder / name
                path.write_text(text)
                path.chmod(0o755)
            # No KV passes between copies, so each has a router.
            name = ROUTER if len(copies) == 1 else router_name(of_copy[0].node)
            (folder / name).write_bytes(router_file(of_copy, plan.promise, plan.policy))
        for name, content in ((VALUES, values), (COMPOSE, compose)):
            if content is not None:
                (folder / name).write_bytes(msgspec.yaml.encode(content))
    except OSError as error:
        raise PDConnectorError(
            f"{folder}: cannot be written ({error.strerror}); name another --out"
        ) from None


def _scripts(engines: list[Engine], model: str) -> Iterator[tuple[str, str]]:
    """For each node, the script that starts its engines."""
    nodes = list(dict.fromkeys(engine.node for engine in engines))
    apart = len(nodes) > 1
    for node in nodes:
        lines = ["#!/bin/sh", "set -eu", "engines=", _END_ALL]
        if apart and not all(engine.alone for engine in engines):
            lines.append(
                ': "${PD_CONNECTOR_KEY:?all engines need one key: export PD_CONNECTOR_KEY of pd-connector key}"'
            )
        for engine in engines:
            if engine.node == node:
                lines += [f"{engine.command(model, apart)} &", 'engines="$engines $!"']
        yield f"start-{node}.sh", "\n".join([*lines, "wait", ""])


def router_file(engines: list[Engine], promise: Promise, policy: str) -> bytes:
    """The router's file. The router knows the promise, as in the simulation: it refuses what would break it."""
    apart = len({engine.node for engine in engines}) > 1
    entries = []
    for engine in engines:
        entry = {"url": f"http://{engine.node if apart else '127.0.0.1'}:{engine.port}"}
        # Without a role an engine is asked: it takes part in no handoff, and answers alone.
        entries.append(entry if engine.alone else {**entry, "role": str(engine.role)})
    slo = Slo(ttft_ms=promise.ttft_s * 1e3, tpot_ms=promise.tpot_s * 1e3)
    classes = [msgspec.structs.replace(ONLY[0], slo=slo)]
    return msgspec.yaml.encode(
        {"engines": entries, "policy": policy or DEFAULT, "classes": classes}
    )


def chart_values(engines: list[Engine], model: str) -> tuple[Values, str]:
    """Values of our chart, or why it cannot start this fleet."""
    values = dict[str, object](model=model)
    if any(engine.cpu_gib for engine in engines):
        return None, "our chart starts engines on GPUs"
    if any(engine.copy for engine in engines):
        return None, "our chart has one router; this plan has one for each node"
    if any(engine.alone for engine in engines):
        return None, "our chart starts no engines that do both"
    for role in (Role.PREFILL, Role.DECODE):
        side = [engine for engine in engines if engine.role is role]
        kinds = {(len(engine.gpus), engine.chunk_tokens) for engine in side}
        if len(kinds) > 1:
            return None, f"our chart has one kind of engine a side; {role} has {len(kinds)}"
        tp, chunk = kinds.pop()
        values[str(role)] = {
            "replicas": len(side),
            "tensorParallelSize": tp,
            "args": ["--max-num-batched-tokens", str(chunk), "--scheduler-cls", _SCHEDULER],
        }
    return values, ""


def _is_plan(page: Path) -> bool:
    """Whether a page is one of ours: nothing of another folder is deleted."""
    return page.is_file() and page.read_bytes().startswith(TITLE.encode())


def check_free(folder: Path) -> None:
    """Raises PDConnectorError if the folder is a file, cannot be read, or has files with a plan's names that no plan wrote."""
    try:
        if folder.exists() and not folder.is_dir():
            raise PDConnectorError(f"{folder}: is a file; name another --out")
        for pattern in () if _is_plan(folder / PAGE) else _PATTERNS:
            for path in folder.glob(pattern):
                raise PDConnectorError(
                    f"{path}: no plan wrote it, and it would be lost; name another --out"
                )
    except OSError as error:
        problem = f"cannot be read ({error.strerror})"
        raise PDConnectorError(f"{folder}: {problem}; name another --out") from None


def compose_services(plan: Plan, engines: list[Engine], model: str) -> tuple[Values, str]:
    """What is laid over our compose file (`MODEL=- docker compose -f examples/deploy/compose.yaml -f compose.yaml up`), or
    why it cannot start this fleet. The file needs some `MODEL` for the two engines that it starts alone.

    The file's own two engines stand aside. Engines are like them, but for their command and GPUs.
    """
    if len({engine.node for engine in engines}) > 1:
        return None, "our compose file is for one host; this fleet has several nodes"
    if any(engine.cpu_gib for engine in engines):
        return None, "our compose file starts engines on GPUs"
    unused = {"profiles": ["unused"]}
    services = dict[str, object](prefill=unused, decode=unused)
    volumes = ["${HF_HOME:-~/.cache/huggingface}:/root/.cache/huggingface"]
    if Path(model).is_absolute():
        volumes.append(_plain(f"{model}:{model}:ro"))
    for engine in engines:
        role = "engine" if engine.alone else str(engine.role)
        gpus = [str(gpu) for gpu in engine.gpus]
        device = {"driver": "nvidia", "device_ids": gpus, "capabilities": ["gpu"]}
        services[f"{role}-{engine.port}"] = {
            **_LIKE_OURS,
            "environment": ["HF_TOKEN"],
            "volumes": volumes,
            "entrypoint": ["vllm", "serve", _plain(model)],
            "command": [_plain(word) for word in ("--host", "127.0.0.1", *engine.options(False))],
            "deploy": {"resources": {"reservations": {"devices": [device]}}},
        }
    urls = [
        word
        for engine in engines
        for word in (
            "--engine" if engine.alone else f"--{engine.role}",
            f"http://127.0.0.1:{engine.port}",
        )
    ]
    services["router"] = {"command": [*urls, "--policy", plan.policy or DEFAULT, "--port", "8000"]}
    return {"services": services}, ""


_LIKE_OURS = {"image": "vllm-pd-connector", "ipc": "host", "pid": "host", "network_mode": "host"}
"""What engines of our compose file have."""


def _plain(text: str) -> str:
    """A text in which compose replaces no variable."""
    return text.replace("$", "$$")
