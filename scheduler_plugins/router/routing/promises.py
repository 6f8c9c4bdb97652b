# SPDX-License-Identifier: Apache-2.0
"""Which class a request belongs to, and what the router promises it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import inf

from scheduler_plugins.qos.classes import default_class
from scheduler_plugins.qos.rules import class_of
from scheduler_plugins.router.engines.engine import BackendEngine
from scheduler_plugins.router.policies.base import Request
from scheduler_plugins.router.settings.config import RouterConfig


def promised(request: Request, config: RouterConfig, headers: Mapping[str, str]) -> Request:
    """The request with its class, the class's SLO, and whether somebody waits for it."""
    lower = {name.lower(): value for name, value in headers.items()}
    name = class_of(config.routes, lower) or default_class(config.classes).name
    qos = next(one for one in config.classes if one.name == name)
    slo = qos.slo
    return request._replace(
        qos=name,
        interactive=qos.interactive,
        ttft_slo_s=inf if slo.ttft_ms is None else slo.ttft_ms / 1e3,
        tpot_slo_s=inf if slo.tpot_ms is None else slo.tpot_ms / 1e3,
    )


def kept_by(
    request: Request, prefill: Sequence[BackendEngine], decode: Sequence[BackendEngine]
) -> Request:
    """The request without promises that nobody can predict: costs of those engines are not known.

    A guess must not turn anybody away.
    """
    ttft_s = request.ttft_slo_s if all(one.costs.known for one in prefill) else inf
    tpot_s = request.tpot_slo_s if all(one.costs.known for one in decode) else inf
    return request._replace(ttft_slo_s=ttft_s, tpot_slo_s=tpot_s)
