# SPDX-License-Identifier: Apache-2.0
"""`pd-router mock`: an engine that speaks vLLM's HTTP and computes nothing."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import typer

from pd_connector.errors import PDConnectorError
from pd_connector.tools.command_line import option, run, single
from scheduler_plugins.cost.profile import load
from scheduler_plugins.sim.links import Network
from scheduler_plugins.sim.simulate import CHUNK_TOKENS, COSTS

FAILED = 2


def mock(**options: Any) -> None:
    """An engine that speaks vLLM's HTTP, and takes its times from a cost model."""
    try:
        asyncio.run(_serve(SimpleNamespace(**options)))
    except (PDConnectorError, ValueError, OSError) as error:  # of a profile, a setting, an address
        print(f"not started: {error}", file=sys.stderr)
        raise typer.Exit(FAILED) from None


async def _serve(given: SimpleNamespace) -> None:
    from scheduler_plugins.sim.mock.server import MockEngine
    from scheduler_plugins.sim.mock.settings import MockSettings

    costs = (
        load(given.cost_model) if given.cost_model else replace(COSTS, chunk_tokens=CHUNK_TOKENS)
    )
    engine = MockEngine(
        MockSettings(
            host=given.host,
            port=given.port,
            model=given.model,
            costs=costs,
            order=given.order,
            cache_blocks=given.cache_blocks,
            block_tokens=given.block_tokens,
            kv_tokens=given.kv_tokens,
            speed=given.speed,
            network=Network(bytes_per_s=given.bytes_per_s),
            kv_events=given.kv_events,
            kv_replay=given.kv_replay,
            sglang=given.sglang,
            decode_apart=given.decode_apart,
        )
    )
    stop, loop = asyncio.Event(), asyncio.get_running_loop()
    for name in (signal.SIGINT, signal.SIGTERM):
        with contextlib.suppress(NotImplementedError):
            loop.add_signal_handler(name, stop.set)
    try:
        await engine.start()
        host = f"[{given.host}]" if ":" in given.host else given.host
        print(f"mock engine on http://{host}:{engine.port}", flush=True)
        await stop.wait()
    finally:
        await engine.close()


_OPTIONS: tuple[tuple[str, Any, Any, str | None, str], ...] = (
    ("host", str, "127.0.0.1", None, "address to listen on"),
    ("port", int, 0, None, "port to listen on; 0: any free port, which is printed"),
    ("model", str, "mock", None, "name of the model"),
    ("cost-model", Path | None, None, "FILE", "cost model; pd-connector profile writes it"),
    ("order", str, "srjf_calibrated", "NAME", "order of the queue"),
    ("cache-blocks", int, 8000, None, "size of the prefix cache, in blocks"),
    ("block-tokens", int, 16, None, "tokens of a block"),
    ("kv-tokens", float, float("inf"), None, "room for decoding requests, in tokens"),
    ("speed", float, 1.0, None, "factor by which the engine is faster than real time"),
    (
        "bytes-per-s",
        float,
        Network().bytes_per_s,
        None,
        "bandwidth of the link for KV, in bytes per second",
    ),
    ("kv-events", str, "", "ENDPOINT", "ZMQ endpoint where KV events are published, as by vLLM"),
    ("kv-replay", str, "", "ENDPOINT", "ZMQ endpoint where missed KV events are replayed"),
    ("sglang", bool, False, None, "answer questions about itself as SGLang's server does"),
    (
        "decode-apart",
        bool,
        False,
        None,
        "decode beside prefills without slowing them, as two engines would",
    ),
)

app = single(
    mock,
    [
        option(name, kind, default, meaning, metavar=metavar)
        for name, kind, default, metavar, meaning in _OPTIONS
    ],
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Serve until SIGINT or SIGTERM. Returns the exit status."""
    return run(app, "pd-router mock", arguments)
