# SPDX-License-Identifier: Apache-2.0
"""How the SGLang engines of tests are started, and the plug-ins that tests put into them."""

from __future__ import annotations

import json
import os
import subprocess
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from support.engine_nursery import fork_engine

from pd_connector.tools.demo import MODEL_DIR
from pd_connector.tools.launch.sglang import SglangEngine, sglang_python

EXACT_ARGS = ("--dtype", "float32", "--random-seed", "1")
"""In float32 nothing ties: two engines that see the same KV choose the same tokens."""


@dataclass(frozen=True)
class Recipe:
    """How an engine is started; engines with equal recipes are shared."""

    role: str | None
    page_size: int = 16
    tp: int = 1
    args: tuple[str, ...] = ()
    config: str = "{}"  # JSON, so that a recipe can be a key
    env: tuple[tuple[str, str], ...] = ()
    model: str = str(MODEL_DIR)
    module: str = "llama"
    """SGLang's module of the model."""
    forked: bool = True
    """Started within seconds (`support.engine_nursery`); False for as users start it."""

    sleeps: bool = True
    """While it is idle. By default its loop has no pause, and takes a core from those that compute."""

    patient: bool = False
    """Waits for its pool, and loads all that the pool has. Otherwise a busy machine decides what is loaded."""

    def engine(self, name: str, log: Path, port: int | None = None) -> SglangEngine:
        others = ",".join(name for name in _models() if name != self.module)
        env = {"SGLANG_DISABLED_MODEL_ARCHS": others, **dict(self.env)}
        plugins = {}
        if self.role == "decode" or (self.role and self.module != "llama"):
            plugins["faulty"] = _FAULTY
            env[FAULTS] = str(log.with_suffix(""))
        if self.module != "llama":
            plugins[f"plain_{self.module}"] = _PLAIN[self.module]
        if self.patient:
            plugins["patient"] = PATIENT
        if "--enable-lora" in self.args:
            plugins["unpinned"] = _UNPINNED
        for plugin, source in plugins.items():
            env["PYTHONPATH"] = sglang_plugin(
                log.parent / plugin, plugin, source, env.get("PYTHONPATH")
            )
        engine = SglangEngine(
            self.model,
            self.role,  # type: ignore[arg-type]
            extra_config=json.loads(self.config),
            page_size=self.page_size,
            tp=self.tp,
            name=name,
            args=[*EXACT_ARGS, *([SLEEPS] if self.sleeps else []), *self.args],
            env=env,
            log_path=log,
            port=port,
        )
        if self.forked:
            engine.popen = fork_engine
        return engine


CHUNK_TOKENS = 128
CHUNKED = ("--chunked-prefill-size", str(CHUNK_TOKENS))
RADIX = ("--disaggregation-decode-enable-radix-cache",)
SLEEPS = "--sleep-on-idle"
"""A new request ends the sleep. Engines that are not forked sleep up to a second."""
REFERENCE = Recipe(None, args=("--disable-radix-cache",))
"""It runs beside all pairs."""
SHORT_LEASE = '{"lease_s": 10}'  # what nobody fetches is given back soon
PREFILL = Recipe("prefill", 16, args=CHUNKED, config=SHORT_LEASE)
DECODE = Recipe("decode", 16, config=SHORT_LEASE, forked=False)
"""One engine is started as users start it: each of its processes is an interpreter that finds our plug-ins itself."""
PERMITS_INT8 = '{"codec": "int8"}'  # used where both engines permit it
SMALL_PAGES = Recipe("prefill", 1, args=CHUNKED, config=PERMITS_INT8)
LARGE_PAGES_TOKENS = 2560
LARGE_PAGES = Recipe(
    "decode", 64, tp=2, args=(*RADIX, "--max-total-tokens", str(LARGE_PAGES_TOKENS))
)
"""Engines that several files of tests use: in the order of the files, so that most start once."""


@cache
def _models() -> tuple[str, ...]:
    """The modules of all models. Each process of an engine would import them, which takes seconds."""
    asked = "import sysconfig; print(sysconfig.get_path('platlib'))"
    packages = subprocess.check_output([sglang_python(), "-c", asked], text=True).strip()
    modules = Path(packages, "sglang", "srt", "models").glob("*.py")
    return tuple(sorted(module.stem for module in modules))


def sglang_plugin(folder: Path, name: str, source: str, path: str | None = None) -> str:
    """A plug-in of SGLang's in a folder of its own, whose function is `register`; returns the
    PYTHONPATH that finds it, and what is on `path`."""
    info = folder / f"{name}-0.dist-info"
    info.mkdir(parents=True, exist_ok=True)
    files = {
        folder / f"{name}.py": source,
        info / "METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: 0\n",
        info / "entry_points.txt": f"[sglang.srt.plugins]\n{name} = {name}:register\n",
    }
    for file, content in files.items():
        # At once: an engine that was started before may be reading the same file.
        new = file.with_suffix(".new")
        new.write_text(content)
        new.rename(file)
    return os.pathsep.join(filter(None, [str(folder), path or os.environ.get("PYTHONPATH")]))


