# SPDX-License-Identifier: Apache-2.0
"""Our router (`scheduler_plugins.router`) as a process."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path

from pd_connector.tools.launch.client import HttpError
from pd_connector.tools.launch.service import Service


class RouterProcess(Service):
    """The router in front of these engines.

    Args:
        prefill: base URLs of prefill engines.
        decode: base URLs of decode engines.
        args: further arguments of the router.
        hands_over: whether it counts as ready only when every engine is up and it can hand KV over, and not as
            soon as it can answer.
    """

    def __init__(
        self,
        prefill: Sequence[str],
        decode: Sequence[str],
        *,
        name: str = "router",
        args: Sequence[str] = (),
        hands_over: bool = True,
        log_path: Path | None = None,
    ) -> None:
        super().__init__(name, log_path)
        self.prefill = list(prefill)
        self.decode = list(decode)
        self.args = list(args)
        self.hands_over = hands_over

    def command(self) -> list[str]:
        command = [sys.executable, "-m", "scheduler_plugins.router"]
        command += ["--host", self.host, "--port", str(self.port)]
        for side, urls in (("--prefill", self.prefill), ("--decode", self.decode)):
            command += [side, *urls] if urls else []
        return command + self.args

    def ready(self) -> bool:
        return super().ready() and (not self.hands_over or self.all_up(disaggregates=True))

    def all_up(self, *, disaggregates: bool = False) -> bool:
        """Whether it answers, and knows that every engine is up; with `disaggregates` also that it can hand KV over."""
        try:
            state = json.loads(self.client.get("/health", timeout_s=2.0))
        except (HttpError, OSError):
            return False
        hands_over = not disaggregates or bool(state["disaggregates"])
        return hands_over and all(engine["state"] == "up" for engine in state["engines"])

    def phase(self) -> str:
        return "waiting for the engines"
