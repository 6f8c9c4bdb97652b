# SPDX-License-Identifier: Apache-2.0
"""Drafts are verified, and decoded in a row, on SGLang's own pools, against torch's attention."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("sglang.srt")

import torch
from sglang.srt.layers.radix_attention import RadixAttention
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from sglang.srt.runtime_context import get_parallel
from sglang.srt.speculative import draft_utils
from sglang.srt.speculative.eagle_utils import TreeMaskMode
from sglang.srt.speculative.spec_info import SpeculativeAlgorithm
from sglang_door.test_sglang_kernels import (
    CLOSE,
    DIM,
    HEADS,
    KV_HEADS,
    LENGTHS,
    PAGE_SIZES,
    Step,
    keys_and_values,
    latents,
    layer,
)
from torch.nn.functional import scaled_dot_product_attention

from pd_kernels.attention.mla_call import LATENT, ROPE
from pd_kernels.sglang import backend as backends
from pd_kernels.sglang import draft_steps, plugin
from pd_kernels.sglang.backend import MlaBackend, PagedBackend
from pd_kernels.sglang.draft_steps import DraftSteps

DRAFTS = 5
PARENTS = (0, 0, 0, 1, 2)
"""A tree: two branches of the first token, with one more draft each."""
CHAIN = torch.ones(DRAFTS, DRAFTS, dtype=torch.bool).tril()


def tree(parents: tuple[int, ...] = PARENTS) -> torch.Tensor:
    """Whether a draft sees another, `[drafts, drafts]`: itself, and its ancestors."""
    seen = torch.eye(len(parents), dtype=torch.bool)
    for draft, parent in enumerate(parents[1:], 1):
        seen[draft] |= seen[parent]
    return seen


def near(seen: torch.Tensor, length: int, window: int) -> torch.Tensor:
    """Whether a draft sees a token, `[drafts, length]`: what a chain of its branch would see with this window.
    `length` tokens, the drafts included."""
    first = length - len(seen)
    told = torch.zeros(len(seen), length, dtype=torch.bool)
    for draft, row in enumerate(seen):
        branch = [*range(first), *(first + place for place in row.nonzero()[:, 0].tolist())]
        told[draft, branch[-window:]] = True
    return told


def options(**changed: Any) -> SimpleNamespace:
    return SimpleNamespace(
        **{
            "speculative_algorithm": "EAGLE",
            "speculative_attention_mode": "decode",
            "speculative_num_draft_tokens": DRAFTS,
            "speculative_eagle_topk": 1,
            "speculative_adaptive": False,
            "enable_multi_layer_eagle": False,
            **changed,
        }
    )


@pytest.fixture
def speculating(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Says what SGLang's options of speculative decoding are."""

    def change(**changed: Any) -> None:
        monkeypatch.setattr(backends, "get_spec", lambda: options(**changed))

    change()
    return change


def runner(step: Step, pool: Any, *layers: RadixAttention, draft: bool = False) -> Any:
    made = step.runner(pool, *layers, spec_algorithm=SpeculativeAlgorithm.EAGLE)
    made.is_draft_worker = draft
    return made


class Verified(Step):
    """Tokens of a batch whose last DRAFTS are drafts, which SGLang does not count in its lengths."""

    def __init__(self, page_size: int, seen: torch.Tensor = CHAIN) -> None:
        super().__init__(page_size, tuple(length + DRAFTS for length in LENGTHS))
        self.seen = seen
        self.batch.seq_lens = self.batch.seq_lens - DRAFTS
        self.batch.seq_lens_cpu = self.batch.seq_lens_cpu - DRAFTS
        self.batch.out_cache_loc = torch.cat([slots[-DRAFTS:] for slots in self.slots])
        self.batch.forward_mode = ForwardMode.TARGET_VERIFY
        self.batch.spec_info = SimpleNamespace(
            draft_token=torch.zeros(len(LENGTHS) * DRAFTS), custom_mask=None
        )

    def mask(self) -> torch.Tensor:
        """As SGLang fills it: `[requests, drafts, drafts]` in one axis."""
        return self.seen.repeat(len(LENGTHS), 1, 1).flatten()

    def wanted(
        self,
        query: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        window: int = 1_000,
        **how: Any,
    ) -> torch.Tensor:
        """Each request by itself, `[tokens, heads, dim]`."""
        rows = []
        for one, slots in zip(query.unflatten(0, (-1, DRAFTS)), self.slots, strict=True):
            mask = near(self.seen, len(slots), window)
            told = {"attn_mask": mask, "enable_gqa": True, **how}
            k, v = (cache[slots].transpose(0, 1)[None] for cache in (keys, values))
            row = scaled_dot_product_attention(one.transpose(0, 1)[None], k, v, **told)
            rows.append(row[0].transpose(0, 1))
        return torch.cat(rows)


