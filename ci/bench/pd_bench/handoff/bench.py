# SPDX-License-Identifier: Apache-2.0
"""The plan of one `bench handoff`, and its execution: engines started, measured and ended."""

from __future__ import annotations

import contextlib
import secrets
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from pd_bench.handoff.contender import Contender
from pd_bench.handoff.findings import HandoffFindings, MeasuredPairs, findings
from pd_bench.handoff.line_up import LineUp
from pd_bench.handoff.measure import TurnMeasurement
from pd_bench.handoff.pair import PairSetup
from pd_bench.model import MADE_UP_WEIGHTS, write_model
from pd_bench.netns import Bed
from pd_bench.report import BenchError
from pd_connector.config import KEY_VARIABLE
from pd_connector.errors import PDConnectorError
from pd_connector.tools.demo import MODEL_DIR
from pd_connector.tools.launch import stop_services, terminate_as_interrupt, wait_all
from pd_connector.tools.launch.service import log_folder


@dataclass(frozen=True)
class HandoffBench:
    """One comparison of ours with the baselines.

    Args:
        line_up: the engines, and the contenders that can be compared on them.
        ours: contenders beside the baselines.
        link_mbit: rate of the link between two namespaces; None for one machine without a link.
        model: folder or name; None for the line-up's default.
        prompt_tokens: prompt lengths.
        runs: measured rounds for each length.
        warm_ups: rounds before them, not counted.
    """

    line_up: LineUp
    ours: Sequence[Contender]
    link_mbit: float | None
    model: str | None
    prompt_tokens: Sequence[int]
    runs: int
    warm_ups: int

    @property
    def groups(self) -> list[list[Contender]]:
        """The groups of pairs that run at once.

        Over a link one pair runs at a time, and the first baseline runs first and last to show drift. Four
        engines with this much KV are too many for a small machine, and NIXL's polling slows its neighbours.
        """
        baselines = self.line_up.baselines_of(self.ours)
        if self.link_mbit is None:
            return [[*baselines, *self.ours]]
        return [[contender] for contender in (*baselines, *self.ours, baselines[0])]

    def measure(self, console: Console) -> HandoffFindings:
        """Measure everything. At the end no engine and no namespace is left, whatever happens.

        Raises:
            PDConnectorError: nothing could be measured, or the measurement was not the intended one.
        """
        logs = log_folder()
        console.print(f"engines' logs in {logs}", highlight=False)
        with contextlib.ExitStack() as stack:
            stack.enter_context(terminate_as_interrupt())
            stage = self._stage(stack, logs)
            groups = self.groups
            measured: list[MeasuredPairs] = []
            failures: dict[str, str] = {}
            for number, group in enumerate(groups, 1):
                names = ", ".join(contender.name for contender in group)
                console.print(f"[{number}/{len(groups)}] {names}", markup=False, highlight=False)
                try:
                    measured.append(self._measure(group, stage, console))
                except PDConnectorError as error:
                    if number == 1:  # there is nothing to compare with then
                        raise
                    failures[names] = str(error)
                    console.print(f"{names} failed: {error}", style="red", markup=False)
        if all(
            series.contender.is_baseline
            for pairs_measured in measured
            for series in pairs_measured.series
        ):
            raise BenchError("; ".join(f"{name}: {reason}" for name, reason in failures.items()))
        return findings(measured, failures)

    def _stage(self, stack: contextlib.ExitStack, logs: Path) -> PairSetup:
        # A page more than the longest request, for the decoded tokens.
        max_model_len = max(4096, max(self.prompt_tokens) + 64)
        namespaces, env = None, dict[str, str]()
        if self.link_mbit is not None:
            namespaces = stack.enter_context(Bed(self.link_mbit)).namespaces
            # As a variable: every user on the machine can read arguments.
            env = {KEY_VARIABLE: secrets.token_hex(32)}
        if self.model is not None:
            return PairSetup(self.model, max_model_len, logs, (), env, namespaces)
        if not self.line_up.measuring_model:
            return PairSetup(str(MODEL_DIR), max_model_len, logs, (), env, namespaces)
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="pd-connector-model-"))
        model = str(write_model(Path(folder)))
        return PairSetup(model, max_model_len, logs, MADE_UP_WEIGHTS, env, namespaces)

    def _measure(
        self, group: Sequence[Contender], stage: PairSetup, console: Console
    ) -> MeasuredPairs:
        pairs = [self.line_up.pair(contender, stage) for contender in group]
        engines = [engine for pair in pairs for engine in pair.engines]
        try:
            for engine in engines:
                engine.start()
            wait_all(engines, console=console)
            with console.status("warming up") as status:
                say = status.update if console.is_terminal else console.print
                measurement = TurnMeasurement(pairs, self.runs, self.warm_ups, say)
                return measurement.measure(self.prompt_tokens)
        finally:
            stop_services(engines)
