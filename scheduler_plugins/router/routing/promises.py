# SPDX-License-Identifier: Apache-2.0
"""The class of a request, and the router's promises to it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import inf

from scheduler_plugins.admission.margin import Margin
from scheduler_plugins.qos.classes import default_class
from scheduler_plugins.qos.rules import rule_of
from scheduler_plugins.router.engines.engine import BackendEngine
from scheduler_plugins.router.policies.base import Request
from scheduler_plugins.router.settings.config import RouterConfig

MISSES = 0.03
"""Share of requests whose real time to the first token may exceed the prediction. Shorter prompts that come later
overtake in the engines' queues, and no prediction knows them."""


class Margins:
    """The margin of each class for predicted times to the first token."""

    def __init__(self) -> None:
        self._by_class: dict[str, Margin] = {}

    def of(self, qos: str) -> float:
        """The factor for predictions, such as 1.2; 1 before anything was learnt."""
        return self._by_class[qos].value if qos in self._by_class else 1.0

    def learn(self, request: Request, expected_s: float, real_s: float) -> None:
        """Learn from a request: `expected_s` was predicted, and its first token came after `real_s`."""
        margin = self._by_class.setdefault(request.qos, Margin(MISSES))
        margin.learn(real_s, expected_s, request.ttft_slo_s)


def promised(request: Request, config: RouterConfig, headers: Mapping[str, str]) -> Request:
    """The request with its class, the SLO of the class, and whether the class is interactive."""
    rule = rule_of(config.routes, _joined(headers)) if config.routes else None
    name = rule.qos if rule is not None else default_class(config.classes).name
    qos = next(qos_class for qos_class in config.classes if qos_class.name == name)
    return request._replace(
        qos=name,
        interactive=qos.interactive,
        ttft_slo_s=qos.slo.ttft_s,
        tpot_slo_s=qos.slo.tpot_s,
        group=getattr(rule, "group", "") or config.default_group,
    )


def _joined(headers: Mapping[str, str]) -> dict[str, str]:
    """The headers, with names in lower case. If a header comes twice, its values are joined and match no rule: a
    client cannot choose a class by adding a second header to a proxy's."""
    joined = dict[str, str]()
    for given, value in headers.items():
        name = given.lower()
        joined[name] = f"{joined[name]},{value}" if name in joined else value
    return joined


def kept_by(
    request: Request, prefill: Sequence[BackendEngine], decode: Sequence[BackendEngine]
) -> Request:
    """The request without promises that cannot be predicted, because the costs of these engines are unknown.

    A guess must not reject a request.
    """
    ttft_s = request.ttft_slo_s if all(engine.costs.known for engine in prefill) else inf
    tpot_s = request.tpot_slo_s if all(engine.costs.known for engine in decode) else inf
    return request._replace(ttft_slo_s=ttft_s, tpot_slo_s=tpot_s)
