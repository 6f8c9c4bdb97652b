# SPDX-License-Identifier: Apache-2.0
"""The front of closed forms has the best of all mixes, and estimates follow the data sheets."""

from __future__ import annotations

from itertools import product
from pathlib import Path

import networkx
import pytest
from support.plan_cases import CONFIG, TWO_NODES, model, requests

from scheduler_plugins.planner.bound import Bounds, Workload, rates_of
from scheduler_plugins.planner.colocated import uniform
from scheduler_plugins.planner.devices import SHEETS
from scheduler_plugins.planner.errors import PlanError
from scheduler_plugins.planner.estimate import estimated
from scheduler_plugins.planner.front import front
from scheduler_plugins.planner.inventory import Inventory, load, one_device
from scheduler_plugins.planner.mix import Mix, cost_of, fits, mix_of, placed
from scheduler_plugins.planner.search import neighbours
from scheduler_plugins.router.policies.base import Role
from scheduler_plugins.sim.fleet import Fleet
from scheduler_plugins.sim.links import Network

P, D = Role.PREFILL, Role.DECODE
THREE_NODES = """
nodes:
  - {{name: a, device: H100, gpus: 2, nic_gbit_per_s: {nic}}}
  - {{name: b, device: A100, gpus: 2, nic_gbit_per_s: {nic}}}
  - {{name: c, device: A100, gpus: 1, nic_gbit_per_s: {other}}}
"""
LOAD = Workload.of(requests(), 0.05)


def stock(tmp_path: Path, text: str = TWO_NODES) -> Inventory:
    path = tmp_path / "inventory.yaml"
    path.write_text(text)
    return load(path, model(tmp_path))


def every_mix(inventory: Inventory) -> list[Mix]:
    """Every mix that fits, by counting."""
    engines = [(kind, role) for kind in inventory.kinds for role in (Role.PREFILL, Role.DECODE)]
    most = [
        inventory.gpus(kind.rpartition("-tp")[0]) // inventory.kinds[kind].gpus
        for kind, _ in engines
    ]
    found = {
        mix_of(dict(zip(engines, counts, strict=True)))
        for counts in product(*(range(n + 1) for n in most))
    }
    return [mix for mix in found if fits(mix, inventory)]


@pytest.mark.parametrize("budget", ["", "budget: {price_per_h: 4.0}", "budget: {watts: 1200}"])
def test_no_mix_beats_the_front_and_the_front_fits(tmp_path: Path, budget: str) -> None:
    inventory = stock(tmp_path, TWO_NODES + budget)
    bounds, every = Bounds(inventory, LOAD), every_mix(inventory)
    found = front(bounds)
    assert set(found) <= set(every)
    assert budget or len(found) < len(every) / 2
    assert bounds.of(found[0]) == pytest.approx(max(map(bounds.of, every)))
    assert max(cost_of(mix, inventory) for mix in found) <= inventory.most_cost
    if budget:
        assert len(every) < len(every_mix(stock(tmp_path))), "the budget takes some"


def test_a_budget_of_three_engines_buys_three(tmp_path: Path) -> None:
    """2.6 + 2.6 + 2.6 is a little more than 7.8."""
    text = "nodes:\n  - {name: a, device: H100, gpus: 8}\n"
    text += "devices:\n  H100: {price_per_h: 2.6}\nbudget: {price_per_h: 7.8}\n"
    inventory = stock(tmp_path, text)
    assert max(sum(n for *_, n in mix) for mix in front(Bounds(inventory, LOAD))) == 3


@pytest.mark.parametrize(
    ("budget", "found"),
    [
        ("", {(2, 2)}),
        ("budget: {price_per_h: 2.6}", {(1, 0), (0, 2)}),
        ("budget: {price_per_h: 3.8}", {(1, 1), (1, 0), (0, 2)}),
        ("budget: {watts: 1100}", {(1, 1), (1, 0), (0, 2)}),
    ],
)
def test_engines_that_do_both_are_as_many_as_the_budget_allows(
    tmp_path: Path, budget: str, found: set[tuple[int, int]]
) -> None:
    """All or none were tried: with a budget for one H100 no fleet was found."""
    inventory = stock(tmp_path, TWO_NODES + budget)
    mixes = uniform(Bounds(inventory, LOAD))
    assert all(fits(mix, inventory) for mix in mixes)
    numbers = [{kind: n for kind, _, n in mix} for mix in mixes if "tp2" not in str(mix)]
    assert {(each.get("H100-tp1", 0), each.get("A100-tp1", 0)) for each in numbers} == found


