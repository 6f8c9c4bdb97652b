# SPDX-License-Identifier: Apache-2.0
"""CUDA graphs of vLLM's decode steps: captured by vLLM's own manager with a dummy batch in its input buffers, and
replayed with other requests in the same buffers."""

import contextlib
import dataclasses
import functools
import importlib
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from device_memory import MEMORY
from mla_cases import LatentDoor, ScaledDoor, SharingDoor, SparseDoor
from streams import Stream
from torch_device import gpu
from transfer_cases import Case
from vllm_cases import PagedDoor
from vllm_door import Door, few_processors, problem_of

GRAPHS = "vllm.v1.worker.gpu.cudagraph_utils"
DEVICE = torch.device("cuda", 0)
ROWS = 4
STEPS = (((1, 70), (1, 1), (1, 33)), ((1, 5), (1, 130)), ((1, 1), (1, 64), (1, 65), (1, 9)))
"""Requests of each step. The first takes a graph for more."""

VERIFIED = (((4, 70), (4, 4), (4, 33)), ((4, 40),))


def engine(rows: Sequence[int], queries: int) -> dict[str, Any]:
    """Arguments of an engine with a graph for each of these numbers of requests."""
    sizes = [count * queries for count in rows]
    graphs = {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY", "cudagraph_capture_sizes": sizes}
    return {"enforce_eager": False, "max_num_seqs": ROWS, "compilation_config": graphs}


class Runner:
    """Input buffers of vLLM's model runner for a layer, and its graphs."""

    def __init__(self, door: Door, queries: int) -> None:
        graphs: Any = importlib.import_module(GRAPHS)
        inputs: Any = importlib.import_module("vllm.v1.worker.gpu.input_batch")
        self.door, self.queries = door, queries
        rows, self.dummy = ROWS, inputs.InputBatch.make_dummy
        tokens = queries * rows
        self.common = importlib.import_module("vllm.v1.attention.backend").CommonAttentionMetadata
        self.buffers = inputs.InputBuffers(rows, tokens, DEVICE)
        self.tables = torch.zeros(rows, 5, dtype=torch.int32, device=DEVICE)
        self.slots = torch.full((tokens,), -1, device=DEVICE)
        like = door.new(door.batch(((queries, queries),)))
        self.new = [torch.zeros(tokens, *each.shape[1:]).to(each) for each in like]
        self.out = torch.full((tokens, door.wanted(door.batch(((1, 1),))).shape[1]), torch.nan)
        self.out = self.out.to(DEVICE)
        with mock.patch.object(graphs, "get_pp_group", return_value=_one_rank()):
            told = door.config, DEVICE, door.config.compilation_config.cudagraph_mode, queries
            self.manager = graphs.CudaGraphManager(*told)

    def capture(self) -> None:
        graphs = importlib.import_module(GRAPHS)
        with (
            mock.patch.object(graphs, "graph_capture", _on_a_stream),
            mock.patch.object(graphs, "current_stream", torch.cuda.current_stream),
            mock.patch.object(graphs, "is_global_first_rank", return_value=False),
        ):
            self.manager.capture(self._forward)

    def _forward(self, description: Any, warmup: bool) -> Callable[[Any], None]:
        """Prepare a dummy batch; the function that it returns is captured."""
        rows, tokens = description.num_reqs, description.num_tokens
        dummy = self.dummy(rows, tokens, self.buffers, description.uniform_token_count)
        self.tables.zero_()
        self.slots.fill_(-1)
        starts = torch.from_numpy(dummy.query_start_loc_np)
        common = self._metadata(rows, tokens, starts, 512)
        metadata = self.door.builder.build_for_cudagraph_capture(common)

        def run(_: Any) -> None:
            with self.door.context(metadata, self.slots[:tokens]):
                self.out[:tokens] = self.door.call(*(each[:tokens] for each in self.new))

        return run

    def _metadata(self, rows: int, tokens: int, starts: torch.Tensor, most: int) -> Any:
        return self.common(
            query_start_loc=self.buffers.query_start_loc[: rows + 1],
            query_start_loc_cpu=starts,
            seq_lens=self.buffers.seq_lens[:rows],
            num_reqs=rows,
            num_actual_tokens=tokens,
            max_query_len=self.queries,
            max_seq_len=most,
            block_table_tensor=self.tables[:rows],
            slot_mapping=self.slots[:tokens],
        )

    def step(self, batch: Any) -> torch.Tensor:
        """Put a batch into the buffers, and replay the graph that fits."""
        own, tokens = batch.common(), len(batch.query)
        found = self.manager.dispatch(len(batch.tokens), tokens, self.queries, 0)
        assert found in self.manager.graphs, f"no graph: {found}"
        rows, ends = own.num_reqs, own.query_start_loc_cpu
        starts = torch.cat((ends, ends[-1:].expand(found.num_reqs - rows)))
        self.tables.zero_()
        self.tables[:rows, : own.block_table_tensor.shape[1]] = own.block_table_tensor
        self.slots.fill_(-1)
        self.slots[:tokens] = own.slot_mapping
        self.buffers.seq_lens.zero_()
        self.buffers.seq_lens[:rows] = own.seq_lens
        self.buffers.query_start_loc[: len(starts)] = starts.to(DEVICE)
        for room, each in zip(self.new, self.door.new(batch), strict=True):
            room[:tokens] = each
        common = self._metadata(found.num_reqs, found.num_tokens, starts, own.max_seq_len)
        self.door.builder.build(0, common)
        self.manager.run_fullgraph(found)
        return self.out[:tokens]


def _one_rank() -> Any:
    return SimpleNamespace(is_first_rank=True, is_last_rank=True)


@contextlib.contextmanager
def _on_a_stream(device: Any) -> Iterator[None]:
    """As vLLM's `graph_capture` in one rank."""
    stream = Stream(device)
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        yield


def _captured(door: Any, queries: int) -> Runner:
    """A runner with its graphs. In a capture the backend allocates no more than its temporary tensors."""
    runner = Runner(door, queries)
    owner, name = door.backend
    forward, counts = getattr(owner, name), []

    def counted(*args: Any, **kwargs: Any) -> Any:
        before = None if MEMORY.allocated is None else len(MEMORY.allocated)
        found = forward(*args, **kwargs)
        if MEMORY.allocated is not None:
            counts.append(len(MEMORY.allocated) - before)
        return found

    with mock.patch.object(owner, name, counted):
        runner.capture()
    assert len(counts) >= len(runner.manager.graphs)
    assert set(counts) == {door.temporaries}, f"allocated {counts} tensors"
    return runner


def _step(door: Any, runner: Runner, requests: tuple[tuple[int, int], ...]) -> None:
    batch = door.batch(requests)
    door.forget()
    door.write(batch)
    door.check(batch, runner.step(batch))


def replayed(
    make: Callable[..., Any],
    steps: Sequence[tuple[tuple[int, int], ...]] = STEPS,
    queries: int = 1,
    small: bool = True,
) -> None:
    """Capture graphs, and run steps with them."""
    with gpu(), few_processors() if small else contextlib.nullcontext():
        door = make(**engine((2, ROWS), queries))
        door.builder.reorder_batch_threshold = queries
        runner = _captured(door, queries)
        for requests in steps:
            _step(door, runner, requests)


def _own_table(door: Any) -> contextlib.AbstractContextManager[Any]:
    """Decodes whose block table lies elsewhere than in the engine's buffers."""
    builder: Any = importlib.import_module("pd_kernels.vllm.paged_builder")
    split = builder.decodes_of

    def copied(*args: Any) -> Any:
        found = split(*args)
        return dataclasses.replace(found, block_table=found.block_table.clone())

    return mock.patch.object(builder, "decodes_of", copied)


def _asks(door: Any) -> contextlib.AbstractContextManager[Any]:
    """A layer that asks the device for the longest sequence."""
    decode = door.module.impl._decode

    def asking(layer: Any, query: Any, cache: Any, metadata: Any, out: Any) -> None:
        metadata.decodes.lengths.max().item()
        decode(layer, query, cache, metadata, out)

    return mock.patch.object(door.module.impl, "_decode", asking)


def _stale_plan(door: Any) -> contextlib.AbstractContextManager[Any]:
    """A step takes the plan of the last capture, which had fewer requests than the step's graph. With the same number, a plan
    for other lengths is worse balanced, and right."""
    build, captures = door.builder.build, iter((4, 4, 2, 2))

    def in_captures(common_prefix_len: int, common_attn_metadata: Any) -> Any:
        return next(captures, None) and build(common_prefix_len, common_attn_metadata)

    return mock.patch.object(door.builder, "build", in_captures)


DAMAGES: dict[str, Callable[[Any], contextlib.AbstractContextManager[Any]]] = {
    "a block table of its own": _own_table,
    "a question to the device": _asks,
    "a plan of a capture": _stale_plan,
    "a plan that is made in a capture": lambda door: mock.patch.object(
        door.builder, "_plans", return_value={}
    ),
}


def controls() -> None:
    """Graphs are right, but refused or wrong with each damage."""
    with gpu(), few_processors():
        door = PagedDoor(**engine((2, ROWS), 1))

        def run(damage: Any = contextlib.nullcontext) -> None:
            with damage(door):
                _step(door, _captured(door, 1), STEPS[0])

        found = {
            name: problem_of(functools.partial(run, damage)) for name, damage in DAMAGES.items()
        }
        run()
    unfound = [name for name, told in found.items() if not told]
    assert not unfound, f"not found: {', '.join(unfound)}"


REPLAYS: dict[str, Case] = {
    "vllm, graphs": functools.partial(replayed, PagedDoor, small=False),
    "vllm, graphs, fp8": functools.partial(replayed, functools.partial(PagedDoor, "fp8")),
    "vllm, graphs, verified": functools.partial(replayed, PagedDoor, VERIFIED, 4),
    "vllm, graphs, mla": functools.partial(replayed, LatentDoor, STEPS[:2]),
    "vllm, graphs, mla, 40 heads": functools.partial(
        replayed, functools.partial(LatentDoor, 40), STEPS[:2]
    ),
    "vllm, graphs, mla, 8 verified": functools.partial(
        replayed, functools.partial(LatentDoor, 8), (((8, 70), (8, 33)), ((8, 9),)), 8
    ),
    "vllm, graphs, mla, one scale": functools.partial(replayed, ScaledDoor, STEPS[:2]),
    "vllm, graphs, sparse mla": functools.partial(replayed, SparseDoor, STEPS),
    "vllm, graphs, sparse mla, one choice of two layers": functools.partial(
        replayed, SharingDoor, STEPS[:2]
    ),
    "vllm, graphs, sparse mla, verified": functools.partial(
        replayed, SparseDoor, (((2, 170), (2, 2), (2, 33)), ((2, 40),)), 2
    ),
    "vllm, graphs, controls": controls,
}