FAULTS = "PD_TEST_FAULTS"
RANK_FAILS, PAGE_DAMAGED = ".rank-fails", ".page-damaged"
STATE_ZEROED, STATE_OF_ANOTHER = ".state-zeroed", ".state-of-another"
ROWS_SHIFTED, SECTIONS_SWAPPED, MATRIX_TURNED = (
    ".rows-shifted",
    ".sections-swapped",
    ".matrix-turned",
)
_FAULTY = f"""
import os
from pathlib import Path

damaged = []
states = []  # as requests have sent or received them, in their order

def register():
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    polls = "sglang.srt.disaggregation.utils._poll_with_failure_injection"
    HookRegistry.register(polls, before_polls, HookType.BEFORE)
    HookRegistry.register("pd_connector.sglang.receiver.Receiver.poll", after_poll, HookType.AFTER)
    HookRegistry.register("pd_connector.sglang.sender.Sender.send", before_send, HookType.BEFORE)

def switch(fault):
    return Path(os.environ[{FAULTS!r}] + fault)

def wanted(fault):
    return switch(fault).exists()

def before_polls(pollers):
    os.environ["SGLANG_TEST_DISAGG_FAILURE_PROB"] = "0.02" if wanted({RANK_FAILS!r}) else "0"

def before_send(sender, kv_indices, state_indices=None, num_kv_tokens=None):
    pool = sender.kv_mgr._scheduler.token_to_kv_pool_allocator.get_kvcache()
    if state_indices and hasattr(pool, "mamba_pool"):
        harm(pool.mamba_pool, int(state_indices[0][0]))

def harm(pool, slot):
    cache = pool.mamba_cache
    held = [tensor[:, slot] for tensor in (*cache.conv, cache.temporal)]
    states.append([tensor.clone() for tensor in held])
    convolution, matrices = held
    if wanted({STATE_ZEROED!r}):
        convolution.zero_()
        matrices.zero_()
    if wanted({STATE_OF_ANOTHER!r}):
        for tensor, another in zip(held, states[-2:][0]):
            tensor.copy_(another)
    if wanted({ROWS_SHIFTED!r}):
        convolution.copy_(convolution.roll(1, -1))
    if wanted({SECTIONS_SWAPPED!r}):
        first, size = map(int, switch({SECTIONS_SWAPPED!r}).read_text().split())
        both = convolution[:, first : first + 2 * size]
        both.copy_(both.roll(size, 1))
    if wanted({MATRIX_TURNED!r}):
        dims = matrices.shape[-2:]
        matrices.copy_(matrices.transpose(-1, -2).flatten(-2).unflatten(-1, dims))

def after_poll(state, receiver):
    from sglang.srt.disaggregation.base.conn import KVPoll

    if state != int(KVPoll.Success) or receiver in damaged:
        return
    pool = receiver.kv_mgr._scheduler.token_to_kv_pool_allocator.get_kvcache()
    if hasattr(pool, "mamba_pool"):
        damaged.append(receiver)
        harm(pool.mamba_pool, receiver._tables[1][0])
        pool = pool.full_kv_pool
    if wanted({PAGE_DAMAGED!r}):
        damaged.append(receiver)  # SGLang polls until all ranks have succeeded
        first = receiver._tables[0][1] * pool.page_size
        for buffer in (*pool.k_buffer, *pool.v_buffer):
            buffer[first : first + pool.page_size].neg_()
"""
"""A plug-in with faults that can be switched on and off while an engine runs. One poll in fifty of a decode engine says
`Failed`, on one rank or another (SGLang's own fault injection); the second page of a prompt is damaged once its KV has been
verified. Recurrent states are harmed before they are sent, or once they have been verified: zeroed, replaced by those of the
request before, rows of the convolution shifted by one, two of its sections swapped, or the matrix transposed."""

PATIENT = f"""
import json, os
from pathlib import Path

def register():
    from pd_connector.agent import pool_saves
    from pd_connector.pool.load_breakeven import LoadBreakeven
    from pd_connector.sglang import pool_prompts

    pool_saves._WAITS_S = 60.0
    pool_prompts.LOOK_S = pool_prompts._SLOW_S = pool_prompts.STALL_S = 60.0
    LoadBreakeven.chunks = lambda self, hit, *_: len(hit)
    if {FAULTS!r} in os.environ:
        from sglang.srt.plugins.hook_registry import HookRegistry, HookType

        HookRegistry.register("pd_connector.sglang.pool.PoolLinker.idle", idle, HookType.AFTER)

def idle(result, linker):
    rank, path = linker._rank, Path(os.environ[{FAULTS!r}] + ".held")
    if rank is None or not rank._leads or path.exists():
        return
    held = {{
        "bytes": rank.prompts.held.nbytes,
        "prompts": len(rank.prompts._prompts),
        "loads": len(linker._queued),
        "jobs": len(linker._jobs),
        "offloads": len(linker._offloads),
    }}
    path.with_suffix(".new").write_text(json.dumps(held))
    path.with_suffix(".new").rename(path)
"""
"""A plug-in for `Recipe.patient`. An idle engine writes what it holds for requests and saves, into a file that is not there."""