def maximum_flow(fleet: Fleet, bounds: Bounds) -> float:
    """Requests a second of a fleet, by networkx."""
    network, graph = fleet.network, networkx.DiGraph()
    assert network is not None
    size = bounds._load.prompt * network.kv_bytes_per_token
    places = {part.place for part in fleet.parts}
    for place in places:
        for role in (P, D):
            mine = [part for part in fleet.parts if part.place == place and part.role is role]
            rates = [rates_of(part.profile, bounds._load) for part in mine]
            rate = sum(
                part.number * (its.prefill if role is P else its.decode)
                for part, its in zip(mine, rates, strict=True)
            )
            link = sum(part.number for part in mine) * network.bytes_per_s
            nic = min(link, place.nic_bytes_per_s) / size
            if role is P:
                graph.add_edge("source", (place, P), capacity=rate)
                graph.add_edge((place, P), (place, "out"), capacity=nic)
            else:
                graph.add_edge((place, D), "sink", capacity=rate)
                graph.add_edge((place, "in"), (place, D), capacity=nic)
        graph.add_edge((place, P), (place, D), capacity=1e9)
    for one, other in product(places, places):
        if one != other:
            graph.add_edge((one, "out"), (other, "in"), capacity=1e9)
    return float(networkx.maximum_flow_value(graph, "source", "sink"))


@pytest.mark.parametrize("gbit_per_s", [0.5, 5, 50])
def test_the_closed_form_is_the_maximum_flow(tmp_path: Path, gbit_per_s: float) -> None:
    inventory = stock(tmp_path, THREE_NODES.format(nic=gbit_per_s, other=gbit_per_s / 2))
    bounds, bound = Bounds(inventory, LOAD), 0
    for mix, together in product(every_mix(inventory), (False, True)):
        fleet = placed(mix, inventory, together=together)
        if fleet is not None:
            flow = bounds.flow(fleet)
            assert flow == pytest.approx(maximum_flow(fleet, bounds)), (mix, together)
            bound += flow < 0.99 * bounds._of_roles(mix)
    assert bound > 10, "links bind in some"


def test_swaps_stay_within_the_inventory(tmp_path: Path) -> None:
    inventory = stock(tmp_path)
    mix = mix_of({("H100-tp1", Role.PREFILL): 2, ("A100-tp1", Role.DECODE): 2})
    near = set(neighbours(mix, inventory))
    assert near <= set(every_mix(inventory))
    assert mix_of({("H100-tp2", Role.PREFILL): 1, ("A100-tp1", Role.DECODE): 2}) in near, "joined"
    flipped = {
        ("H100-tp1", Role.PREFILL): 2,
        ("A100-tp1", Role.DECODE): 1,
        ("A100-tp1", Role.PREFILL): 1,
    }
    assert mix_of(flipped) in near
    exchanged = {("H100-tp1", Role.PREFILL): 1, ("H100-tp1", Role.DECODE): 1, ("A100-tp1", Role.DECODE): 1, ("A100-tp1", Role.PREFILL): 1}  # fmt: skip
    assert mix_of(exchanged) in near
    joined = mix_of({("H100-tp2", Role.PREFILL): 1, ("A100-tp2", Role.DECODE): 1})
    split = mix_of(
        {("H100-tp1", Role.PREFILL): 1, ("H100-tp1", Role.DECODE): 1, ("A100-tp2", Role.DECODE): 1}
    )
    assert split in set(neighbours(joined, inventory))