@pytest.mark.parametrize("page_size", PAGE_SIZES)
def test_a_chain_of_drafts_is_verified(speculating: Any, page_size: int) -> None:
    step, ours = Verified(page_size), layer()
    pool = keys_and_values(step)
    backend = PagedBackend(runner(step, pool, ours))
    query = torch.randn(len(LENGTHS) * DRAFTS, HEADS * DIM)
    new = torch.randn(2, len(query), KV_HEADS, DIM)
    backend.init_forward_metadata(step.batch)
    out = backend.forward(query, *new, ours, step.batch)
    keys, values = pool.get_key_buffer(0), pool.get_value_buffer(0)
    assert torch.equal(keys[step.batch.out_cache_loc], new[0])
    wanted = step.wanted(query.view(-1, HEADS, DIM), keys, values)
    torch.testing.assert_close(out, wanted.flatten(1), **CLOSE)


def test_tokens_that_sglang_pads_after_the_step_was_planned_are_passed_over(
    speculating: Any,
) -> None:
    """It pads batches of ranks that compute a step together, and writes these tokens to slot 0."""
    step, ours = Verified(16), layer()
    pool = keys_and_values(step)
    backend = PagedBackend(runner(step, pool, ours))
    query = torch.randn(len(LENGTHS) * DRAFTS + 1, HEADS * DIM)
    new = torch.randn(2, len(query), KV_HEADS, DIM)
    backend.init_forward_metadata(step.batch)
    step.batch.out_cache_loc = torch.nn.functional.pad(step.batch.out_cache_loc, (0, 1))
    out = backend.forward(query, *new, ours, step.batch)
    assert out.shape == query.shape
    keys, values = pool.get_key_buffer(0), pool.get_value_buffer(0)
    wanted = step.wanted(query[:-1].view(-1, HEADS, DIM), keys, values)
    torch.testing.assert_close(out[:-1], wanted.flatten(1), **CLOSE)


@pytest.mark.parametrize("page_size", PAGE_SIZES)
def test_latents_of_a_chain_are_verified(speculating: Any, page_size: int) -> None:
    step, heads = Verified(page_size), 4
    ours = RadixAttention(heads, LATENT + ROPE, 192**-0.5, 1, 0, v_head_dim=LATENT)
    pool = latents(step)
    backend = MlaBackend(runner(step, pool, ours))
    query = torch.randn(len(LENGTHS) * DRAFTS, heads * (LATENT + ROPE))
    new = torch.randn(len(query), 1, LATENT + ROPE)
    backend.init_forward_metadata(step.batch)
    with get_parallel().override(dcp_enabled=False):
        out = backend.forward(query, new, new[..., :LATENT], ours, step.batch)
    cache = pool.get_key_buffer(0)
    shaped = query.view(-1, heads, LATENT + ROPE)
    wanted = step.wanted(shaped, cache, cache[..., :LATENT], scale=192**-0.5)
    torch.testing.assert_close(out, wanted.flatten(1), rtol=1e-4, atol=1e-4)


def test_a_window_of_a_draft_ends_at_the_draft(speculating: Any) -> None:
    step, ours = Verified(16), layer(sliding_window_size=20)
    pool = keys_and_values(step)
    backend = PagedBackend(runner(step, pool, ours))
    query = torch.randn(len(LENGTHS) * DRAFTS, HEADS * DIM)
    backend.init_forward_metadata(step.batch)
    out = backend.forward(query, None, None, ours, step.batch, save_kv_cache=False)
    rows = []
    for one, slots in zip(query.view(-1, DRAFTS, HEADS, DIM), step.slots, strict=True):
        for draft in range(DRAFTS):
            seen = slots[: len(slots) - DRAFTS + draft + 1][-21:]
            k, v = (
                buffer[0][seen].transpose(0, 1)[None] for buffer in (pool.k_buffer, pool.v_buffer)
            )
            told = one[None, draft, :, None]
            rows.append(scaled_dot_product_attention(told, k, v, enable_gqa=True).flatten())
    torch.testing.assert_close(out, torch.stack(rows), **CLOSE)


