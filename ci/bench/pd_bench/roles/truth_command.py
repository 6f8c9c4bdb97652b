# SPDX-License-Identifier: Apache-2.0
"""`roles truth`: every policy live, then simulated."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from pd_bench.report import Say
from pd_bench.roles import truth_engines, truth_live
from pd_bench.roles.fleets import OPT_13B, FleetKind
from pd_bench.roles.truth import Busy, Figures, Plan, busy, plan, simulated
from scheduler_plugins.order.request import Waiting


@dataclass(frozen=True)
class Beside:
    """Figures by policy."""

    live: Mapping[str, Figures]
    simulated: Mapping[str, Figures]

    def lines(self) -> list[str]:
        """A line for each policy and side."""
        return [
            f"{name}, {side}: mean TTFT {figures.ttft_s:.3f} s, mean TPOT {figures.tpot_s * 1e3:.1f} ms, "
            f"{100 * figures.kept:.1f} % in time, {figures.moves} moves"
            for name in self.live
            for side, figures in (("live", self.live[name]), ("simulated", self.simulated[name]))
        ]


def compare(
    code: Sequence[Waiting],
    conv: Sequence[Waiting],
    policies: Sequence[str],
    mocks: bool,
    seconds: float,
    load: float,
    jobs: int,
    say: Say,
) -> Beside:
    """Arguments as those of the command.

    Raises:
        PDConnectorError: an engine does not start, or requests failed.
    """
    if mocks:
        fleet = replace(OPT_13B, promised=False)
        given = plan(fleet, code[:3000], conv[:3000], seconds, load, jobs, say)
        with truth_live.mocks(fleet, say) as live:
            return _both(live, given, policies, say)
    code, conv = truth_engines.scaled(code), truth_engines.scaled(conv)

    def beside(rested: FleetKind) -> Busy:
        given = plan(rested, code[:1000], conv[:1000], seconds, load, jobs, say)
        return busy(rested, given, policies[0])

    with truth_engines.engines([*code, *conv], beside, say) as live:
        given = plan(live.fleet, code[:3000], conv[:3000], seconds, load, jobs, say)
        return _both(live, given, policies, say)


def _both(live: truth_live.Live, given: Plan, policies: Sequence[str], say: Say) -> Beside:
    rates = ", ".join(f"{rate:.2f}" for rate in given.per_s)
    say(f"{len(given.requests):,} requests, {rates} a second in the three phases")
    live_figures, simulated_figures = dict[str, Figures](), dict[str, Figures]()
    for name in policies:
        live_figures[name] = truth_live.measured(live, given, name, say)
        simulated_figures[name] = simulated(live.fleet, given, name)
        for line in Beside({name: live_figures[name]}, {name: simulated_figures[name]}).lines():
            say(line)
    return Beside(live_figures, simulated_figures)
