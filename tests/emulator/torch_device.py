# SPDX-License-Identifier: Apache-2.0
"""A GPU for a torch that was built without CUDA: tensors whose device is `cuda` lie in `device_memory.py`, and
what torch does with them is queued on `streams.py`, as on a GPU."""

import contextlib
import functools
import weakref
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from device_memory import MEMORY, allow_cuda_tensors, on_host
from graphs import Capture, Graph, new_pool
from streams import STREAMS, Event, Stream
from torch.utils._pytree import tree_leaves, tree_map_only

HOST = torch._C.DispatchKeySet(torch._C.DispatchKey.CPU)
ANY_DEVICE = ("aten::index", "aten::index_put_", "aten::_index_put_impl_")
"""These take indices from the host."""
WAITING = ("aten::_local_scalar_dense", "aten::nonzero", "aten::equal", "aten::masked_select")
"""These return what only the device knows, so torch waits for it."""
PINNED: dict[int, int] = {}
"""Bytes of host memory that copies read and write when they run, by address."""


def _lent(tensor: Any) -> bool:
    return isinstance(tensor, torch.Tensor) and tensor.is_cuda


def _pinned(tensor: torch.Tensor) -> bool:
    at = tensor.data_ptr()
    return any(start <= at < start + nbytes for start, nbytes in list(PINNED.items()))


def _empty(size: Any, dtype: Any = None, device: Any = None, memory_format: Any = None, **_: Any):
    made = torch.empty(size, dtype=dtype, device="meta", memory_format=memory_format)
    return _empty_strided(made.shape, made.stride(), made.dtype)


def _empty_strided(size: Any, stride: Any, dtype: Any = None, device: Any = None, **_: Any):
    dtype = dtype or torch.get_default_dtype()
    count = (
        1 + sum((n - 1) * step for n, step in zip(size, stride, strict=True)) if all(size) else 0
    )
    return MEMORY.tensor(count * dtype.itemsize).view(dtype).as_strided(size, stride)


def _to_copy(tensor: torch.Tensor, *, dtype: Any = None, device: Any = None, **given: Any) -> Any:
    device = torch.device(device or tensor.device)
    dense = torch.ops.aten.is_non_overlapping_and_dense.default(tensor)
    stride = tensor.stride() if dense else torch.empty(tensor.shape, device="meta").stride()
    waits = not given.get("non_blocking", False)
    made = torch.empty_strided(tensor.shape, stride, dtype=dtype or tensor.dtype, device=device)
    if device.type == "cpu" and not waits and made.nbytes:
        _pin_while_it_lives(made)  # torch's own, which it keeps until copies are done
    return made.copy_(tensor, non_blocking=not waits)


def _pin_while_it_lives(tensor: torch.Tensor) -> None:
    PINNED[tensor.data_ptr()] = tensor.nbytes
    weakref.finalize(tensor, PINNED.pop, tensor.data_ptr(), None).atexit = False


def _copy(target: torch.Tensor, source: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
    """Memory that is not pinned is read before the call returns, and written before it returns."""
    here = target if not target.is_cuda else source
    late = not here.is_cuda and non_blocking and _pinned(here)
    to, of = (on_host(each) if each.is_cuda else each for each in (target, source))
    if not source.is_cuda and not late:
        STREAMS.forbid_in_capture("a copy from memory that is not pinned")
        of = source.clone()
    queue = STREAMS.current
    STREAMS.queue(functools.partial(_quietly, to.copy_, of))
    if not (late or (target.is_cuda and (non_blocking or source.is_cuda))):
        STREAMS.finish(queue, queue.queued)
    return target


def _quietly(function: Any, *args: Any, **kwargs: Any) -> Any:
    with torch.no_grad():
        return function(*args, **kwargs)


def _any(op: Any, *args: Any, **kwargs: Any) -> Any:
    """Any other operation of torch: views at once; others queued, with results that have their memory now."""
    name = op._schema.name
    if op.is_view or name in ("aten::set_", "aten::record_stream"):
        return op.redispatch(HOST, *args, **kwargs)
    args = tuple(
        _TENSOR(x) if isinstance(x, int | float) and str(each.type) == "Tensor" else x
        for x, each in zip(args, op._schema.arguments, strict=False)
    )  # torch hands numbers over as they are, also where an operation takes tensors
    strangers = [x for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor) and x.dim()]
    if name not in ANY_DEVICE and not all(x.is_cuda for x in strangers):
        raise RuntimeError(f"{name}: expected all tensors to be on the same device, cuda:0 and cpu")
    on_device = functools.partial(
        tree_map_only, torch.Tensor, lambda x: on_host(x) if x.is_cuda else x.clone()
    )
    given, named = on_device(args), on_device(kwargs)
    if name in WAITING:
        STREAMS.finish(STREAMS.current, STREAMS.current.queued)
        found = _quietly(op, *given, **named)
        return tree_map_only(torch.Tensor, lambda x: x.to("cuda"), found)
    meta = functools.partial(tree_map_only, torch.Tensor, _as_meta)
    written = _written(op, args, kwargs)
    if written is not None:
        if isinstance(written, torch.Tensor) and not written.numel():
            _resize(written, _quietly(op, *meta(args), **meta(kwargs)))
            given, named = on_device(args), on_device(kwargs)
        STREAMS.queue(lambda: _quietly(op, *given, **named))
        return written
    if "device" in named:
        named = {**named, "device": torch.device("cpu")}
    shapes = _quietly(
        op, *meta(args), **meta({**kwargs, **({"device": "meta"} if "device" in named else {})})
    )
    results = tree_map_only(
        torch.Tensor, lambda x: _empty_strided(x.shape, x.stride(), x.dtype), shapes
    )
    rooms = [on_host(each) for each in tree_leaves(results) if _lent(each)]

    def work() -> None:
        found = [
            x for x in tree_leaves(_quietly(op, *given, **named)) if isinstance(x, torch.Tensor)
        ]
        for room, value in zip(rooms, found, strict=True):
            room.copy_(value)

    STREAMS.queue(work)
    return results


