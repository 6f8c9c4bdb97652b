# SPDX-License-Identifier: Apache-2.0
"""Time of work on a GPU, without the time of the host."""

import statistics
from collections.abc import Callable, Sequence

import torch

REPLAYS = 30
CALLS = 16
"""The least number of calls in a graph. They share the time to launch the graph, a few
microseconds."""

LEAST_REPLAYS = 20
ENOUGH_S = 1.0
"""If all replays take longer than this, only LEAST_REPLAYS are done. GPU time is scarce, and long
calls vary little."""

PAST_L2_BYTES = 240 << 20
"""The least total bytes of all sets of buffers: four times the L2 cache of an H200."""

COPIES = 1024
"""The most sets of buffers."""


def seconds(calls: Sequence[Callable[[], object]], replays: int = REPLAYS) -> float:
    """Median time of one call, in seconds.

    All calls are captured in one CUDA graph (several times if they are few). The graph is replayed
    `replays` times, or fewer (`ENOUGH_S`). So neither the host nor gaps between launches count.
    Each call should have its own buffers, see `copies`.
    """
    torch.cuda.synchronize()  # buffers were filled on another stream
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for call in calls:  # compiles kernels that are not compiled yet
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
            times.append(begin.elapsed_time(end) / 1e3)
        if len(times) >= LEAST_REPLAYS and sum(times) > ENOUGH_S:
            break
    return float(statistics.median(times)) / len(captured)


def rounds(calls: int) -> int:
    """The number of times that a list of `calls` calls is captured in one graph."""
    return -(-CALLS // calls)


def copies(call_bytes: int) -> int:
    """The number of sets of buffers that together exceed the L2 cache, if a call touches
    `call_bytes` of each."""
    return max(1, min(COPIES, -(-PAST_L2_BYTES // call_bytes)))


def copy_bandwidth() -> float:
    """Bytes per second, read and written, of a large plain copy on this GPU."""
    source = torch.randint(0, 256, (1 << 30,), dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)

    def copy() -> None:
        target.copy_(source)

    return float(2 * source.numel() / seconds([copy]))
