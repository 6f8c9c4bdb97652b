# SPDX-License-Identifier: Apache-2.0
"""The host's time for a decode layer outside of CUDA graphs, and for planning a step: ours beside FlashInfer's. Needs no GPU.

Both sides run their own Python, as on a GPU, with tensors of a CPU, and end where Python calls the compiled code that launches:

- ours at `launch` of Triton's driver, which takes the kernel's arguments apart and launches it;
- FlashInfer's at a function of its compiled module (`run`, `paged_run`, `plan`, the XQA wrapper), which looks at the tensors
  again, chooses a kernel and launches it, and for splits a second one.

In place of both stands a function that counts its calls. On both sides, what the compiled code takes is left out, and results
are allocated on the CPU. An engine's rows are a call of its attention backend, from SGLang or vLLM to the launch, without the
writing of new KV, which is the same on both sides. FlashInfer, vLLM and SGLang are measured where they are installed.
"""

import contextlib
import functools
import importlib
import importlib.util
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch

from pd_bench.kernels import decode_cases
from pd_bench.kernels.decode_cases import Heads, PagedSet, paged_set
from pd_bench.kernels.report import Comparison, duration, rows_or_failure
from pd_kernels.attention import DecodePlan, paged_decode, plan_paged_decode
from pd_kernels.attention.decode_call import DecodeCall
from pd_kernels.attention.decode_plan import launch_plan
from pd_kernels.attention.direct import facts

LLAMA = Heads(32, 8, 128)
PAGE, LENGTH, LAYERS = 16, 100, 4
BATCHES = (1, 64)
ROUNDS, CALLS = 60, 100
BAR = 1.0

Call = Callable[[], Any]
Calls = Sequence[Call]