def _resize(out: torch.Tensor, like: torch.Tensor) -> None:
    """An operation makes an `out` as large as its result is."""
    if like.numel():
        made = _empty_strided(like.shape, like.stride(), like.dtype)
        out.set_(made.untyped_storage(), 0, like.shape, like.stride())


def _as_meta(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")


def _written(op: Any, args: Any, kwargs: Any) -> Any:
    """What an operation returns that writes its arguments; None for others."""
    schema = op._schema
    names = {each.name: place for place, each in enumerate(schema.arguments)}
    changed = [each for each in schema.arguments if each.alias_info and each.alias_info.is_write]
    if not changed:
        return None
    found = [
        kwargs[each.name] if each.name in kwargs else args[names[each.name]] for each in changed
    ]
    return found[0] if len(schema.returns) == 1 else tuple(found) if schema.returns else ()


@functools.cache
def _registered() -> Any:
    allow_cuda_tensors()
    own, every = torch.library.Library("aten", "IMPL"), torch.library.Library("_", "IMPL")
    for name, function in (
        ("empty.memory_format", _empty),
        ("empty_strided", _empty_strided),
        ("_to_copy", _to_copy),
        ("copy_", _copy),
    ):
        own.impl(name, function, "CUDA")
    every.fallback(_any, "CUDA")
    return own, every


class _Runtime:
    """As much of `torch.cuda.cudart()` as is called."""

    def cudaHostRegister(self, address: int, nbytes: int, flags: int) -> int:  # noqa: N802
        PINNED[address] = nbytes
        return 0

    def cudaHostUnregister(self, address: int) -> int:  # noqa: N802
        return 0 if PINNED.pop(address, 0) else 713


@contextlib.contextmanager
def _stream(stream: Stream | None) -> Iterator[None]:
    before = STREAMS.current
    STREAMS.current = stream or before
    try:
        yield
    finally:
        STREAMS.current = before


def _tensor(data: Any, *, dtype: Any = None, device: Any = None, **given: Any) -> torch.Tensor:
    made = _TENSOR(data, dtype=dtype, **given)
    return made if device is None else made.to(device)


_TENSOR = torch.tensor
_PROPERTIES = SimpleNamespace(
    name="none", major=9, minor=0, multi_processor_count=132, total_memory=80 << 30
)


@contextlib.contextmanager
def gpu() -> Iterator[None]:
    """Give this process a GPU, whose work runs in an order by `STREAMS.seed`. At the end, what is queued has run."""
    _registered()
    own = {
        "_lazy_init": lambda: None,
        "init": lambda: None,
        "is_available": lambda: True,
        "device_count": lambda: 1,
        "current_device": lambda: 0,
        "set_device": lambda _: None,
        "_exchange_device": lambda _: 0,
        "_maybe_exchange_device": lambda _: 0,
        "get_device_capability": lambda *_: (9, 0),
        "get_device_properties": lambda *_: _PROPERTIES,
        "mem_get_info": lambda *_: (70 << 30, 80 << 30),
        "cudart": _Runtime,
        "is_current_stream_capturing": lambda: bool(STREAMS.captured),
        "CUDAGraph": Graph,
        "graph": Capture,
        "graph_pool_handle": new_pool,
        "Stream": Stream,
        "ExternalStream": lambda handle, device=None: Stream(device, handle=handle),
        "Event": Event,
        "stream": _stream,
        "current_stream": lambda *_: STREAMS.current,
        "default_stream": lambda *_: STREAMS.default,
        "synchronize": lambda *_: STREAMS.finish_all(),
    }
    with contextlib.ExitStack() as stack:
        for name, value in own.items():
            stack.enter_context(mock.patch.object(torch.cuda, name, value))
        stack.enter_context(mock.patch.object(torch, "tensor", _tensor))
        STREAMS.start()
        try:
            yield
        finally:
            STREAMS.stop()
