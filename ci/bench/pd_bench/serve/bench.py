# SPDX-License-Identifier: Apache-2.0
"""The plan of one `bench serve`, and its execution: stacks started, measured and ended."""

from __future__ import annotations

import contextlib
import secrets
import tempfile
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from pd_bench.command_output import printing
from pd_bench.harness import NIXL, VLLM, require
from pd_bench.model import MADE_UP_WEIGHTS, write_model
from pd_bench.netns import Bed, available
from pd_bench.peer_environment import how_to_make
from pd_bench.report import BenchError
from pd_bench.serve.measure import Measurement, Plan, ServeFindings
from pd_bench.serve.stack import (
    RIVAL_ROUTER,
    OurStack,
    RivalStack,
    StackSetup,
    router_version,
)
from pd_bench.serve.trace import Line, longest, read
from pd_connector.config import KEY_VARIABLE
from pd_connector.tools.launch import stop_services, terminate_as_interrupt, wait_all
from pd_connector.tools.launch.service import log_folder

TESTED_VERSION = "0.1.17"


@dataclass(frozen=True)
class ServeBench:
    """One comparison of our stack with vLLM's own.

    Args:
        trace: file in Mooncake's form.
        peer_env: virtual environment with the rival's router.
        link_mbit: rate of the link between the engines.
        plan: loads, requests and rounds.
    """

    trace: Path
    peer_env: Path
    link_mbit: float
    plan: Plan

    def check(self) -> str:
        """The rival's version. Raises BenchError that names what is missing, with advice."""
        self._lines()
        version = router_version(self.peer_env)
        if not version:
            env = self.peer_env
            raise BenchError(
                f"no {RIVAL_ROUTER} in {env} (--peer-env): "
                f"{how_to_make(env, f'{RIVAL_ROUTER}=={TESTED_VERSION}')}"
            )
        require(VLLM, NIXL, ("aiohttp", "our router needs it: pip install 'pd-connector[router]'"))
        if reason := available():
            raise BenchError(
                f"no network namespaces here ({reason}): run it as root with iproute2 installed"
            )
        return version

    def _lines(self) -> list[Line]:
        return read(self.trace, self.plan.requests * self.plan.rounds)

    def measure(self, console: Console) -> ServeFindings:
        """Measure everything. At the end no process and no namespace is left, whatever happens.

        Raises:
            PDConnectorError: nothing could be measured, or the measurement was not the intended one.
        """
        lines = self._lines()
        logs = log_folder()
        console.print(f"logs in {logs}", highlight=False)
        with contextlib.ExitStack() as stack:
            stack.enter_context(terminate_as_interrupt())
            folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="pd-connector-model-"))
            setup = StackSetup(
                str(write_model(Path(folder))),
                longest(lines, self.plan.scale),
                logs,
                stack.enter_context(Bed(self.link_mbit)).namespaces,
                MADE_UP_WEIGHTS,
            )
            ours = OurStack(setup, {KEY_VARIABLE: secrets.token_hex(32)})
            rival = RivalStack(setup, self.peer_env)
            services = [*ours.services, *rival.services]
            try:
                for group in ([*ours.engines, *rival.engines], [ours.router, rival.router]):
                    for service in group:
                        service.start()
                    wait_all(group, console=console)
                rival.rest()

                return Measurement(ours, rival, lines, self.plan, printing(console)).measure()
            finally:
                stop_services(services)
