# SPDX-License-Identifier: Apache-2.0
"""SGLang's registry as those see it who ask it: an HTTP server beside a prefill engine, with a row for each
of the engine's ranks (`registration.py` puts them there), and one for the engine."""

import json
import urllib.request
from typing import Any

ROUTE = "/route"
ENGINE = -1
"""In place of a replica: the row of the whole engine."""
_QUERY = "prefill_dp_rank={0}&prefill_cp_rank={1}&target_tp_rank={1}&target_pp_rank={1}"
_MOST_BYTES = 1 << 16


def ask_row(host: str, port: int, replica: int, timeout_s: float) -> dict[str, Any]:
    """The row of a replica's first rank, or of the engine.

    Raises:
        OSError: nobody answers in time, or not with status 200.
        ValueError: who answers is no registry.
    """
    name = f"[{host}]" if ":" in host else host
    query = _QUERY.format(replica, ENGINE if replica == ENGINE else 0)
    url = f"http://{name}:{port}{ROUTE}?{query}"
    with urllib.request.urlopen(url, timeout=timeout_s) as answer:
        row = json.loads(answer.read(_MOST_BYTES))
    if not isinstance(row, dict):
        raise ValueError(f"it answers {str(row)[:40]!r}: wanted a JSON object")
    return row


def split(address: str) -> tuple[str, int]:
    """Host and port of `host:port`. Raises ValueError."""
    host, _, port = address.rpartition(":")
    return host.strip("[]"), int(port)
