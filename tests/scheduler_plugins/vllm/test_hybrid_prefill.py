# SPDX-License-Identifier: Apache-2.0
"""Hybrid prefilling: which modules go through in chunks, and that nothing else changes."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scheduler_plugins.vllm import hybrid
from scheduler_plugins.vllm.hybrid import HybridError

torch = pytest.importorskip("torch")
nn = torch.nn
HIDDEN, INNER = 16, 40


class Gated(nn.Module):
    """Llama's: gate and up in one projection."""

    def __init__(self) -> None:
        super().__init__()
        self.gate_up_proj = nn.Linear(HIDDEN, 2 * INNER, bias=False)
        self.down_proj = nn.Linear(INNER, HIDDEN, bias=False)
        self.rows: list[int] = []

    def forward(self, x):
        self.rows.append(len(x))
        gate, up = self.gate_up_proj(x).chunk(2, dim=-1)
        return self.down_proj(nn.functional.silu(gate) * up)


class Plain(nn.Module):
    """GPT's: up, activation, down."""

    def __init__(self) -> None:
        super().__init__()
        self.fc_in = nn.Linear(HIDDEN, INNER)
        self.fc_out = nn.Linear(INNER, HIDDEN)
        self.act = nn.GELU()

    def forward(self, x):
        return self.fc_out(self.act(self.fc_in(x)))


class Attention(nn.Module):
    """Two projections whose sizes would pass, and what makes it attention between them."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv_proj = nn.Linear(HIDDEN, 2 * INNER)
        self.o_proj = nn.Linear(INNER, HIDDEN)
        self.attn = nn.Module()
        self.attn.kv_cache = torch.empty(0)

    def forward(self, x):
        return x


class Experts(nn.Module):
    """A router and experts below it: not ours to cut."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(HIDDEN, INNER)
        self.down = nn.Linear(INNER, HIDDEN)
        self.experts = nn.ModuleList([Plain()])

    def forward(self, x):
        return x


class TwoInputs(Plain):
    def forward(self, x, other):
        return super().forward(x) + other


def gated() -> Gated:
    torch.manual_seed(0)
    return Gated().requires_grad_(False)


def test_mlps_are_known_by_their_structure() -> None:
    model = nn.ModuleDict({"a": Gated(), "b": Plain(), "c": Attention(), "d": TwoInputs()})
    assert {type(module) for module in hybrid.mlps(model)} == {Gated, Plain}


def test_what_has_experts_inside_is_not_cut_but_each_expert_may_be() -> None:
    assert [type(module) for module in hybrid.mlps(Experts())] == [Plain]


@settings(max_examples=40)
@given(tokens=st.integers(0, 70), chunk=st.integers(1, 80))
def test_the_output_is_the_same_and_no_pass_is_longer_than_a_chunk(tokens: int, chunk: int) -> None:
    whole, cut = gated(), gated()
    assert hybrid.install(cut, chunk) == 1
    x = torch.randn(tokens, HIDDEN)
    torch.testing.assert_close(cut(x), whole(x), rtol=1e-5, atol=1e-6)
    assert sum(cut.rows) == tokens
    assert max(cut.rows) <= chunk


def test_without_the_plug_in_the_mlp_sees_all_tokens_at_once() -> None:
    module = gated()
    module(torch.randn(70, HIDDEN))
    assert module.rows == [70]


def test_the_input_is_left_alone() -> None:
    module = gated()
    hybrid.install(module, 8)
    x = torch.randn(70, HIDDEN)
    before = x.clone()
    module(x)
    assert torch.equal(x, before)


def test_an_earlier_output_is_left_alone_too() -> None:
    module = gated()
    hybrid.install(module, 8)
    first = module(torch.randn(70, HIDDEN))
    before = first.clone()
    module(torch.randn(70, HIDDEN))
    assert torch.equal(first, before)


def test_installing_twice_wraps_once() -> None:
    module = gated()
    hybrid.install(module, 8)
    hybrid.install(module, 8)
    module(torch.randn(16, HIDDEN))
    assert module.rows == [8, 8]


def test_a_model_without_mlps_is_refused() -> None:
    with pytest.raises(HybridError, match="no MLP that could be recognised"):
        hybrid.install(nn.Sequential(Attention()), 8)


@pytest.mark.parametrize("text", ["0", "-4", "2k", "1.5"])
def test_a_chunk_that_is_no_number_of_tokens_is_refused(text: str) -> None:
    with pytest.raises(HybridError, match="must be a number of tokens"):
        hybrid.chunk_from(text)


@pytest.mark.parametrize(("mode", "graphs"), [(3, 0), (0, 2), (1, None)])
def test_a_compiled_or_captured_model_is_refused_with_the_way_out(mode: int, graphs: int) -> None:
    config = SimpleNamespace(mode=mode, cudagraph_mode=graphs)
    with pytest.raises(HybridError, match="--enforce-eager"):
        hybrid.check_eager(config)


@pytest.mark.parametrize("graphs", [None, 0, SimpleNamespace(value=0)])
def test_an_eager_model_is_not(graphs: object) -> None:
    hybrid.check_eager(SimpleNamespace(mode=0, cudagraph_mode=graphs))


def test_without_the_variable_nothing_happens(monkeypatch) -> None:
    monkeypatch.delenv(hybrid.VARIABLE, raising=False)
    monkeypatch.setitem(__import__("sys").modules, "vllm", None)  # importing it would fail
    hybrid.register()
