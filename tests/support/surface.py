# SPDX-License-Identifier: Apache-2.0
"""The surface of the project: every name that a user, a proxy, a dashboard or another package may depend on.

`tests/packaging/surface.txt` keeps it, one name a line, so that a name that goes is a line of a diff.
"""

import importlib
import inspect
import re
import tomllib
from collections.abc import Iterable, Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

from prometheus_client import REGISTRY
from typer.main import get_command

from pd_connector.agent import metrics as connector_metrics
from pd_connector.config import Config
from pd_connector.errors import Cause
from pd_connector.kv.coding import CODINGS
from pd_connector.pool.carrier.messages import Status as CarrierStatus
from pd_connector.pool.carrier.metrics import CarrierMetrics
from pd_connector.pool.lending.lender import Recalled
from pd_connector.pool.lending.metrics import LenderMetrics
from pd_connector.pool.settings import PoolSettings
from pd_connector.protocol.wire.params import TransferParams
from pd_connector.tools.cli.app import app as pd_connector
from pd_connector.transport import registry as transports
from scheduler_plugins.admission import pool_report, report
from scheduler_plugins.admission.metrics import metrics as admission_metrics
from scheduler_plugins.commands import app as pd_router
from scheduler_plugins.order import registry as orders
from scheduler_plugins.qos.classes import QosClass, Slo
from scheduler_plugins.qos.file import RouterSection, SchedulerFile, SchedulerSection
from scheduler_plugins.qos.rules import ClassRule, Match
from scheduler_plugins.router.endpoints.admin import create_admin
from scheduler_plugins.router.endpoints.app import create_app
from scheduler_plugins.router.metrics import Metrics as RouterMetrics
from scheduler_plugins.router.policies import registry as routes
from scheduler_plugins.router.roles import registry as roles
from scheduler_plugins.router.settings import settings_file
from scheduler_plugins.router.settings.config import RouterConfig
from scheduler_plugins.router.settings.elastic import Bounds

ROOT = Path(__file__).parents[2]
SEAMS = (
    "pd_connector.codec.base",
    "pd_connector.pool.store.base",
    "pd_connector.transport.base",
    "scheduler_plugins.order.base",
    "scheduler_plugins.router.policies.base",
    "scheduler_plugins.router.roles.base",
)
"""Modules whose classes other packages implement."""
STRUCTS: dict[str, tuple[type, ...]] = {
    "connector config": (Config,),
    "pool config": (PoolSettings,),
    "kv_transfer_params": (TransferParams,),
    "router file": (settings_file._File, settings_file.EngineEntry, Bounds),
    "classes file": (
        SchedulerFile,
        SchedulerSection,
        RouterSection,
        QosClass,
        Slo,
        ClassRule,
        Match,
    ),
}
"""Records that users, proxies and files fill in."""
OWN_VARIABLE = re.compile(r"\bPD_(?:CONNECTOR|ROUTER|SCHEDULER|KERNELS|HYBRID)_[A-Z_]*[A-Z]\b")
INTERNAL = {"PD_CONNECTOR_FAMILY", "PD_CONNECTOR_GPU_STEP"}
"""Variables by which our processes know each other."""


class _Lender:
    """A lender without Mooncake."""

    nbytes = recalls = unknown_recalls = 0
    recalled = Recalled(0)


def lines() -> list[str]:
    """The surface, sorted: a kind, and a name."""
    return sorted({" ".join(words) for words in (*_commands(), *_settings(), *_names(), *_seams())})


def options(command: Any, name: str) -> Iterator[tuple[str, set[str]]]:
    """Every command from this one down, and its options."""
    yield name, {word for param in command.params for word in (*param.opts, *param.secondary_opts)}
    for each in command.list_commands(None) if hasattr(command, "list_commands") else ():
        yield from options(command.get_command(None, each), f"{name} {each}")