_WINDOWS = """
def register():
    from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend as Backend

    for name in ("_run_sdpa_forward_extend", "_run_sdpa_forward_decode"):
        setattr(Backend, name, windowed(getattr(Backend, name)))

def windowed(run):
    def made(self, query, output, key, value, tokens, requests, *args, **options):
        import torch

        if self.use_sliding_window_kv_pool and options.get("sliding_window_size"):
            rows = tokens[requests].to(torch.int64)
            tokens = self.token_to_kv_pool.translate_loc_from_full_to_swa(rows)
            requests = torch.arange(len(tokens))
        return run(self, query, output, key, value, tokens, requests, *args, **options)
    return made
"""
"""A plug-in for windows on a CPU: SGLang's backend there reads layers with a window by the slots of the other pool, so all but the
first prompts of an engine are computed wrongly."""

_UNPINNED = """
def register():
    import torch

    def unpinned(make):
        def made(*args, pin_memory=False, **options):
            return make(*args, **options)
        return made

    for name in ("arange", "empty", "tensor", "zeros"):
        setattr(torch, name, unpinned(getattr(torch, name)))
    torch.Tensor.pin_memory = lambda tensor, *args: tensor
"""
"""A plug-in for adapters on a CPU: SGLang makes pinned memory for them, which only accelerators have."""

_PLAIN = {
    "mellum": _WINDOWS,
    "qwen3_next": """
def register():
    from sglang.kernels.ops.attention.fla import fused_norm_gate
    from sglang.srt.layers.moe import topk
    from sglang.srt.models import qwen2_moe

    qwen2_moe.fused_gate_sigmoid_mul_add = gated
    fused_norm_gate.FusedRMSNormGated.forward = norm
    native = topk.fused_topk_torch_native
    topk.fused_topk = lambda hidden_states, gating_output, topk, renormalize, **others: native(
        hidden_states, gating_output, topk, renormalize
    )

def gated(hidden_states, weight, shared, out):
    out += (hidden_states @ weight).sigmoid()[:, None] * shared

def norm(self, x, g, **others):
    import torch

    plain = torch.rms_norm(x.float(), x.shape[-1:], self.weight.float(), self.eps)
    return (plain * torch.nn.functional.silu(g.float())).to(x.dtype)
""",
    "lfm2": """
def register():
    from sgl_kernel.mamba import causal_conv1d_fn_cpu, causal_conv1d_update_cpu
    from sglang.srt.models import lfm2

    lfm2.causal_conv1d_fn, lfm2.causal_conv1d_update = causal_conv1d_fn_cpu, causal_conv1d_update_cpu
""",
    "nemotron_h": """
import itertools
import torch

def register():
    from sgl_kernel.mamba import causal_conv1d_fn_cpu, causal_conv1d_update_cpu
    from sglang.srt.layers.attention.mamba import mamba

    mamba.causal_conv1d_fn = mamba.causal_conv1d_fn_triton = causal_conv1d_fn_cpu
    mamba.causal_conv1d_update = mamba.causal_conv1d_update_triton = causal_conv1d_update_cpu
    mamba.mamba_chunk_scan_combined, mamba.selective_state_update = scan, update

def scan(
    x, dt, A, B, C, *, D, dt_bias, initial_states, cu_seqlens, out, state_dtype, **others
):
    states = x.new_zeros(len(cu_seqlens) - 1, *x.shape[2:], B.shape[-1], dtype=torch.float32)
    if initial_states is not None:
        states.copy_(initial_states)
    for state, (first, stop) in zip(states, itertools.pairwise(cu_seqlens.tolist())):
        for token in range(first, stop):
            out[0, token] = step(state, x[0, token], dt[0, token] + dt_bias, A, B[0, token], C[0, token], D)
    return None, states.to(state_dtype), None

def update(state, x, dt, A, B, C, D, *, dt_bias, state_batch_indices, out, **others):
    dt, A, D = (dt + dt_bias)[..., 0], A[..., 0, 0], D[..., 0]
    for number, slot in enumerate(state_batch_indices.tolist()):
        if slot >= 0:  # not padding
            held = state[slot].float()
            out[number] = step(held, x[number], dt[number], A, B[number], C[number], D)
            state[slot] = held

def step(state, x, dt, A, B, C, D):
    dt, x = torch.nn.functional.softplus(dt.float()), x.float()
    share = len(x) // len(B)  # heads of a group
    B, C = (part.float().repeat_interleave(share, 0)[:, None] for part in (B, C))
    state *= (dt * A.float()).exp()[:, None, None]
    state += (dt[:, None] * x)[:, :, None] * B
    return (state * C).sum(-1) + D.float()[:, None] * x
""",
}
"""By the model's module, a plug-in with what SGLang computes in Triton and CUDA alone, in torch."""
