# SPDX-License-Identifier: Apache-2.0
"""Loads, stores and atomics."""

from typing import Any

import numpy as np
from arithmetic import Function, operation
from gangs import Lanes
from memory import Array, FaultError, Memory
from operands import Operands, UnknownError

SPACES = ("param", "global", "shared", "shared_cta")


def space(o: Operands) -> str:
    found = [each for each in o.modifiers if each in SPACES]
    if len(found) != 1:
        raise UnknownError(f"the space of memory is not known: {o.instruction}")
    return "shared" if found[0] == "shared_cta" else found[0]


def shared_addresses(lanes: Lanes, addresses: Any, size: int, where: object) -> Array:
    """Places of the active threads' accesses in the shared memory of all CTAs."""
    launch, own = lanes.launch, lanes.active(addresses)
    if (own % min(size, 16)).any():
        raise FaultError(f"misaligned access of {size} bytes to shared memory: {where}")
    if own.min() < 0 or own.max() + size > launch.shared_bytes:
        raise FaultError(
            f"out of bounds: {own.max()} + {size} of {launch.shared_bytes} bytes: {where}"
        )
    return own + lanes.of(launch.cta) * launch.shared_bytes


@operation("ld")
def _load(o: Operands) -> Function:
    kind, size, instruction = space(o), o.dtype.itemsize, o.instruction
    writes = o.writes(0)
    if kind == "param":
        return _load_parameter(o)
    address = o.address(1)
    polling = bool({"acquire", "volatile", "relaxed"} & set(o.modifiers))
    nbytes = size * len(writes)

    def load(lanes: Lanes) -> None:
        launch, warps = lanes.launch, lanes.warps
        if kind == "shared":
            memory, places = (
                launch.shared,
                shared_addresses(lanes, address(lanes), nbytes, instruction),
            )
            pieces = launch.shared_shadow.pieces(places, nbytes)
            launch.shared_shadow.read(warps, lanes.of(launch.lane), pieces, instruction)
        else:
            memory, places = launch.memory, lanes.active(address(lanes))
            if "acquire" in o.modifiers:
                _synchronise(lanes, places, acquire=True, release=False)
            launch.shadow.check(warps, places, nbytes, instruction, write=False, atomic=polling)
            lanes.impatient |= polling
        for number, write in enumerate(writes):
            values = memory.load(places + size * number, size)
            write(lanes, lanes.spread(values).view(o.dtype))

    return load


def _load_parameter(o: Operands) -> Function:
    write, address, size = o.write(), o.address(1), o.dtype.itemsize

    def load(lanes: Lanes) -> None:
        places = lanes.active(address(lanes))
        write(lanes, lanes.spread(lanes.launch.parameters.load(places, size)).view(o.dtype))

    return load


@operation("st")
def _store(o: Operands) -> Function:
    kind, size, instruction, address = space(o), o.dtype.itemsize, o.instruction, o.address(0)
    reads = o.reads(1, np.dtype(f"u{size}"))
    nbytes = size * len(reads)
    if kind == "param" or {"release", "relaxed", "volatile"} & set(o.modifiers):
        raise UnknownError(f"not known: {instruction}")

    def store(lanes: Lanes) -> None:
        launch, warps = lanes.launch, lanes.warps
        values = [lanes.active(read(lanes)) for read in reads]
        if kind == "shared":
            places = shared_addresses(lanes, address(lanes), nbytes, instruction)
            same = _there(launch.shared, places, values, size)
            pieces = launch.shared_shadow.pieces(places, nbytes)
            launch.shared_shadow.write(warps, pieces, instruction, lanes.of(launch.lane), same=same)
        else:
            places = lanes.active(address(lanes))
            launch.shadow.check(warps, places, nbytes, instruction, write=True)
        memory = launch.shared if kind == "shared" else launch.memory
        for number, own in enumerate(values):
            memory.store(places + size * number, own, size)
        if not _there(memory, places, values, size).all():
            raise FaultError(f"race: threads write different values to one place: {instruction}")

    return store


def _there(memory: Memory, places: Array, values: list[Array], size: int) -> Array:
    """Where memory holds these values. Warps that hold the same values may all write them."""
    found = [memory.load(places + size * number, size) == own for number, own in enumerate(values)]
    same: Array = np.logical_and.reduce(found)
    return same


def _synchronise(lanes: Lanes, addresses: Array, acquire: bool, release: bool) -> None:
    """One warp after another learns what was told at these addresses, and tells what it knows."""
    launch = lanes.launch
    pairs = dict.fromkeys(zip(lanes.warps.tolist(), addresses.tolist(), strict=True))
    for number, address in pairs:
        warp, told = np.array([number]), launch.released.get(address)
        if acquire and told is not None:
            launch.clocks.learn(warp, told)
        if release:
            own = launch.clocks.release(warp)
            launch.released[address] = own if told is None else np.maximum(own, told)


@operation("atom", "red")
def _atomic(o: Operands) -> Function:
    """Threads one after another, in any order: in that of their numbers."""
    returns = o.instruction.name == "atom"
    write = o.write() if returns else None
    address, value = o.address(returns), o.read(1 + returns)
    size, instruction, dtype = o.dtype.itemsize, o.instruction, o.dtype
    functions: dict[str, Any] = {"add": np.add, "max": np.maximum, "min": np.minimum, "exch": None}
    kinds = [each for each in o.modifiers if each in (*functions, "cas", "or", "and", "xor", "inc")]
    function = o.known(functions, kinds[0])
    order = {"relaxed", "acq_rel", "acquire", "release"} & set(o.modifiers)
    if space(o) != "global" or len(order) != 1:
        raise UnknownError(f"not known: {instruction}")

    def atomic(lanes: Lanes) -> None:
        launch, places = lanes.launch, lanes.active(address(lanes))
        launch.shadow.check(lanes.warps, places, size, instruction, write=True, atomic=True)
        if order != {"relaxed"}:
            acquire, release = "acquire" in order, "release" in order
            both = "acq_rel" in order
            _synchronise(lanes, places, acquire or both, release or both)
        lanes.impatient |= write is not None
        view, own = launch.memory.views[size].view(dtype), lanes.active(value(lanes))
        cells = (places - launch.memory.first) // size
        if write is None and function is not None:
            cells, places = np.unique(cells, return_inverse=True)
            changed = view[cells]
            function.at(changed, places, own)
            view[cells] = changed
            return
        old = np.empty(len(cells), dtype)
        for place, cell in enumerate(cells.tolist()):
            old[place] = view[cell]
            view[cell] = own[place] if function is None else function(view[cell], own[place])
        if write is not None:
            write(lanes, lanes.spread(old))

    return atomic
