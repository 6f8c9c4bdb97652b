# SPDX-License-Identifier: Apache-2.0
"""SGLang's registry, as its clients see it: an HTTP server beside a prefill engine, with a row for each rank of the
engine (`registration.py` puts it there), and a row for the engine."""

import json
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
