# SPDX-License-Identifier: Apache-2.0
"""SGLang's registry: an HTTP server beside a prefill engine, with a row for each rank of the engine and a row for the
engine. Decode engines read rows (`ask_row`); each rank of a prefill engine puts its own (`register`). The registry starts at
about the same time as the ranks."""

import json
import logging
import threading
import time
from http import HTTPStatus
from typing import Any

from pd_connector.sglang.exchange import exchange

ROUTE = "/route"
ENGINE = -1
"""Stands in place of a replica for the row of the whole engine."""
_QUERY = "prefill_dp_rank={0}&prefill_cp_rank={1}&target_tp_rank={1}&target_pp_rank={1}"
_MOST_BYTES = 1 << 16


class NotReadyError(OSError):
    """Not all ranks of the engine have registered yet."""


def ask_row(host: str, port: int, replica: int, timeout_s: float) -> dict[str, Any]:
    """The row of a replica's first rank, or of the engine.

    Raises:
        OSError: no server answers in time. NotReadyError, a subclass: the engine is starting.
        ValueError: the server is not a registry.
    """
    query = _QUERY.format(replica, ENGINE if replica == ENGINE else 0)
    path = f"{ROUTE}?{query}"
    status, body = exchange(host, port, path, timeout_s=timeout_s, most_bytes=_MOST_BYTES)
    if status == HTTPStatus.SERVICE_UNAVAILABLE:
        raise NotReadyError("its registry still waits for ranks of the engine")
    if status != HTTPStatus.OK:
        raise ValueError(f"it answers with status {status}: wanted the 200 of SGLang's registry")
    row = json.loads(body)
    if not isinstance(row, dict):
        raise ValueError(f"it answers {str(row)[:40]!r}: wanted a JSON object")
    return row


def split(address: str) -> tuple[str, int]:
    """Host and port of `host:port`. Raises ValueError."""
    host, _, port = address.rpartition(":")
    return host.strip("[]"), int(port)


logger = logging.getLogger("pd_connector.sglang")

_RETRY_S = 0.5
_TIMEOUT_S = 5.0
_GIVE_UP_S = 300.0


def register(kv_args: Any, host: str, port: int) -> None:
    """Begin to register this rank; returns at once.

    Args:
        kv_args: SGLang's `KVArgs` of this rank.
        host: at which peers reach this rank's agent.
        port: port of the agent's control channel.
    """
    row = json.dumps(_row(kv_args, host, port)).encode()
    args = (*_registry(), row)
    threading.Thread(target=_put, args=args, name="pd-register", daemon=True).start()


def global_rank(parallel: Any) -> int:
    """A number that is unique among the ranks behind one HTTP server.

    Args:
        parallel: SGLang's `ParallelContext`.
    """
    replica = parallel.dp_rank if _replicas(parallel) > 1 else 0
    world = parallel.world_group
    return int((replica or 0) * world.world_size + world.rank_in_group)


def _replicas(parallel: Any) -> int:
    """Whole copies of the model behind one HTTP server. With attention data parallelism there is one copy: its ranks
    are counted by themselves."""
    return 1 if parallel.attn_dp_size > 1 else int(parallel.dp_size)


def _registry() -> tuple[str, int]:
    """The address of SGLang's registry: beside the HTTP server, or on the first of several nodes."""
    from sglang.srt.runtime_context import get_disagg, get_parallel, get_serving
    from sglang.srt.utils.network import NetworkAddress

    first_node = get_parallel().dist_init_addr
    host = NetworkAddress.parse(first_node).resolved().host if first_node else get_serving().host
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)  # it listens on all addresses
    return host, get_disagg().disaggregation_bootstrap_port


def _row(kv_args: Any, host: str, port: int) -> dict[str, Any]:
    """The row that the registry requires. The registry counts rows until all ranks are there."""
    from sglang.srt.runtime_context import get_disagg, get_parallel, get_serving

    parallel = get_parallel()
    return {
        "attn_tp_size": parallel.attn_tp_size,
        "attn_tp_rank": parallel.attn_tp_rank,
        "attn_cp_size": 1,
        "attn_cp_rank": 0,
        "attn_dp_size": parallel.attn_dp_size,
        "attn_dp_rank": parallel.attn_dp_rank,
        "pp_size": parallel.pp_size,
        "pp_rank": kv_args.pp_rank,
        "system_dp_size": _replicas(parallel),
        "system_dp_rank": kv_args.system_dp_rank or 0,
        "rank_ip": host,
        "rank_port": port,
        "page_size": kv_args.page_size,
        "kv_cache_dtype": kv_args.kv_cache_dtype_str,
        "load_balance_method": parallel.load_balance_method,
        "prefill_http_port": get_serving().port,
        "decode_allocation_policy": get_disagg().disaggregation_decode_allocation_policy,
    }


def _put(host: str, port: int, row: bytes) -> None:
    give_up = time.monotonic() + _GIVE_UP_S
    headers = {"Content-Type": "application/json"}
    while True:
        try:
            status, _ = exchange(
                *(host, port, ROUTE),
                timeout_s=_TIMEOUT_S,
                most_bytes=_MOST_BYTES,
                method="PUT",
                body=row,
                headers=headers,
            )
            if status == HTTPStatus.OK:
                return
            problem = f"status {status}"
        except (OSError, ValueError) as error:
            problem = str(error)
        if time.monotonic() >= give_up:
            logger.error(
                "registry %s:%d does not take this rank (%s): no decode engine will find it. Is "
                "another server at --disaggregation-bootstrap-port?",
                *(host, port, problem),
            )
            return
        time.sleep(_RETRY_S)
