# SPDX-License-Identifier: Apache-2.0
"""`pd-router mock`: an engine that speaks vLLM's HTTP and computes nothing."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from pd_connector.errors import PDConnectorError
from scheduler_plugins.cost.profile import load
from scheduler_plugins.sim.links import Network
from scheduler_plugins.sim.simulate import CHUNK_TOKENS, COSTS


def main(arguments: Sequence[str] | None = None) -> int:
    """Serve until SIGINT or SIGTERM. Returns the exit status."""
    given = _parser().parse_args(arguments)
    try:
        return asyncio.run(_serve(given))
    except (PDConnectorError, ValueError, OSError) as error:  # of a profile, a setting, an address
        print(f"not started: {error}", file=sys.stderr)
        return 2


async def _serve(given: argparse.Namespace) -> int:
    try:
        from scheduler_plugins.sim.mock.server import MockEngine
        from scheduler_plugins.sim.mock.settings import MockSettings
    except ModuleNotFoundError as error:
        print(f"{error}: pip install 'pd-connector[router]'", file=sys.stderr)
        return 2
    from dataclasses import replace

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
        print(f"mock engine on http://{given.host}:{engine.port}", flush=True)
        await stop.wait()
    finally:
        await engine.close()
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="pd-router mock",
        description="An engine that speaks vLLM's HTTP, and takes its times from a cost model.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on")
    parser.add_argument(
        "--port", type=int, default=0, help="port to listen on; 0: any free port, which is printed"
    )
    parser.add_argument("--model", default="mock", help="name of the model")
    parser.add_argument(
        "--cost-model", type=Path, metavar="FILE", help="cost model; pd-connector profile writes it"
    )
    parser.add_argument(
        "--order", default="srjf_calibrated", metavar="NAME", help="order of the queue"
    )
    parser.add_argument(
        "--cache-blocks", type=int, default=8000, help="size of the prefix cache, in blocks"
    )
    parser.add_argument("--block-tokens", type=int, default=16, help="tokens of a block")
    parser.add_argument(
        "--kv-tokens",
        type=float,
        default=float("inf"),
        help="room for decoding requests, in tokens",
    )
    parser.add_argument(
        "--speed",
        type=float,
        default=1.0,
        help="factor by which the engine is faster than real time",
    )
    parser.add_argument(
        "--bytes-per-s",
        type=float,
        default=Network().bytes_per_s,
        help="bandwidth of the link for KV, in bytes per second",
    )
    parser.add_argument(
        "--kv-events",
        default="",
        metavar="ENDPOINT",
        help="ZMQ endpoint where KV events are published, as by vLLM",
    )
    parser.add_argument(
        "--kv-replay",
        default="",
        metavar="ENDPOINT",
        help="ZMQ endpoint where missed KV events are replayed",
    )
    parser.add_argument(
        "--sglang",
        action="store_true",
        help="answer questions about itself as SGLang's server does",
    )
    parser.add_argument(
        "--decode-apart",
        action="store_true",
        help="decode beside prefills without slowing them, as two engines would",
    )
    return parser
