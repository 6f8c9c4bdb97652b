# SPDX-License-Identifier: Apache-2.0
"""What the live page calls wrong. Each case stands beside one in which nothing is wrong."""

from dataclasses import replace
from pathlib import Path

import pytest

from scheduler_plugins.router.endpoints.diagnostics import troubles
from scheduler_plugins.router.endpoints.trends import Recent
from scheduler_plugins.router.engines.engine import BackendEngine
from scheduler_plugins.router.engines.kinds import Kind
from scheduler_plugins.router.engines.role_state import Decision
from scheduler_plugins.router.engines.traffic import Traffic
from scheduler_plugins.router.metrics import Metrics
from scheduler_plugins.router.policies.base import Role

ADDRESS = object()
FINE = Recent(arrivals=100, outcomes={"handed_over": 99.0, "recomputed": 1.0})


def engine(name: str, role: Role, **state: object) -> BackendEngine:
    made = BackendEngine(f"http://{name}:8000", role, Metrics(), kind=Kind.VLLM, up=True)
    made.addresses = (ADDRESS,) if made.hands_over else ()  # type: ignore[assignment]
    return replace(made, **state)  # type: ignore[arg-type]


def found(
    *engines: BackendEngine,
    recent: Recent = FINE,
    moves: tuple[Decision, ...] = (),
    late: float = 0.05,
) -> list[str]:
    fleet = engines or (engine("p", Role.PREFILL), engine("d", Role.DECODE))
    return [one.alert for one in troubles(fleet, moves, recent, late, 100.0)]


P, D = engine("p", Role.PREFILL), engine("d", Role.DECODE)


def with_(one: BackendEngine, **traffic: object) -> BackendEngine:
    return replace(one, traffic=Traffic(**traffic))  # type: ignore[arg-type]


def test_nothing_is_wrong_with_a_fleet_that_works() -> None:
    assert found() == []
    assert found(engine("a", Role.BOTH), engine("b", Role.BOTH)) == []


def test_a_fleet_without_a_side() -> None:
    down = replace(D, up=False, down_since=40.0, reason="refused")
    assert found(P, down) == ["PDNoDecodeEngine", "PDEngineAway"]
    assert found(P) == ["PDNoDecodeEngine"]
    assert found(D) == ["PDNothingHandedOver"]
    assert found() == []


def test_prompts_that_only_engines_without_a_gpu_compute_in_time() -> None:
    assert found(late=0.06) == ["PDGPUsMissing"]
    assert found(late=0.05) == []


def test_an_engine_on_another_side_than_the_settings_say() -> None:
    astray = engine("q", Role.PREFILL)
    astray.role_state.problem = "q: is a prefill engine, but the settings say decode"
    assert found(P, astray, D) == ["PDRoleMoveFails"]


def test_prefill_engines_without_an_address() -> None:
    bare = replace(P, addresses=(), reason="start it with PDConnector")
    assert found(P, bare, D) == ["PDPrefillWithoutAddress"]
    assert found(bare, D) == ["PDNothingHandedOver", "PDPrefillWithoutAddress"]


def test_engines_with_one_trouble_are_named_together() -> None:
    down = [replace(engine(f"d{n}", Role.DECODE), up=False, reason="refused") for n in range(9)]
    (one,) = troubles([P, D, *down], (), FINE, 0.0, 100.0)
    assert len(one.where) == 9
    assert one.where[0] == "http://d0:8000: refused"


@pytest.mark.parametrize(
    ("traffic", "alert"),
    [
        ({"cache_used": 0.96}, ["PDCacheFull"]),
        ({"cache_used": 0.9}, []),
        ({"leased_pages": 51.0, "pages": 100}, ["PDLeasesPileUp"]),
        ({"leased_pages": 49.0, "pages": 100}, []),
        ({"leased_pages": 51.0}, []),  # nobody knows how many pages there are
        ({"unsaved": "full"}, ["PDPoolFull"]),
        ({"unsaved": "unwell"}, ["PDPoolSilent"]),
        ({"pool_stalls": 1.0}, ["PDPoolSilent"]),
        ({"distrusted": 1.0}, ["PDDistrustedProducer"]),
    ],
)
def test_what_an_engine_tells(traffic: dict[str, object], alert: list[str]) -> None:
    assert found(P, with_(D, **traffic)) == alert


def test_an_outage_names_what_to_do() -> None:
    told = replace(D, warning="no KV has moved there (no_params 9). What to do: set the proxy")
    (one,) = troubles([P, told], (), FINE, 0.0, 100.0)
    assert (one.alert, one.level, one.do) == ("PDNoTransfers", "critical", "set the proxy")
    assert found(P, replace(told, traffic=Traffic(failing=1.0))) == ["PDFailingRanks"]


def test_shares_of_few_requests_say_nothing() -> None:
    many = Recent(outcomes={"handed_over": 80.0, "recomputed": 20.0, "aborted": 900.0})
    assert found(recent=many) == ["PDRecomputed"]
    assert found(recent=Recent(outcomes={"recomputed": 3.0})) == []
    assert found(recent=Recent(arrivals=100, refusals=6)) == ["PDRequestsRefused"]
    assert found(recent=Recent(arrivals=10, refusals=6)) == []


def test_roles_that_flap_and_moves_that_fail() -> None:
    move = Decision(0.0, P.url, "prefill", "decode", "why", "done")
    assert found(moves=(move,) * 4) == ["PDRolesFlap"]
    assert found(moves=(move,) * 3) == []
    assert found(moves=(move._replace(at_s=-3500.0),) * 4) == [], "it was an hour ago"
    assert found(moves=(move._replace(outcome="dry run"),) * 9) == []
    assert found(moves=(move._replace(outcome="given up"),)) == []
    assert found(moves=(move._replace(outcome="it did not drain"),)) == ["PDRoleMoveFails"]


def test_every_trouble_is_an_alert_that_is_explained() -> None:
    folder = Path(__file__).parents[4]
    source = (folder / "scheduler_plugins/router/endpoints/diagnostics.py").read_text()
    names = {name for name in source.split('"') if name.startswith("PD")}
    assert len(names) > 10
    headings = (folder / "docs/alerts.md").read_text().splitlines()
    assert {f"## {name}" for name in names} <= set(headings)