def test_a_tensor_parallel_engine_stays_in_a_node(tmp_path: Path) -> None:
    text = "nodes: [{name: n, number: 2, device: H100, gpus: 3, nic_gbit_per_s: 100, rack: r}]"
    inventory = stock(tmp_path, text)
    assert set(inventory.kinds) == {"H100-tp1", "H100-tp2"}
    three = mix_of({("H100-tp2", Role.PREFILL): 2, ("H100-tp2", Role.DECODE): 1})
    assert fits(three, inventory), "six GPUs are enough in sum"
    assert placed(three, inventory) is None, "but each node has room for one engine of two"
    pair = mix_of({("H100-tp1", Role.PREFILL): 2, ("H100-tp1", Role.DECODE): 2})
    apart, together = placed(pair, inventory), placed(pair, inventory, together=True)
    assert apart is not None
    assert together is not None
    assert {(one.place.node, one.role) for one in apart.parts} == {
        ("n0", Role.PREFILL),
        ("n1", Role.DECODE),
    }
    assert len({(one.place.node, one.role) for one in together.parts}) == 4
    assert apart.network == Network(
        bytes_per_s=12.5e9, rack_bytes_per_s=12.5e9, other_bytes_per_s=12.5e9, layers=32
    )


def test_an_estimate_is_that_of_the_data_sheet(tmp_path: Path) -> None:
    found = estimated(model(tmp_path), SHEETS["H100"], 1)
    assert found is not None
    assert found.source == "estimated"
    assert found.costs.a == pytest.approx(2 * 7.5e9 / (0.5 * 989e12), rel=0.01)
    assert found.costs.d0 == pytest.approx(16.06e9 / (0.8 * 3350e9) + 2e-3, rel=0.01)
    assert found.kv_tokens == pytest.approx((72e9 - 2e9 - 16.06e9) / 131072, rel=0.01)
    twice = estimated(model(tmp_path), SHEETS["H100"], 2)
    assert twice is not None
    assert found.costs.a / 2 < twice.costs.a < found.costs.a, "slower than twice as fast"
    assert estimated(model(tmp_path, num_hidden_layers=320), SHEETS["H100"], 1) is None


@pytest.mark.parametrize(
    ("changes", "kv", "active"),
    [
        ({"kv_lora_rank": 512, "qk_rope_head_dim": 64}, 32 * 576 * 2, 7.5e9),
        ({"num_experts": 8, "num_experts_per_tok": 2}, 131072, 13.1e9),
        ({"torch_dtype": "float32"}, 131072, 7.5e9),
        ({"head_dim": 256}, 262144, 8.8e9),
    ],
)
def test_kv_and_active_parameters_follow_the_config(
    tmp_path: Path, changes: dict[str, object], kv: float, active: float
) -> None:
    found = model(tmp_path, **changes)
    assert found.kv_bytes_per_token == kv
    assert found.active == pytest.approx(active, rel=0.02)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"hidden_size": "x"}, "hidden_size is 'x'; must be a number"),
        ({"hidden_size": None}, "hidden_size is None"),
        ({"num_attention_heads": 0}, "must be 1 or more"),
        ({"num_key_value_heads": 0}, "must be 1 or more"),
        ({"num_hidden_layers": 0.5}, "must be 1 or more"),
        ({"head_dim": 0}, "has no KV"),
        ({"layer_types": 5}, "layer_types is 5; must be a list"),
        ({"_name_or_path": "a\nb"}, "becomes part of commands"),
        ({"torch_dtype": "int3"}, "dtype 'int3' is not known; known are bfloat16"),
        (
            {"layer_types": ["full_attention", "linear_attn"]},
            "layers of kind linear_attn, which are not estimated",
        ),
    ],
)
def test_a_config_that_cannot_be_estimated_is_refused(
    tmp_path: Path, changes: dict[str, object], said: str
) -> None:
    with pytest.raises(PlanError, match=said):
        model(tmp_path, **changes)


def test_a_config_that_is_none_is_refused(tmp_path: Path) -> None:
    from scheduler_plugins.planner.estimate import read_model

    for text, said in (("[]", "must be an object"), ("{", "is not JSON")):
        (tmp_path / "config.json").write_text(text)
        with pytest.raises(PlanError, match=said):
            read_model(tmp_path)
    with pytest.raises(PlanError, match="cannot be read"):
        read_model(tmp_path / "nowhere.json")


def test_the_text_part_of_a_model_counts(tmp_path: Path) -> None:
    inner = {name: CONFIG[name] for name in ("hidden_size", "num_hidden_layers")}
    assert model(tmp_path, hidden_size=1, text_config=inner).kv_bytes_per_token == 131072
    assert one_device("H100", 1, model(tmp_path)).devices == ["H100"]