def metric_names() -> dict[str, tuple[str, ...]]:
    """Every metric that we register, as Prometheus reads it, and its labels."""
    admission_metrics()
    prefix, labels = connector_metrics.PREFIX, connector_metrics.LABELS
    counters = {**connector_metrics.COUNTERS, **connector_metrics.LABELLED}
    others = {**connector_metrics.GAUGES, **connector_metrics.HISTOGRAMS}
    known = {f"{prefix}{name}_total": labels.get(name, ()) for name in counters}
    known |= {f"{prefix}{name}": labels.get(name, ()) for name in others}
    known |= pool_metrics()
    for registry in (RouterMetrics().registry, REGISTRY):
        for family in registry.collect():
            if family.name.startswith(("pd_router:", "pd_scheduler:")):
                name = re.sub(r"_(bucket|sum|count)$", "", family.name)
                name = f"{name}_total" if family.type == "counter" else name
                collector = registry._names_to_collectors.get(family.name)
                known[name] = tuple(getattr(collector, "_labelnames", ()))
    return known


def pool_metrics() -> dict[str, tuple[str, ...]]:
    """Every metric of a carrier and of a process that lends memory, and its labels."""
    carrier = CarrierMetrics(lambda: CarrierStatus(far="", sealed=True))
    lender = LenderMetrics(_Lender())  # type: ignore[arg-type]
    samples = [family.samples[0] for each in (carrier, lender) for family in each.collect()]
    return {sample.name: tuple(sample.labels) for sample in samples}


def variables(folders: Iterable[str]) -> set[str]:
    """The environment variables that the Python files of these folders read."""
    files = [file for folder in folders for file in (ROOT / folder).rglob("*.py")]
    return {name for file in files for name in OWN_VARIABLE.findall(file.read_text())} - INTERNAL


def _commands() -> Iterator[tuple[str, ...]]:
    for app, name in ((pd_connector, "pd-connector"), (pd_router, "pd-router")):
        for command, names in options(get_command(app), name):
            yield "command", command
            yield from (("option", command, option) for option in names)


def _settings() -> Iterator[tuple[str, ...]]:
    for kind, structs in STRUCTS.items():
        for struct in structs:
            names = getattr(struct, "__struct_fields__", None) or struct._fields
            where = (struct.__name__.strip("_"),) if len(structs) > 1 else ()
            yield from ((kind, *where, name) for name in names)
    yield from (("router setting", field.name) for field in fields(RouterConfig))
    folders = ("pd_connector", "scheduler_plugins", "kernels/pd_kernels")
    yield from (("variable", name) for name in variables(folders))


def _names() -> Iterator[tuple[str, ...]]:
    yield from (("metric", name, *labels) for name, labels in metric_names().items())
    yield from (("cause", cause.value) for cause in Cause)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    groups = {"scripts": project["scripts"], **project["entry-points"]}
    yield from (("entry point", group, name) for group, names in groups.items() for name in names)
    for path in (report.PATH, pool_report.PATH):
        yield "endpoint", "engine", "GET", path
    app = create_app(RouterConfig(prefill=("http://p",), decode=("http://d",)), None, None)
    admin = create_admin(None, None, None, "127.0.0.1")  # type: ignore[arg-type]
    for port, each in (("router", app), ("admin", admin)):
        for route in each.router.routes():
            yield "endpoint", port, route.method, str(route.resource and route.resource.canonical)
    yield from (("codec", name) for name in CODINGS)
    yield from (("transport", name) for name in transports._BUILT_IN)
    yield from (("queue policy", name) for name in orders.POLICIES)
    for policies in (routes.PREFILL, routes.DECODE, routes.BOTH_SIDES):
        yield from (("route policy", name) for name in policies)
    yield from (("role policy", name) for name in roles.ROLES)


def _seams() -> Iterator[tuple[str, ...]]:
    for module in SEAMS:
        for name, each in vars(importlib.import_module(module)).items():
            if name.startswith("_") or getattr(each, "__module__", "") != module:
                continue
            yield "seam", f"{module}.{name}", *_parameters(each)
            if inspect.isclass(each):
                for member, value in vars(each).items():
                    if not member.startswith("_"):
                        yield "seam", f"{module}.{name}.{member}", *_parameters(value)


def _parameters(value: Any) -> tuple[str, ...]:
    if isinstance(value, staticmethod | classmethod):
        value = value.__func__
    if not inspect.isroutine(value):
        return ()
    return (f"({', '.join(inspect.signature(value).parameters)})",)