@pytest.mark.parametrize("graphs", [False, True], ids=["eager", "graphs"])
def test_drafts_of_a_tree_see_their_ancestors(speculating: Any, graphs: bool) -> None:
    """The mask is in the backend's buffer, where SGLang's kernel puts it. With another tree's mask the answer is wrong."""
    speculating(speculative_eagle_topk=2)
    step, ours = Verified(16, tree()), layer()
    pool = keys_and_values(step)
    backend = PagedBackend(runner(step, pool, ours))
    backend.init_cuda_graph_state(len(LENGTHS), len(LENGTHS) * DRAFTS)
    query = torch.randn(len(LENGTHS) * DRAFTS, HEADS * DIM)
    given = query, None, None, ours, step.batch, False
    mask = backend.verify_mask
    assert mask is not None
    assert mask.mode == TreeMaskMode.QLEN_ONLY
    assert mask.fits(len(LENGTHS))
    step.batch.spec_info.custom_mask = mask.buffer
    begin = backend.init_forward_metadata_out_graph if graphs else backend.init_forward_metadata
    wanted = step.wanted(query.view(-1, HEADS, DIM), pool.k_buffer[0], pool.v_buffer[0]).flatten(1)
    mask.buffer[: len(step.mask())] = step.mask()
    begin(step.batch)
    torch.testing.assert_close(backend.forward(*given), wanted, **CLOSE)
    other = tree((0, 0, 1, 0, 1)).repeat(len(LENGTHS), 1, 1).flatten()
    mask.buffer[: len(other)] = other  # the control
    assert not torch.allclose(backend.forward(*given), wanted, **CLOSE)


@pytest.mark.parametrize("graphs", [False, True], ids=["eager", "graphs"])
@pytest.mark.parametrize("window", [2, 3, 20, 64])
def test_a_window_over_a_tree_counts_the_tokens_of_a_drafts_branch(
    speculating: Any, window: int, graphs: bool
) -> None:
    """As SGLang's FA3 backend counts them. Windows are sometimes shorter than a branch."""
    speculating(speculative_eagle_topk=2)
    step, ours = Verified(16, tree()), layer(sliding_window_size=window - 1)
    pool = keys_and_values(step)
    backend = PagedBackend(runner(step, pool, ours))
    backend.init_cuda_graph_state(len(LENGTHS), len(LENGTHS) * DRAFTS)
    query = torch.randn(len(LENGTHS) * DRAFTS, HEADS * DIM)
    given = query, None, None, ours, step.batch, False
    mask = backend.verify_mask
    assert mask is not None
    step.batch.spec_info.custom_mask = mask.buffer
    begin = backend.init_forward_metadata_out_graph if graphs else backend.init_forward_metadata
    caches = pool.k_buffer[0], pool.v_buffer[0]
    wanted = step.wanted(query.view(-1, HEADS, DIM), *caches, window=window).flatten(1)
    mask.buffer[: len(step.mask())] = step.mask()
    begin(step.batch)
    torch.testing.assert_close(backend.forward(*given), wanted, **CLOSE)
    mask.buffer.fill_(True)  # the control: each draft sees all of the window
    begin(step.batch)
    assert not torch.allclose(backend.forward(*given), wanted, **CLOSE)


@pytest.mark.parametrize("graphs", [False, True], ids=["eager", "graphs"])
@pytest.mark.parametrize("page_size", PAGE_SIZES)
def test_latents_of_a_tree_are_verified(speculating: Any, page_size: int, graphs: bool) -> None:
    speculating(speculative_eagle_topk=2)
    step, heads = Verified(page_size, tree()), 4
    ours = RadixAttention(heads, LATENT + ROPE, 192**-0.5, 1, 0, v_head_dim=LATENT)
    pool = latents(step)
    backend = MlaBackend(runner(step, pool, ours))
    backend.init_cuda_graph_state(len(LENGTHS), len(LENGTHS) * DRAFTS)
    query = torch.randn(len(LENGTHS) * DRAFTS, heads * (LATENT + ROPE))
    step.batch.spec_info.custom_mask = step.mask()
    begin = backend.init_forward_metadata_out_graph if graphs else backend.init_forward_metadata
    cache = pool.get_key_buffer(0)
    shaped = query.view(-1, heads, LATENT + ROPE)
    wanted = step.wanted(shaped, cache, cache[..., :LATENT], scale=192**-0.5).flatten(1)
    given = query, None, None, ours, step.batch, False
    begin(step.batch)
    torch.testing.assert_close(backend.forward(*given), wanted, rtol=1e-4, atol=1e-4)
    step.batch.spec_info.custom_mask = CHAIN.repeat(len(LENGTHS), 1, 1).flatten()  # the control
    begin(step.batch)
    assert not torch.allclose(backend.forward(*given), wanted, rtol=1e-4, atol=1e-4)