class Launches:
    """Stands for compiled code that launches."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self, *arguments: Any, **named: Any) -> None:
        self.count += 1


LAUNCHES = Launches()


@contextlib.contextmanager
def without_gpu() -> Iterator[None]:
    """Triton compiles for Hopper and launches nothing, and calls on CPU tensors take our kernels."""
    from triton.backends.compiler import GPUTarget
    from triton.backends.nvidia import driver as nvidia
    from triton.runtime import driver

    class Launcher(nvidia.CudaLauncher):  # type: ignore[misc]
        def __init__(self, *given: Any) -> None:
            super().__init__(*given)
            self.launch = LAUNCHES

    active = SimpleNamespace(
        launcher_cls=Launcher,
        utils=SimpleNamespace(
            launch=LAUNCHES,
            load_binary=lambda *_: (1, 1, 0, 0, 1024),
            unload_module=lambda _: None,
            build_signature_metadata=lambda _: b"",
            get_device_properties=lambda _: {"max_shared_mem": 232_448},
        ),
        get_current_device=_device_of_tensors,
        get_current_stream=lambda _: 0,
        get_current_target=lambda: GPUTarget("cuda", 90, 32),
    )
    before = driver._active
    driver.set_active(active)
    with (
        mock.patch.object(decode_cases, "DEVICE", "cpu"),
        mock.patch.object(DecodeCall, "on_gpu", True),
        mock.patch.object(nvidia, "PyKernelArg", SimpleNamespace, create=True),
        mock.patch.object(torch.cuda, "device", contextlib.nullcontext),
    ):
        try:
            yield
        finally:
            driver.set_active(before)


def _device_of_tensors() -> int:
    """As `torch.cuda.current_device`, which is a function of Python, too."""
    return -1


def seconds(*sides: Calls) -> list[float]:
    """Median processor time of a call of each side, in turns. Each call launches once."""
    for calls in sides:
        for call in calls:  # the first call of a layer looks for its kernel
            call()
            before = LAUNCHES.count
            call()
            if LAUNCHES.count != before + 1:
                raise RuntimeError(
                    f"a call launches {LAUNCHES.count - before} times instead of once"
                )
    times: list[list[float]] = [[] for _ in sides]
    for _ in range(ROUNDS):
        for calls, taken in zip(sides, times, strict=True):
            began = time.thread_time_ns()
            for number in range(CALLS):
                calls[number % len(calls)]()
            taken.append((time.thread_time_ns() - began) / CALLS * 1e-9)
    return [statistics.median(taken) for taken in times]


def measure_layers() -> Iterator[Comparison]:
    """Yield the rows. Prints which engine is not installed and has none."""
    engines = {"vllm": ("vLLM", vllm_rows), "sglang": ("SGLang", sglang_rows)}
    parts = [("call", kernel_rows)]
    for package, part in engines.items():
        if importlib.util.find_spec(package) is None:
            print(f"{part[0]}: not measured, {package} is not installed here", flush=True)
        else:
            parts.append(part)
    with without_gpu():
        for batch in BATCHES:
            sets = [paged_set([LENGTH] * batch, LLAMA, PAGE, torch.bfloat16) for _ in range(LAYERS)]
            params = {"sequences": batch}
            for name, rows in parts:
                yield from rows_or_failure(f"{name}, a layer", params, rows(sets, params))


def plan_of(sets: Sequence[PagedSet]) -> DecodePlan:
    plan = plan_paged_decode(sets[0].query, sets[0].keys)
    launch_plan(plan, sets[0].lengths)
    plan.filled[0] = len(sets[0].lengths)
    plan.latest[:] = sets[0].lengths, facts(sets[0].lengths)
    return plan


def kernel_rows(sets: Sequence[PagedSet], params: dict[str, Any]) -> Iterator[Comparison]:
    """The functions that a user calls."""
    plan, scale = plan_of(sets), LLAMA.dim**-0.5
    ours = []
    for each in sets:
        query = each.query[:, 0]
        arguments = query, each.keys, each.values, sets[0].table, sets[0].lengths  # those of a step
        out = torch.empty_like(query)
        ours.append(functools.partial(paged_decode, *arguments, scale=scale, out=out, plan=plan))
    with flashinfer() as wrappers:
        native, xqa = native_calls(wrappers, sets), xqa_calls(sets)
        own_s, native_s, xqa_s = seconds(ours, native, xqa)
        yield duration("paged_decode / FlashInfer's run", params, own_s, native_s, BAR)
        yield duration("paged_decode / FlashInfer's XQA", params, own_s, xqa_s, BAR)
        planning = [functools.partial(launch_plan, plan, sets[0].lengths)]
        wrapper = planned_wrapper(wrappers, sets[0])
        again = functools.partial(wrapper.plan, *wrapper.arguments, **wrapper.options)
        own_s, native_s = seconds(planning, [again])
        yield duration("plan, once a step / FlashInfer's", params, own_s, native_s, BAR)


@contextlib.contextmanager
def flashinfer() -> Iterator[list[Any]]:
    """FlashInfer, whose compiled modules launch nothing, and which takes a CPU for a Hopper.

    Yields:
        wrappers for decodes, not planned yet.
    """
    compiled = SimpleNamespace(
        **dict.fromkeys(("run", "paged_run", "ragged_run", "xqa_wrapper"), LAUNCHES),
        plan=_planned,
    )
    replaced = {
        "get_compute_capability": lambda _: (9, 0),
        "get_device_sm_count": lambda _: 132,
        "device_support_pdl": lambda _: True,
        "determine_attention_backend": lambda *_, **__: "fa2",
        "is_sm90a_supported": lambda _: True,
        "get_seq_lens": _lengths,
    }
    with contextlib.ExitStack() as stack:
        # FlashInfer writes the sources of its modules there.
        base = stack.enter_context(tempfile.TemporaryDirectory())
        own = {"FLASHINFER_WORKSPACE_BASE": base, "FLASHINFER_CUDA_ARCH_LIST": "9.0a"}
        stack.enter_context(mock.patch.dict(os.environ, own))
        module = importlib.import_module("flashinfer")
        core = importlib.import_module("flashinfer.jit.core")
        stack.enter_context(
            mock.patch.object(core.JitSpec, "build_and_load", return_value=compiled)
        )
        for part in ("decode", "prefill", "xqa", "utils", "page"):
            owner = importlib.import_module(f"flashinfer.{part}")
            for name, value in replaced.items():
                if hasattr(owner, name):
                    stack.enter_context(mock.patch.object(owner, name, value))
        plain = torch.empty

        def unpinned(*given: Any, pin_memory: bool = False, **named: Any) -> torch.Tensor:
            return plain(*given, **named)

        with mock.patch.object(torch, "empty", unpinned):
            wrappers = [_new_wrapper(module) for _ in range(4)]
        yield wrappers


def _planned(*_: Any, **__: Any) -> list[int]:
    LAUNCHES()
    return [0] * 15


def _lengths(ends: torch.Tensor, last: torch.Tensor, page: int) -> torch.Tensor:
    return torch.clamp(ends[1:] - ends[:-1] - 1, min=0) * page + last


def _new_wrapper(module: Any) -> Any:
    room = torch.empty(1 << 20, dtype=torch.uint8)
    return module.BatchDecodeWithPagedKVCacheWrapper(room, "NHD", use_tensor_cores=True)


def planned_wrapper(wrappers: list[Any], given: PagedSet) -> Any:
    """A wrapper that is planned as vLLM and SGLang plan it: groups of 4 take tensor cores."""
    counts = (given.lengths + PAGE - 1) // PAGE
    ends = torch.zeros(len(counts) + 1, dtype=torch.int32)
    ends[1:] = counts.cumsum(0)
    ids = torch.cat([row[:count] for row, count in zip(given.table, counts.tolist(), strict=True)])
    wrapper = wrappers.pop()
    wrapper.arguments = (
        ends,
        ids,
        given.lengths - (counts - 1) * PAGE,
        LLAMA.query,
        LLAMA.kv,
        LLAMA.dim,
        PAGE,
    )
    wrapper.options = {
        "q_data_type": torch.bfloat16,
        "kv_data_type": torch.bfloat16,
        "sm_scale": LLAMA.dim**-0.5,
    }
    wrapper.plan(*wrapper.arguments, **wrapper.options)
    return wrapper


def native_calls(wrappers: list[Any], sets: Sequence[PagedSet]) -> Calls:
    wrapper = planned_wrapper(wrappers, sets[0])
    calls = []
    for each in sets:
        query, cache = each.query[:, 0].contiguous(), (each.keys, each.values)
        calls.append(functools.partial(wrapper.run, query, cache, out=torch.empty_like(query)))
    return calls


def xqa_calls(sets: Sequence[PagedSet]) -> Calls:
    decode = importlib.import_module("flashinfer.decode")
    room, calls = torch.zeros(8 << 20, dtype=torch.uint8), []
    for each in sets:
        query = each.query[:, 0].contiguous()
        arguments = {
            "query": query,
            "kv_cache": (each.keys, each.values),
            "workspace_buffer": room,
            "block_tables": each.table,
            "seq_lens": each.lengths,
            "max_seq_len": LENGTH,
            "bmm1_scale": LLAMA.dim**-0.5,
            "bmm2_scale": 1.0,
            "out": torch.empty_like(query),
            "kv_layout": "NHD",
        }
        calls.append(functools.partial(decode.xqa_batch_decode_with_kv_cache, **arguments))
    return calls


def vllm_rows(sets: Sequence[PagedSet], params: dict[str, Any]) -> Iterator[Comparison]:
    """A layer of vLLM: `forward` of the backend's class, as `Attention` calls it."""
    backend = importlib.import_module("vllm.v1.attention.backends.flashinfer")
    ours = our_vllm_calls(sets)
    with flashinfer() as wrappers:
        native = their_vllm_calls(
            backend, sets, lambda: backend.FIDecode(planned_wrapper(wrappers, sets[0]))
        )
        own_s, native_s = seconds(ours, native)
        yield duration("vLLM: CUSTOM / FLASHINFER, its own decode", params, own_s, native_s, BAR)
        decode = importlib.import_module("flashinfer.decode")
        kernel = backend.FlashInferDecodeKernel.XQA
        xqa = functools.partial(
            backend.FlashInferTrtllmAPIDecode, kernel, sets[0].table, sets[0].lengths, LENGTH
        )
        room = torch.zeros(8 << 20, dtype=torch.uint8)

        def workspace() -> torch.Tensor:  # a mock would take more time than a layer
            return room

        with (
            mock.patch.object(backend, "_get_trtllm_workspace_buffer", workspace),
            mock.patch.object(
                backend,
                "flashinfer_xqa_batch_decode_with_kv_cache",
                decode.xqa_batch_decode_with_kv_cache,
            ),
        ):
            own_s, xqa_s = seconds(ours, their_vllm_calls(backend, sets, xqa))
        yield duration(
            "vLLM: CUSTOM / FLASHINFER, XQA (Hopper's default)", params, own_s, xqa_s, BAR
        )


