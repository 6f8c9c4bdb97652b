# SPDX-License-Identifier: Apache-2.0
"""`pd-connector pool carry`: the carrier of a host, until it is told to end."""

import contextlib
import logging
import queue
import signal
import sys
from pathlib import Path

from pd_connector.errors import ConfigError
from pd_connector.hosts import without_secret
from pd_connector.pool.carrier.carrier import Carrier
from pd_connector.pool.carrier.server import CarrierServer
from pd_connector.pool.far.registry import far_address
from pd_connector.pool.far.seal import Seal, read_keys
from pd_connector.pool.settings import load, make_above
from pd_connector.pool.store.base import DISK
from pd_connector.pool.store.local import LocalStore
from pd_connector.pool.store.tier_storage import Space
from pd_connector.tools.cli.app import fail


def run(
    far: str,
    key_file: Path | None,
    answers_within_s: float,
    client_python: str,
    metrics: str,
    folder: Path | None,
) -> None:
    """Serve until SIGTERM or SIGINT. Ends the command if something cannot be used."""
    logging.basicConfig(
        level=logging.INFO, stream=sys.stderr, format="%(asctime)s %(levelname)s %(message)s"
    )
    # A handler must not set an event that its own thread waits for: the event's lock may be held.
    ends: queue.SimpleQueue[None] = queue.SimpleQueue()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: ends.put(None))
    try:
        seal = Seal(read_keys(key_file) if key_file else ())
        kind, _ = far_address(far, sealed=seal.is_on, python=client_python)
        with contextlib.ExitStack() as opened:
            store, memory = _host_store(folder)
            opened.callback(store.close)
            carrier = Carrier(store, seal, far, kind.most_bytes, answers_within_s, client_python)
            opened.callback(carrier.close)
            server = CarrierServer(carrier, memory)
            opened.callback(server.close)
            if metrics:
                from pd_connector.pool.carrier.metrics import CarrierMetrics
                from pd_connector.tools.cli.metrics_port import MetricsPort

                opened.callback(MetricsPort(metrics, CarrierMetrics(carrier.status)).close)
            sealed = "sealed" if seal.is_on else "not sealed"
            print(f"carrier ready: {memory} and {without_secret(far)}, {sealed}", flush=True)
            ends.get()
    except (ConfigError, OSError) as error:
        fail(str(error))


def _host_store(folder: Path | None) -> tuple[LocalStore, Path]:
    """The pool of this host, with the budgets that engines have set, and the disk folder that they use."""
    settings = load(True)
    assert settings is not None
    memory = settings.memory._replace(chosen=False)
    make_above(memory.path)
    # It only looks: a store without the disk takes the disk's chunks out of the catalog if no engine runs.
    looks = LocalStore(memory, visits=True)
    disk = next((tier for tier in looks.status().tiers if tier.name == DISK), None)
    looks.close()
    if folder is None and disk is None:
        return LocalStore(memory), memory.path
    path = folder or Path(disk.path if disk else "")
    return LocalStore(memory, Space(path, disk.budget if disk else 0, chosen=False)), memory.path