def test_a_trees_mask_in_another_buffer_is_taken_and_one_of_another_form_is_not(
    speculating: Any,
) -> None:
    """SGLang makes a buffer of its own for a batch that does not fit into the backend's."""
    speculating(speculative_eagle_topk=2)
    step, ours = Verified(16, tree()), layer()
    pool = keys_and_values(step)
    backend = PagedBackend(runner(step, pool, ours))
    query = torch.randn(len(LENGTHS) * DRAFTS, HEADS * DIM)
    step.batch.spec_info.custom_mask = step.mask()
    backend.init_forward_metadata(step.batch)
    wanted = step.wanted(query.view(-1, HEADS, DIM), pool.k_buffer[0], pool.v_buffer[0])
    out = backend.forward(query, None, None, ours, step.batch, False)
    torch.testing.assert_close(out, wanted.flatten(1), **CLOSE)
    assert backend.verify_mask is not None
    backend.verify_mask.buffer.fill_(True)
    backend.update_verify_buffers_to_fill_after_draft(step.batch.spec_info, None)
    out = backend.forward(query, None, None, ours, step.batch, False)
    torch.testing.assert_close(out, wanted.flatten(1), **CLOSE)
    step.batch.spec_info.custom_mask = torch.ones(9_999, dtype=torch.bool)
    with pytest.raises(RuntimeError, match="9999 elements in the mask of 35 drafts"):
        backend.init_forward_metadata(step.batch)
    step.batch.spec_info.draft_token = None  # a dummy, before a graph is captured
    backend.init_forward_metadata(step.batch)


@pytest.mark.parametrize("graphs", [False, True], ids=["eager", "graphs"])
@pytest.mark.parametrize("page_size", PAGE_SIZES)
def test_each_draft_sees_the_drafts_before_it(
    speculating: Any, page_size: int, graphs: bool
) -> None:
    steps = 4
    step, ours = Step(page_size, tuple(length + steps - 1 for length in LENGTHS)), layer()
    pool = keys_and_values(step)
    made = runner(step, pool, ours, draft=True)
    made.use_mla_backend = False
    drafts = DraftSteps(made, steps)
    assert len(drafts.attn_backends) == steps - 1
    step.batch.seq_lens = torch.tensor(LENGTHS)
    step.batch.seq_lens_cpu = torch.tensor(LENGTHS)
    if graphs:
        drafts.init_cuda_graph_state(16, 16)
        addresses = set()
        for _ in range(2):
            drafts.init_forward_metadata_out_graph(step.batch)
            tables = [backend.tables for backend in drafts.attn_backends]
            addresses.add(tuple(each.data_ptr() for table in tables for each in table))
        assert len(addresses) == 1
    else:
        drafts.init_forward_metadata(step.batch)
    for number, backend in enumerate(drafts.attn_backends, 1):
        step.batch.out_cache_loc = torch.stack(
            [slots[length + number - 1] for slots, length in zip(step.slots, LENGTHS, strict=True)]
        )
        query = torch.randn(len(LENGTHS), HEADS * DIM)
        new = torch.randn(2, len(LENGTHS), KV_HEADS, DIM)
        out = backend.forward(query, *new, ours, step.batch)
        rows = []
        for one, slots, length in zip(query.view(-1, HEADS, DIM), step.slots, LENGTHS, strict=True):
            seen = slots[: length + number]
            k, v = (
                buffer[0][seen].transpose(0, 1)[None] for buffer in (pool.k_buffer, pool.v_buffer)
            )
            told = one[None, :, None]
            rows.append(scaled_dot_product_attention(told, k, v, enable_gqa=True).flatten())
        torch.testing.assert_close(out, torch.stack(rows), **CLOSE)


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        ({"speculative_algorithm": "NGRAM"}, "--speculative-algorithm NGRAM: must be one of"),
        ({"speculative_attention_mode": "prefill"}, "add --speculative-attention-mode decode"),
        (
            {"speculative_num_draft_tokens": 9},
            "--speculative-num-draft-tokens 9: must be at most 8",
        ),
        ({"speculative_adaptive": True}, "--speculative-adaptive"),
        ({"enable_multi_layer_eagle": True}, "--enable-multi-layer-eagle"),
    ],
)
def test_speculation_that_is_not_for_us_is_named(
    speculating: Any, changed: dict[str, Any], named: str
) -> None:
    speculating(**changed)
    step, ours = Step(16), layer()
    with pytest.raises(NotImplementedError, match=named):
        PagedBackend(runner(step, keys_and_values(step), ours))


