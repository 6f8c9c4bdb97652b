# SPDX-License-Identifier: Apache-2.0
"""Which class a request belongs to, and what the router promises it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import inf

from scheduler_plugins.admission.margin import Margin
from scheduler_plugins.qos.classes import default_class
from scheduler_plugins.qos.rules import class_of
from scheduler_plugins.router.engines.engine import BackendEngine
from scheduler_plugins.router.policies.base import Request
from scheduler_plugins.router.settings.config import RouterConfig

MISSES = 0.03
"""Part of the predicted times to the first token that reality may exceed. Prompts are overtaken by shorter ones
in the engines' queues, and no prediction knows which will come."""


class Margins:
    """Each class's margin for predicted times to the first token."""

    def __init__(self) -> None:
        self._by_class: dict[str, Margin] = {}

    def of(self, qos: str) -> float:
        """The factor for predictions, as 1.2; 1 before anything was learnt."""
        return self._by_class[qos].value if qos in self._by_class else 1.0

    def learn(self, request: Request, expected_s: float, real_s: float) -> None:
        """A request of which `expected_s` was predicted got its first token after `real_s`."""
        margin = self._by_class.setdefault(request.qos, Margin(MISSES))
        margin.learn(real_s, expected_s, request.ttft_slo_s)


def promised(request: Request, config: RouterConfig, headers: Mapping[str, str]) -> Request:
    """The request with its class, the class's SLO, and whether somebody waits for it."""
    name = class_of(config.routes, _joined(headers)) if config.routes else ""
    name = name or default_class(config.classes).name
    qos = next(one for one in config.classes if one.name == name)
    return request._replace(
        qos=name,
        interactive=qos.interactive,
        ttft_slo_s=qos.slo.ttft_s,
        tpot_slo_s=qos.slo.tpot_s,
    )


def _joined(headers: Mapping[str, str]) -> dict[str, str]:
    """The headers, names in lower case. One that is given twice counts as both values, which match no rule: who
    sends a second one, before or behind a proxy's own, chooses no class by it."""
    found = dict[str, str]()
    for given, value in headers.items():
        name = given.lower()
        found[name] = f"{found[name]},{value}" if name in found else value
    return found


def kept_by(
    request: Request, prefill: Sequence[BackendEngine], decode: Sequence[BackendEngine]
) -> Request:
    """The request without promises that nobody can predict: costs of those engines are not known.

    A guess must not turn anybody away.
    """
    ttft_s = request.ttft_slo_s if all(one.costs.known for one in prefill) else inf
    tpot_s = request.tpot_slo_s if all(one.costs.known for one in decode) else inf
    return request._replace(ttft_slo_s=ttft_s, tpot_slo_s=tpot_s)
