# SPDX-License-Identifier: Apache-2.0
"""An engine whose draft model, here the model itself, drafts trees: SGLang's own workers, scheduler and sampling, drafts verified
through our backend. Every answer is that of the engine without drafts.

SGLang has kernels for a CPU for the book-keeping of drafts, in a package that cannot be installed here. A plug-in has them in
plain torch, and an attention for drafts, which only decides how many drafts are accepted.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from sglang_engines.sglang_harness import EnginePool, SglangEngine, ask, assert_same, body, text
from sglang_engines.sglang_recipes import Recipe, sglang_plugin

from pd_connector.tools.demo import MODEL_DIR
from pd_connector.tools.launch import wait_all

STEPS, BRANCHES, DRAFTS = 2, 2, 5
BLIND = "PD_TEST_BLIND_TREE"
"""Names a file. While it is there, each draft sees all drafts before it, those of other branches, too."""

PLUGIN = f"""
import os
from types import SimpleNamespace

import torch

def register():
    import sgl_kernel
    own = (
        build_tree_kernel_efficient_cpu, verify_tree_greedy_cpu, fill_bonus_tokens_cpu, fill_accept_out_cache_loc_cpu,
        assign_extend_cache_locs_cpu, assign_draft_cache_locs_contiguous_cpu, copy_all_layer_kv_cache_cpu,
        assign_req_to_token_pool_cpu,
    )
    for function in own:
        setattr(sgl_kernel, function.__name__, function)
    from sglang.kernels.ops.kvcache import cache_move
    from sglang.kernels.ops.speculative import cache_locs, eagle, spec_tree
    from sglang.srt.mem_cache import allocation
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    for module in (allocation, cache_locs, cache_move, eagle, spec_tree):  # they may have been imported before
        for function in own:
            for name in (function.__name__, "sgl_" + function.__name__):
                if hasattr(module, name):
                    setattr(module, name, function)

    drafts = "sglang.srt.speculative.draft_utils.DraftBackendFactory"
    HookRegistry.register(f"{{drafts}}.create_decode_backend", decode_backend, HookType.AROUND)
    HookRegistry.register(f"{{drafts}}.create_draft_extend_backend", extend_backend, HookType.AROUND)

def extend_backend(original, factory):
    from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend

    return TorchNativeAttnBackend(factory.draft_model_runner)

def decode_backend(original, factory):
    steps = [Drafting(factory.draft_model_runner) for _ in range(factory.speculative_num_steps - 1)]
    return SimpleNamespace(attn_backends=steps, init_forward_metadata=lambda batch: None, needs_cpu_seq_lens=True)

class Drafting:
    "Each draft sees the tokens before the drafts."

    needs_cpu_seq_lens = True

    def __init__(self, runner):
        self.pool, self.tokens = runner.token_to_kv_pool, runner.req_to_token_pool.req_to_token

    def forward(self, q, k, v, layer, forward_batch, save_kv_cache=True, **others):
        heads, count = layer.tp_q_head_num, len(forward_batch.seq_lens)
        rows = q.view(count, -1, heads, layer.qk_head_dim).transpose(1, 2)
        found = []
        for row, request, tokens in zip(rows, forward_batch.req_pool_indices, forward_batch.seq_lens):
            slots = self.tokens[request, :tokens]
            keys, values = (
                each(layer.layer_id)[slots].transpose(0, 1)[None]
                for each in (self.pool.get_key_buffer, self.pool.get_value_buffer)
            )
            attend = torch.nn.functional.scaled_dot_product_attention
            found.append(attend(row[None], keys, values, scale=layer.scaling, enable_gqa=True)[0].transpose(0, 1))
        return torch.cat(found).flatten(1)