def our_vllm_calls(sets: Sequence[PagedSet]) -> Calls:
    """Calls of layers that are made without vLLM's constructor, which asks for a GPU."""
    paged = importlib.import_module("pd_kernels.vllm.paged_cuda")
    made = importlib.import_module("pd_kernels.vllm.paged_builder").PagedMetadata
    decodes = importlib.import_module("pd_kernels.vllm.batch_split").Decodes
    calls, plan = [], plan_of(sets)
    for each in sets:
        impl = paged.PagedFlashImpl.__new__(paged.PagedFlashImpl)
        impl.num_heads, impl.num_kv_heads, impl.head_size = LLAMA.query, LLAMA.kv, LLAMA.dim
        impl.scale, impl.sinks = LLAMA.dim**-0.5, None
        impl.decodes_with(None, None, None, "auto")
        tokens = len(each.lengths)
        metadata = made(
            *(tokens, 1, sets[0].lengths, LENGTH, sets[0].lengths, sets[0].table, sets[0].lengths),
            *(decodes(1, sets[0].table, sets[0].lengths), None, {impl.plan_key: plan}),
        )
        calls.append(_forward(impl, each, metadata))
    return calls


def their_vllm_calls(backend: Any, sets: Sequence[PagedSet], decode: Call) -> Calls:
    layouts = importlib.import_module("vllm.v1.kv_cache_layout").KVCacheLayout
    calls, part = [], decode()
    with mock.patch.object(backend, "can_use_trtllm_attention", return_value=True):
        for each in sets:
            impl = backend.FlashInferImpl(
                LLAMA.query, LLAMA.dim, LLAMA.dim**-0.5, LLAMA.kv, None, None, "auto"
            )
            tokens = len(each.lengths)
            metadata = backend.FlashInferMetadata(
                *(layouts.LBHNC, tokens, each.lengths, torch.bfloat16, torch.bfloat16),
                *(tokens, tokens, 0, 0, True, None, part),
            )
            calls.append(_forward(impl, each, metadata))
    return calls


