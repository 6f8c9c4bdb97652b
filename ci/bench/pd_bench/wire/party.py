# SPDX-License-Identifier: Apache-2.0
"""The program of either process of `bench wire`: `python -m pd_bench.wire.party SOCKET ROLE TOKENS HOST`."""

import sys
import threading
from typing import Any

from pd_bench.party import Party, obey
from pd_bench.wire.movers import PlainTcp, make_mover
from pd_connector.config_rules import PYTHON_SWITCH_MS
from pd_connector.tools.wire import WireCache


class WireParty(Party):
    """One cache in host memory, for movers of every kind."""

    def __init__(self, role: str, tokens: int, host: str) -> None:
        self._role = role
        self._host = host
        self.cache: WireCache = WireCache(role, tokens)

    def open(self, kind: str, settings: dict[str, Any]) -> dict[str, Any]:
        # A connector lowers it for the whole process, and this process may measure others afterwards.
        sys.setswitchinterval(PYTHON_SWITCH_MS / 1000)
        self.mover = make_mover(kind, self._role, self.cache, self._host, settings)
        return self.mover.address()

    def offer(self, number: int) -> float:
        used_s = super().offer(number)
        if isinstance(self.mover, PlainTcp):
            threading.Thread(target=self.mover.serve, daemon=True).start()
        return used_s


def main(path: str, role: str, tokens: str, host: str) -> None:
    obey(WireParty(role, int(tokens), host), path)


if __name__ == "__main__":
    main(*sys.argv[1:])