def test_trees_that_are_not_for_us_are_named(speculating: Any) -> None:
    speculating(speculative_eagle_topk=2)
    step = Step(16)
    pool = keys_and_values(step)
    with pytest.raises(NotImplementedError, match="with --speculative-draft-attention-backend"):
        PagedBackend(runner(step, pool, layer(), draft=True))


def test_prompts_and_drafts_that_are_computed_again_are_not_for_us(speculating: Any) -> None:
    step, ours = Verified(16), layer()
    backend = PagedBackend(runner(step, keys_and_values(step), ours))
    for mode in (ForwardMode.EXTEND, ForwardMode.DRAFT_EXTEND_V2):
        step.batch.forward_mode = mode
        with pytest.raises(NotImplementedError, match="prompts are for --attention-backend"):
            backend.forward(torch.zeros(1, HEADS * DIM), None, None, ours, step.batch)


class Factory:
    """As SGLang's `DraftBackendFactory`: says which name it looks up."""

    def __init__(self, named: str | None, steps: int = 3) -> None:
        self.draft_attn_backend, self.speculative_num_steps = named, steps
        self.draft_model_runner = object()

    def made(self) -> str:
        return f"SGLang's, for {self.draft_attn_backend}"


def test_sglang_asks_us_for_the_backends_of_drafts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ours decode drafts if our name is selected; those for prompts compute drafts again."""
    monkeypatch.setattr(draft_steps, "DraftSteps", lambda runner, steps: ("ours", steps))
    monkeypatch.setattr(draft_steps, "get_spec", options)
    decode, extend = plugin._draft_decode, plugin._draft_extend
    for decodes, drafts, again in (
        ("pd_kernels", ("ours", 3), "SGLang's, for triton"),
        ("fa3", "SGLang's, for None", "SGLang's, for None"),
    ):
        monkeypatch.setattr(
            draft_steps, "attention_backends", lambda name=decodes: ("triton", name)
        )
        assert decode(Factory.made, Factory(None)) == drafts
        assert extend(Factory.made, Factory(None)) == again
        assert decode(Factory.made, Factory("fa3")) == "SGLang's, for fa3"
        assert extend(Factory.made, Factory("fa3")) == "SGLang's, for fa3"
    monkeypatch.setattr(draft_steps, "attention_backends", lambda: ("triton", "pd_kernels"))
    assert decode(Factory.made, Factory(None, steps=1)) is None
    factory = Factory(None)
    extend(Factory.made, factory)
    assert factory.draft_attn_backend is None


def test_sglangs_factory_knows_our_name_with_the_hooks_only(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Made(draft_utils.DraftBackendFactory):  # type: ignore[misc, unused-ignore]
        def _create_triton_prefill_backend(self) -> Any:
            return "triton", SimpleNamespace()

    for module in (draft_utils, draft_steps):
        monkeypatch.setattr(module, "attention_backends", lambda: ("triton", "pd_kernels"))
        monkeypatch.setattr(module, "get_spec", options)
    config = SimpleNamespace(hf_config=None, hf_text_config=None)
    factory = Made(SimpleNamespace(draft_attention_backend=None, model_config=config), 1, 3)
    extend, decode = Made.create_draft_extend_backend, Made.create_decode_backend
    for original in (extend, decode):
        with pytest.raises(ValueError, match="backend pd_kernels"):
            original(factory)
    again = plugin._draft_extend(extend, factory)
    assert again.prefill_attention_backend_str == "triton"
    monkeypatch.setattr(draft_steps, "DraftSteps", lambda runner, steps: "ours")
    assert plugin._draft_decode(decode, factory) == "ours"
    where = f"{draft_utils.__name__}.{draft_utils.DraftBackendFactory.__qualname__}"
    assert where == plugin._DRAFTS