def parents(chosen, parent_list, topk):
    "The place of each draft's parent; -1 for the root, and for a draft whose parent was not chosen."
    found = [-1]
    for place in chosen:
        parent = int(parent_list[place // topk]) if place >= topk else None
        found.append(0 if parent is None else 1 + chosen.index(parent) if parent in chosen else -1)
    return found

def build_tree_kernel_efficient_cpu(
    parent_list, selected, lengths, mask, positions, index, next_token, next_sibling, topk, depth, drafts, mode
):
    assert int(mode) == 1, "the mask between drafts alone"
    for row, length in enumerate(lengths.tolist()):
        above = parents(selected[row].tolist(), parent_list[row], topk)
        seen = torch.zeros(drafts, drafts, dtype=torch.bool)
        for draft, parent in enumerate(above):
            seen[draft, 0] = seen[draft, draft] = True
            if parent >= 0:
                seen[draft] |= seen[parent]
            positions[row * drafts + draft] = length + int(seen[draft].sum()) - 1
            index[row, draft] = row * drafts + draft
        for draft in [each for each in range(drafts - 1, 0, -1) if above[each] >= 0]:
            if int(next_token[row, above[draft]]) != -1:
                next_sibling[row, draft] = next_token[row, above[draft]]
            next_token[row, above[draft]] = draft
        if os.path.exists(os.environ[{BLIND!r}]):
            seen = torch.ones(drafts, drafts, dtype=torch.bool).tril()
        mask[row * drafts**2 : (row + 1) * drafts**2] = seen.flatten()

def verify_tree_greedy_cpu(
    predicts, accept_index, accept_token_num, candidates, retrive_index, retrive_next_token, retrive_next_sibling, target_predict
):
    flat = target_predict.flatten()
    for row in range(len(candidates)):
        draft, last, accepted = 0, int(retrive_index[row, 0]), 0
        accept_index[row, 0] = last
        while accepted + 1 < accept_index.shape[1]:
            wanted, draft = int(flat[last]), int(retrive_next_token[row, draft])
            while draft != -1 and int(candidates[row, draft]) != wanted:
                draft = int(retrive_next_sibling[row, draft])
            if draft == -1:
                break
            predicts[last] = wanted
            accepted, last = accepted + 1, int(retrive_index[row, draft])
            accept_index[row, accepted] = last
        accept_token_num[row] = accepted
        predicts[last] = flat[last]

def fill_bonus_tokens_cpu(accept_tokens, accept_lens, bonus, stride):
    rows = torch.arange(len(accept_lens))
    bonus.copy_(accept_tokens.view(-1)[rows * stride + accept_lens - 1])

def fill_accept_out_cache_loc_cpu(accept_index, out_cache_loc, accepted):
    index = accept_index.flatten()
    index = index[index >= 0].long()
    accepted[: len(index)] = out_cache_loc[index]

def copy_all_layer_kv_cache_cpu(pointers, strides, to, of):
    assert torch.equal(to, of), "SGLang copies by torch here, and tries this one only when it starts"

def assign_extend_cache_locs_cpu(requests, table, start, end, out, width):
    parts = [table[r, a:b] for r, a, b in zip(requests.tolist(), start.tolist(), end.tolist())]
    slots = torch.cat(parts)
    out[: len(slots)] = slots

def assign_req_to_token_pool_cpu(requests, table, start, end, slots, width):
    first = 0
    for request, a, b in zip(requests.tolist(), start.tolist(), end.tolist()):
        table[request, a:b] = slots[first : first + b - a]
        first += b - a

def assign_draft_cache_locs_contiguous_cpu(requests, table, lengths, out, width, topk, steps):
    count = topk * steps
    for row, (request, length) in enumerate(zip(requests.tolist(), lengths.tolist())):
        out[row * count : (row + 1) * count] = table[request, length : length + count]
"""


def recipe(folder: Path) -> Recipe:
    path = sglang_plugin(folder / "site", "drafts_on_a_cpu", PLUGIN)
    return Recipe(
        None,
        1,
        args=(
            *("--decode-attention-backend", "pd_kernels"),
            *("--speculative-algorithm", "STANDALONE"),
            *("--speculative-draft-model-path", str(MODEL_DIR)),
            *("--speculative-num-steps", str(STEPS)),
            *("--speculative-eagle-topk", str(BRANCHES)),
            *("--speculative-num-draft-tokens", str(DRAFTS)),
            *("--speculative-attention-mode", "decode"),
            *("--speculative-draft-attention-backend", "torch_native"),
        ),
        env=(
            ("PYTHONPATH", path),
            ("SGLANG_NATIVE_MOVE_KV_CACHE", "1"),
            (BLIND, str(folder / "blind")),
        ),
        forked=False,
    )


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SglangEngine]:
    folder = tmp_path_factory.mktemp("trees")
    with recipe(folder).engine("trees", folder / "engine.log") as started:
        wait_all([started])
        yield started


def test_trees_of_drafts_give_the_answers_of_an_engine_without(
    engines: EnginePool, engine: SglangEngine
) -> None:
    prompts = [text(3 + 37 * n, seed=n) for n in range(6)]
    wanted = engines.reference(prompts)
    with ThreadPoolExecutor(len(prompts)) as pool:
        found = list(pool.map(lambda prompt: ask(engine, prompt), prompts))
    for one, answer in zip(found, wanted, strict=True):
        assert_same(one, answer)
    meta = engine.client.post("/generate", body(prompts[2], 32))["meta_info"]
    assert meta["completion_tokens"] / meta["spec_verify_ct"] > 1.5, "no draft was accepted"
    assert "decode_backend=pd_kernels" in engine.log_path.read_text()


def test_drafts_that_see_other_branches_give_other_answers(
    engines: EnginePool, engine: SglangEngine
) -> None:
    """The control: the mask of a tree is needed."""
    prompts = [text(41 + 29 * n, seed=60 + n) for n in range(3)]
    wanted = engines.reference(prompts)
    blind = Path(engine.env[BLIND])
    blind.touch()
    try:
        found = [ask(engine, prompt) for prompt in prompts]
    finally:
        blind.unlink()
    assert any(
        one.tokens != answer.tokens
        or max(abs(a - b) for a, b in zip(one.logprobs, answer.logprobs, strict=True)) > 1e-2
        for one, answer in zip(found, wanted, strict=True)
    )
