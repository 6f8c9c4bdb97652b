# SPDX-License-Identifier: Apache-2.0
"""SlowProbes into a worker's KV cache, and damages it: loaded by `--worker-extension-cls`.

Nothing here is shared with the connector: what a page looks like is written down a second time.
"""

import hashlib
import re

from pd_connector.vllm.extension import WorkerExtension


class Probe:
    """Methods that vLLM's development route `/collective_rpc` can call on a worker."""

    def schedules_ahead(self) -> bool:
        """Whether the next step is scheduled while this one is computed."""
        return bool(self.vllm_config.scheduler_config.async_scheduling)

    def waits_for_its_pool(self) -> None:
        """From now on the scheduler, which is in this process, waits for its pool, and loads all that the pool has. Otherwise
        a busy machine decides what is loaded."""
        from pd_connector.agent import pool_loads, pool_saves
        from pd_connector.pool.load_breakeven import LoadBreakeven
        from pd_connector.vllm.pool import lookups

        lookups.LOOK_S = lookups._SLOW_S = 60.0
        pool_loads._STALL_S = pool_saves._WAITS_S = 60.0
        LoadBreakeven.chunks = lambda self, hit, *_: len(hit)

    def sleep_as_on_a_gpu(self) -> None:
        """From now on, `sleep` and `wake_up`, which do nothing on a CPU, do what vLLM 0.33's worker for GPUs does: the
        pages lose their content, and the connector is told before and after."""
        from vllm.distributed.kv_transfer import get_kv_transfer_group

        if "sleep" in vars(self):
            return
        sleep, wake_up = self.sleep, self.wake_up

        def sleep_and_forget(level: int = 1) -> None:
            sleep(level)
            get_kv_transfer_group().unregister_kv_caches()
            for layer in self._layers():
                layer.fill_(7)

        def wake_up_and_tell(tags: list[str] | None = None) -> None:
            if tags is None or "kv_cache" in tags:
                get_kv_transfer_group().restore_kv_caches()
            wake_up(tags)

        self.sleep, self.wake_up = sleep_and_forget, wake_up_and_tell

    def kv_digests(self, pages: list[int]) -> list[str]:
        """A digest of each page over all layers."""
        return [
            hashlib.blake2b(
                b"".join(
                    layer[page].flatten().view(dtype=_torch().uint8).numpy().tobytes()
                    for layer in self._layers()
                ),
                digest_size=16,
            ).hexdigest()
            for page in pages
        ]

    def kv_pages_with(self, digests: list[str]) -> list[bool]:
        """Whether each digest is that of any page of the cache."""
        wanted = set(digests)
        used = [p for p in range(self._layers()[0].shape[0]) if self._layers()[0][p].any()]
        found = wanted & set(self.kv_digests(used))
        return [digest in found for digest in digests]

    def damage_page(self, page: int) -> None:
        """Negate every element of a page in every layer."""
        # Layers with page tables of their own may share one cache.
        for layer in {layer.data_ptr(): layer for layer in self._layers()}.values():
            if layer.dtype is _torch().uint8:  # FP8 codes
                layer[page] ^= 0x80
            else:
                layer[page].neg_()

    def prepare_stage(self) -> None:
        """Make room for what the pipeline stage before sends, as vLLM does while it warms up. Its CPU build with
        --enforce-eager does not warm up, and fails with the first step. (With compilation a start takes minutes.)"""
        runner = self.model_runner
        if runner.intermediate_tensors is None and self.parallel_config.rank:
            runner.intermediate_tensors = runner.model.make_empty_intermediate_tensors(
                batch_size=runner.max_num_tokens, dtype=runner.model_config.dtype, device="cpu"
            )

    def zero_states(self, page: int | None = None) -> None:
        """Zero the recurrent states in a page, or in all pages, as if they had not been handed over."""
        for module in self.vllm_config.compilation_config.static_forward_context.values():
            for state in module.kv_cache if hasattr(module, "mamba_type") else ():
                state[slice(None) if page is None else page].zero_()

    def harm_states(self, harm: str, page: int, other: int) -> None:
        """Harm the states in a page.

        Args:
            harm: what is done.
            other: a page with the states of another request, or at another position.
        """
        for module in self.vllm_config.compilation_config.static_forward_context.values():
            if not hasattr(module, "mamba_type"):
                continue
            for state in module.kv_cache:
                if harm == "zeroed":
                    state[page].zero_()
                elif harm == "a part missing":  # as if it had come from one of two ranks only
                    state[page, ..., state.shape[-1] // 2 :].zero_()
                elif harm != "B and C swapped":
                    state[page].copy_(state[other])
            if (
                harm == "B and C swapped"
            ):  # the last channels of a Mamba2's convolution `[row][channel]`
                convolution, ssm = module.kv_cache
                both = convolution[page][:, ssm.shape[1] * ssm.shape[2] :]
                both.copy_(both.roll(both.shape[1] // 2, 1))

    def negate_kv(self, page: int) -> None:
        """Negate K and V of a page in every layer with attention."""
        for module in self.vllm_config.compilation_config.static_forward_context.values():
            if hasattr(module, "kv_cache_dtype") and not hasattr(module, "mamba_type"):
                self._cache_of(module)[page].neg_()

    def damage_token(self, page: int, token: int) -> None:
        """Scale V of one token of a page by 0.62, in the first layer here: too little to be seen in the norm of
        its page."""
        layer = self._layers()[0]
        tokens, dims = layer.shape[2], layer.shape[3] // 2
        context = self.vllm_config.compilation_config.static_forward_context
        assert not any(getattr(m, "isa", None) == "amx" for m in context.values()), "other places"
        for head in range(layer.shape[1]):
            v = layer[page, head].flatten()[tokens * dims :].view(tokens, dims)
            v[token] *= 0.62

    def flip_byte(self, page: int) -> None:
        """Flip all bits of one byte of a page: the highest of the first element of V, of the last
        token of the first head in the first layer here."""
        layer = self._layers()[0]
        found = layer[page, 0].view(_torch().uint8).flatten()
        tokens, dims, size = layer.shape[2], layer.shape[3] // 2, layer.element_size()
        context = self.vllm_config.compilation_config.static_forward_context
        tiled = any(getattr(module, "isa", None) == "amx" for module in context.values())
        last_token = (tokens // 2 - 1) * 32 + 1 if tiled else (tokens - 1) * dims
        found[(tokens * dims + last_token) * size + size - 1] ^= 0xFF

    def running_tables(self) -> list[list[list[int]]]:
        """The page tables of each request that runs."""
        return [tables for tables, _ in self._running()]

    def kv_save_running(self, tokens: int, path: str) -> list[int]:
        """`kv_save` of the one request that runs, in the same moment: its pages may be others' after the next
        steps. Returns how many of its tokens were computed before the last step; nothing if none runs."""
        running = self._running()
        if not running:
            return []
        ((tables, computed),) = running  # no other requests run
        self.kv_save(tables, tokens, path)
        return [computed]

    def kv_save(self, tables: list[list[int]], tokens: int, path: str) -> None:
        """Write K and V of a request's first tokens, `[token][head][dim]` each, by layer.

        The file is `path` with this worker's rank: `(tensor-parallel rank, {layer: {"key": ...,
        "value": ..., "kept": [token]}})`. Tokens that the cache has dropped are zeros there, and
        false in `kept`. MLA latents are a key of one head without a value.
        """
        torch = _torch()
        layers = {}
        context = self.vllm_config.compilation_config.static_forward_context
        for table, group in zip(
            tables, self.model_runner.kv_cache_config.kv_cache_groups, strict=True
        ):
            for name in group.layer_names:
                if name not in context:  # another pipeline stage's
                    continue
                module = context[name]
                number = int(re.search(r"\.(\d+)\.", name)[1])
                layers[number] = _canonical(module, self._cache_of(module), table, tokens)
        rank = self.parallel_config.rank
        torch.save((rank % self.parallel_config.tensor_parallel_size, layers), f"{path}.{rank}")

    def _running(self) -> list[tuple[list[list[int]], int]]:
        """Page tables of each request that runs, and how many of its tokens were computed before the last step."""
        runner = self.model_runner
        if hasattr(runner, "requests"):  # V1
            return [
                ([list(table) for table in request.block_ids], request.num_computed_tokens)
                for request in runner.requests.values()
            ]
        counts = runner.block_tables.num_blocks.np
        return [
            (
                [
                    table.gpu[row, : counts[group, row]].tolist()
                    for group, table in enumerate(runner.block_tables.block_tables)
                ],
                int(runner.req_states.num_computed_tokens_np[row]),
            )
            for row in runner.req_states.req_id_to_index.values()
        ]

    def _cache_of(self, module):
        cache = module.kv_cache
        return cache[0] if isinstance(cache, list) else cache

    def _layers(self):
        return self.model_runner.kv_caches


def _canonical(module, cache, table, tokens):
    """K and V of one layer, read from pages `[page, head, token, K and V]`.

    vLLM's CPU attention packs each page of a head as K, `[dim][token]`, and then V,
    `[token][dim]`; with AMX as K, `[token / 16][dim / 2][16 tokens][2 dims]`, and V,
    `[dim / 16][token / 2][16 dims][2 tokens]`. Its MLA keeps `[token][dim]`.
    """
    torch = _torch()
    if cache.dtype is torch.uint8 and "fp8" in str(module.kv_cache_dtype):
        cache = cache.view(torch.float8_e4m3fn)
    if cache.dim() == 3:  # [page, token, dim]
        cache = cache.unsqueeze(1)
    page_size = cache.shape[2]
    kept = torch.tensor([page != 0 for page in table]).repeat_interleave(page_size)[:tokens]
    found = cache[torch.tensor(table)]
    pages, heads, _, width = found.shape
    if module.__class__.__name__.startswith("MLA"):
        halves = {"key": found.transpose(1, 2)}
    else:
        dim = width // 2
        flat = found.reshape(pages, heads, page_size * width)
        key, value = flat[..., : page_size * dim], flat[..., page_size * dim :]
        if module.isa == "amx":
            key = key.reshape(pages, heads, page_size // 16, dim // 2, 16, 2)
            key = key.permute(0, 1, 3, 5, 2, 4)  # [dim][token]
            value = value.reshape(pages, heads, dim // 16, page_size // 2, 16, 2)
            value = value.permute(0, 1, 3, 5, 2, 4)  # [token][dim]
        halves = {
            "key": key.reshape(pages, heads, dim, page_size).permute(0, 3, 1, 2),
            "value": value.reshape(pages, heads, page_size, dim).permute(0, 2, 1, 3),
        }
    out = {
        name: half.reshape(pages * page_size, heads, -1)[:tokens].contiguous()
        for name, half in halves.items()
    }
    for half in out.values():
        half.view(torch.uint8)[~kept] = 0
    return {**out, "kept": kept}


class Saboteur(Probe):
    """A worker that can be made to compute other KV than its checkpoint says. Its weights, as they were
    compared in the handshake, stay what they are."""

    def sabotage(self, kind: str) -> None:
        """Compute wrongly from now on; `none` computes rightly again."""
        for undo in self.__dict__.setdefault("_undo", []):
            undo()
        self._undo.clear()
        layers = self.model_runner.model.model.layers
        if kind == "k_proj of a layer":  # as if its weights were scaled by 1.5
            module = layers[1].self_attn
            handle = module.qkv_proj.register_forward_hook(_scale_keys(module))
            self._undo.append(handle.remove)
        elif kind == "layers":
            self._swap(layers)
            self._undo.append(lambda: self._swap(layers))
        elif kind == "rotation" and hasattr(layers[0], "self_attn"):  # or it is another stage's
            table = layers[0].self_attn.rotary_emb.cos_sin_cache
            right = table.clone()
            table.copy_(table.roll(7, 0))  # every position but the first is rotated as another one
            self._undo.append(lambda: table.copy_(right))

    def restart_agent(self) -> None:
        """Let the connector's thread die; it starts again with another epoch, as a new engine would."""
        from vllm.distributed.kv_transfer import get_kv_transfer_group

        agent = get_kv_transfer_group()._worker._agent
        agent._loop.step = None
        agent._commands.wake()

    @staticmethod
    def _swap(layers):
        """Exchange what two layers compute. The parameters stay in place: that they changed would be seen."""
        first, second = layers[0].self_attn.qkv_proj, layers[1].self_attn.qkv_proj
        first.forward, second.forward = second.forward, first.forward


def _scale_keys(module):
    keys = slice(module.q_size, module.q_size + module.kv_size)

    def hook(_, __, output):
        output[0][..., keys] *= 1.5
        return output

    return hook


class Trainer(Probe, WorkerExtension):
    """A worker whose weights can be changed while it serves, and that is told so."""

    def scale_weights(self, factor: float) -> None:
        """Multiply weights of every layer, in place, as an update of a trainer's does. (Of others a CPU's
        kernels have copies of their own.)"""
        with _torch().no_grad():
            for name, weight in self.model_runner.model.named_parameters():
                if "norm" in name:
                    weight.mul_(factor)


def _torch():
    import torch

    return torch