def _forward(impl: Any, given: PagedSet, metadata: Any) -> Call:
    """Queries are a part of what the projection gives, as in models."""
    tokens, layer = (
        len(given.lengths),
        SimpleNamespace(_q_scale_float=1.0, _k_scale_float=1.0, _v_scale_float=1.0, _q_scale=None),
    )
    whole = torch.zeros(tokens, (LLAMA.query + 2 * LLAMA.kv) * LLAMA.dim, dtype=torch.bfloat16)
    sizes = [heads * LLAMA.dim for heads in (LLAMA.query, LLAMA.kv, LLAMA.kv)]
    query, key, value = (part.unflatten(1, (-1, LLAMA.dim)) for part in whole.split(sizes, 1))
    cache = given.keys._base
    output = torch.empty(tokens, LLAMA.query, LLAMA.dim, dtype=torch.bfloat16)
    return functools.partial(impl.forward, layer, query, key, value, cache, metadata, output)


def sglang_rows(sets: Sequence[PagedSet], params: dict[str, Any]) -> Iterator[Comparison]:
    """A layer of SGLang: `forward_decode` of its backend for decodes, on SGLang's pool."""
    theirs = importlib.import_module("sglang.srt.layers.attention.flashinfer_backend")
    pools = importlib.import_module("sglang.srt.mem_cache.memory_pool")
    radix = importlib.import_module("sglang.srt.layers.radix_attention").RadixAttention
    backends = importlib.import_module("pd_kernels.sglang.backend")
    tokens, batch = sets[0].keys.shape[0] * PAGE, len(sets[0].lengths)
    pool = pools.MHATokenToKVPool(
        tokens - PAGE, PAGE, torch.bfloat16, LLAMA.kv, LLAMA.dim, LAYERS, "cpu", False
    )
    layers = [
        radix(LLAMA.query, LLAMA.dim, LLAMA.dim**-0.5, LLAMA.kv, number) for number in range(LAYERS)
    ]
    whole = torch.zeros(batch, (LLAMA.query + 2 * LLAMA.kv) * LLAMA.dim, dtype=torch.bfloat16)
    query = whole[:, : LLAMA.query * LLAMA.dim]
    ours = backends.PagedBackend.__new__(backends.PagedBackend)
    plan = plan_of(sets)
    ours.pool, ours.page_size, ours._views, ours._branches = pool, PAGE, {}, False
    ours._tables, ours._queries = backends.PageTables(sets[0].table, sets[0].lengths), 1
    ours._plans = {1: backends.Plans(dict.fromkeys(layers, plan), [plan])}
    with flashinfer() as wrappers:
        other = theirs.FlashInferAttnBackend.__new__(theirs.FlashInferAttnBackend)
        wrappers = [planned_wrapper(wrappers, sets[0])]
        other.forward_metadata = SimpleNamespace(decode_wrappers=wrappers, swa_out_cache_loc=None)
        other.num_wrappers, other.token_to_kv_pool, other.decode_uses_dequant_workspace = (
            1,
            pool,
            False,
        )
        pair = [
            [
                functools.partial(each.forward_decode, query, None, None, layer, None, False)
                for layer in layers
            ]
            for each in (ours, other)
        ]
        own_s, native_s = seconds(*pair)
    yield duration("SGLang: pd_kernels / flashinfer", params, own_s, native_s, BAR)
