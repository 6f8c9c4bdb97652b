# SPDX-License-Identifier: Apache-2.0
"""Time of work on a GPU, without the host's share."""

import statistics
from collections.abc import Callable, Sequence

import torch

REPLAYS = 30
CALLS = 16
"""In a graph at least, so that the graph's own launch, some microseconds, does not count."""

PAST_L2_BYTES = 240 << 20
"""Bytes that one round over all buffers touches at least: four times an H200's L2."""

COPIES = 1024
"""Sets of buffers at most."""


def seconds(calls: Sequence[Callable[[], object]], replays: int = REPLAYS) -> float:
    """Median time of one call.

    All calls are captured in one CUDA graph, several times if they are few, and replayed, so that
    neither the host nor the gaps between launches count. Each call has buffers of its own; see
    `copies`. The median is of `replays`.
    """
    torch.cuda.synchronize()  # buffers are filled on another stream
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for call in calls:  # compiles what is not compiled yet
            call()
    stream.synchronize()
    captured = list(calls) * rounds(len(calls))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        for call in captured:
            call()
    times = []
    for replay in range(replays + 3):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        if replay >= 3:
            times.append(begin.elapsed_time(end) / 1e3 / len(captured))
    return float(statistics.median(times))


def rounds(calls: int) -> int:
    """How often a list of so many calls is captured."""
    return -(-CALLS // calls)


def copies(call_bytes: int) -> int:
    """Sets of buffers, for calls that touch so many bytes each: together they exceed the L2."""
    return max(1, min(COPIES, -(-PAST_L2_BYTES // call_bytes)))


def copy_bandwidth() -> float:
    """Bytes per second, read and written, of a large copy on this GPU."""
    source = torch.randint(0, 256, (1 << 30,), dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)

    def copy() -> None:
        target.copy_(source)

    return float(2 * source.numel() / seconds([copy]))
