# SPDX-License-Identifier: Apache-2.0
"""Runs the Gluon kernel's own code on a CPU: what it computes, and what its barriers promise.

Gluon has no interpreter. Here each function of the kernel runs as plain Python, with torch in place
of Gluon's operations, and each partition of `warp_specialize` as a thread of its own. One thread
runs at a time; which one goes on is drawn by chance wherever one waits or arrives. What a GPU does
at any later time is done as late, or as early, as chance has it:

- a TMA load writes its buffer some time after it was asked for; until then the buffer is NaN;
- an asynchronous product reads its operands between its begin and the wait for it.

Errors: a barrier for which nobody comes (`DeadlockError`); a product that reads shared memory which
threads have stored to without `fence_async_shared` since (`UnfencedError`). Not emulated: layouts,
threads within a partition and their `barrier`, memory order.
"""

import random
import threading
import types
from collections.abc import Callable
from typing import Any

import torch

from pd_kernels.attention import mla_gluon_kernel, plan_kernel

KERNEL = mla_gluon_kernel.latent_attention_tma
"""Taken here, because tests put something else in its place."""


class DeadlockError(Exception):
    """All partitions wait."""


class UnfencedError(Exception):
    """A product reads what was stored without a fence."""


class Pointer:
    """An address, or a tensor of addresses, in elements of a tensor."""

    def __init__(self, base: torch.Tensor, place: Any = 0) -> None:
        self.base, self.place = base, place
        self.dtype = types.SimpleNamespace(element_ty=base.dtype)

    @classmethod
    def to(cls, tensor: torch.Tensor) -> "Pointer":
        storage = tensor.as_strided(
            (tensor.untyped_storage().nbytes() // tensor.itemsize,), (1,), 0
        )
        return cls(storage, tensor.storage_offset())

    def __add__(self, more: Any) -> "Pointer":
        return Pointer(self.base, self.place + more)

    def __getitem__(self, index: Any) -> "Pointer":
        return Pointer(self.base, self.place[index])


class Shared:
    """A buffer in shared memory, or a view of one."""

    def __init__(self, data: torch.Tensor, machine: "Machine", name: Any) -> None:
        self.data, self.machine, self.name = data, machine, name
        self.shape, self.dtype = list(data.shape), data.dtype

    def index(self, place: int) -> "Shared":
        return Shared(self.data[place], self.machine, (self.name, place))

    def permute(self, order: tuple[int, ...]) -> "Shared":
        return Shared(self.data.permute(order), self.machine, self.name)

    def slice(self, start: int, length: int, dim: int = 0) -> "Shared":
        return Shared(self.data.narrow(dim, start, length), self.machine, self.name)

    def store(self, value: torch.Tensor) -> None:
        self.machine.unfenced.setdefault(threading.current_thread(), set()).add(self.name)
        self.data.copy_(value)

    def load(self, layout: Any) -> torch.Tensor:
        return self.data.clone()


class Barrier:
    """An mbarrier: a phase ends when all have arrived and all bytes are there."""

    def __init__(self, machine: "Machine") -> None:
        self.machine = machine
        self.count = self.missing = self.bytes = self.phase = 0

    def init(self, count: int) -> None:
        self.count = self.missing = count

    def change(self, arrivals: int = 0, nbytes: int = 0) -> None:
        self.missing -= arrivals
        self.bytes += nbytes
        assert self.missing >= 0, "more arrivals than a barrier counts"
        if not self.missing and not self.bytes:
            self.phase += 1
            self.missing = self.count


class Barriers:
    def __init__(self, machine: "Machine", count: int) -> None:
        self.all = [Barrier(machine) for _ in range(count)]

    def index(self, place: int) -> Barrier:
        return self.all[place]


class Product:
    """An asynchronous product: computed when it is waited for, at the latest."""

    def __init__(self, a: Shared, b: Shared, before: Any, add: bool, machine: "Machine") -> None:
        self.a, self.b, self.before, self.add, self.machine = a, b, before, add, machine
        self.found: torch.Tensor | None = None

    def compute(self) -> torch.Tensor:
        if self.found is None:
            for stored in self.machine.unfenced.values():
                if {self.a.name, self.b.name} & stored:
                    raise UnfencedError(f"{self.a.name} or {self.b.name}")
            before = self.before.compute() if isinstance(self.before, Product) else self.before
            found = self.a.data.float() @ self.b.data.float()
            self.found = before + found if self.add else found
        return self.found


class Machine:
    """Shared memory, barriers and the partitions of one program.

    Args:
        seed: of the order in which partitions go on, and of when loads and products are done.
    """

    def __init__(self, seed: int) -> None:
        self.chance = random.Random(seed)
        self.unfenced: dict[Any, set[Any]] = {}
        self.flying: list[Callable[[], None]] = []
        self.products: dict[Any, list[Product]] = {}
        self.allocated = 0
        self._blocked: dict[threading.Thread, Callable[[], bool] | None] = {}
        self._turn = threading.Condition()
        self._now: threading.Thread | None = None
        self._error: BaseException | None = None

    def allocate(self, dtype: Any, shape: list[int], layout: Any, value: Any = None) -> Any:
        if dtype == torch.int64:
            return Barriers(self, shape[0])
        self.allocated += 1
        fill = float("nan")
        return Shared(torch.full(shape, fill, dtype=dtype), self, self.allocated)

    def load(self, source: Any, place: list[Any], barrier: Barrier, buffer: Shared) -> None:
        """A TMA load of a box. The buffer may change from now on, and is NaN until it has."""
        row, column = (int(each) for each in place)
        high, wide = buffer.shape
        assert list(source.block_shape) == [high, wide]
        buffer.data.fill_(float("nan"))

        def land() -> None:
            box = source.base[row : row + high, column : column + wide]
            buffer.data[: len(box)] = box
            buffer.data[len(box) :] = 0.0
            barrier.change(nbytes=-high * wide * buffer.dtype.itemsize)

        self.flying.append(land)

    def product(self, a: Shared, b: Shared, before: Any, *, use_acc: bool = True, is_async: bool):
        assert is_async
        made = Product(a, b, before, use_acc, self)
        self.products.setdefault(threading.current_thread(), []).append(made)
        if self.chance.random() < 0.5:
            made.compute()
        return made

    def finish(self, pending: int = 0, deps: Any = ()) -> Any:
        under_way = self.products.setdefault(threading.current_thread(), [])
        while len(under_way) > pending:
            under_way.pop(0).compute()
        (result,) = deps
        done = isinstance(result, Product) and (not under_way or result is not under_way[-1])
        return result.compute() if done else result

    def fence(self) -> None:
        self.unfenced.pop(threading.current_thread(), None)

    def wait(self, barrier: Barrier, phase: Any) -> None:
        parity = int(phase)
        self._go_on(lambda: barrier.phase & 1 != parity)

    def arrive(self, barrier: Barrier) -> None:
        barrier.change(arrivals=1)
        self._go_on(lambda: True)

    def expect(self, barrier: Barrier, nbytes: int) -> None:
        barrier.change(arrivals=1, nbytes=nbytes)

    def run(self, parts: list[tuple[Callable[..., None], tuple[Any, ...]]], *_: Any) -> None:
        """`warp_specialize`: run all partitions until they have ended."""

        def partition(function: Callable[..., None], arguments: tuple[Any, ...]) -> None:
            me = threading.current_thread()
            try:
                self._await_turn(me)
                function(*arguments)
            except BaseException as error:  # told to the test below
                self._error = self._error or error
            finally:
                with self._turn:
                    self._blocked.pop(me)
                    self._choose()

        threads = [threading.Thread(target=partition, args=part, daemon=True) for part in parts]
        self._blocked = dict.fromkeys(threads)
        for thread in threads:
            thread.start()
        with self._turn:
            self._choose()
        for thread in threads:
            thread.join()
        if self._error:
            raise self._error
        assert not self.flying, "a load is under way when the program ends"

    def _go_on(self, ready: Callable[[], bool]) -> None:
        me = threading.current_thread()
        with self._turn:
            self._blocked[me] = ready
            self._choose()
        self._await_turn(me)

    def _await_turn(self, me: threading.Thread) -> None:
        with self._turn:
            self._turn.wait_for(lambda: self._now is me or self._error is not None)
            if self._error:
                raise DeadlockError("another partition has failed") from self._error
            self._blocked[me] = None

    def _choose(self) -> None:
        """Let loads land, and say who goes on."""
        while self._blocked:
            while self.flying and self.chance.random() < 0.4:
                self._land()
            able = [each for each, ready in self._blocked.items() if ready is None or ready()]
            if able:
                self._now = self.chance.choice(able)
                break
            if not self.flying:
                self._error = self._error or DeadlockError("all partitions wait")
                break
            self._land()
        self._turn.notify_all()

    def _land(self) -> None:
        """Let one of the loads land."""
        try:
            self.flying.pop(self.chance.randrange(len(self.flying)))()
        except AssertionError as error:  # told to the test by `run`
            self._error = self._error or error


def _load(pointer: Pointer, mask: Any = None, other: Any = 0.0) -> torch.Tensor:
    place = torch.as_tensor(pointer.place)
    if mask is None:
        return pointer.base[place]
    place, mask = torch.broadcast_tensors(place, mask)
    found = pointer.base[torch.where(mask, place, 0)]
    return torch.where(mask, found, torch.as_tensor(other, dtype=found.dtype))


def _store(pointer: Pointer, value: torch.Tensor, mask: Any = None) -> None:
    place = torch.as_tensor(pointer.place)
    place, value = torch.broadcast_tensors(place, value)
    if mask is not None:
        mask = mask.expand(place.shape)
        place, value = place[mask], value[mask]
    pointer.base[place.flatten()] = value.flatten().to(pointer.base.dtype)


def _atomic_add(pointer: Pointer, value: int, sem: str) -> None:
    pointer.base[pointer.place] += value


def _common() -> dict[str, Any]:
    """What stands in for operations of Triton and Gluon alike."""
    return {
        "constexpr": object,
        "load": _load,
        "store": _store,
        "atomic_add": _atomic_add,
        "where": lambda condition, a, b: torch.where(torch.as_tensor(condition), a, b),
        "maximum": lambda a, b: torch.maximum(torch.as_tensor(a), torch.as_tensor(b)),
        "minimum": lambda a, b: torch.minimum(torch.as_tensor(a), torch.as_tensor(b)),
        "int32": torch.int32,
        "int64": torch.int64,
        "float32": torch.float32,
        "exp2": torch.exp2,
        "log2": torch.log2,
        "max": torch.amax,
        "sum": torch.sum,
        "zeros_like": torch.zeros_like,
        "arange": lambda begin, end, layout=None: torch.arange(begin, end),
        "full": lambda shape, value, dtype, layout=None: torch.full(shape, value, dtype=dtype),
        "zeros": lambda shape, dtype, layout=None: torch.zeros(shape, dtype=dtype),
        "convert_layout": lambda value, layout: value,
        "SliceLayout": lambda dim, parent: None,
        "static_range": range,
        "range": lambda begin, end, disable_licm: range(begin, end),
    }


def emulate(seed: int, program: int, changed: dict[str, Any], arguments: dict[str, Any]) -> None:
    """Run one program of `latent_attention_tma`.

    Args:
        seed: see `Machine`.
        program: its number.
        changed: functions of the kernel that are replaced, by name: for negative controls.
        arguments: of the kernel, by the names of its parameters.
    """
    machine = Machine(seed)
    own = {
        "program_id": lambda axis: torch.tensor(program),
        "allocate_shared_memory": machine.allocate,
        "warp_specialize": machine.run,
    }
    world: dict[str, Any] = {}
    fake = types.SimpleNamespace(**_common(), **own)
    for module in (plan_kernel, mla_gluon_kernel):
        for name, value in vars(module).items():
            function = getattr(value, "fn", None)
            if isinstance(function, types.FunctionType):
                world[name] = types.FunctionType(function.__code__, world, name)
            elif type(value).__name__ == "constexpr":
                world[name] = value.value
    world |= {
        "gl": fake,
        "tl": fake,
        "mbarrier": types.SimpleNamespace(
            MBarrierLayout=lambda: None,
            init=lambda barrier, count: barrier.init(count),
            wait=machine.wait,
            arrive=machine.arrive,
            expect=machine.expect,
        ),
        "_load": machine.load,
        "_synchronize": lambda: None,
        "fence_async_shared": machine.fence,
        "warpgroup_mma": machine.product,
        "warpgroup_mma_wait": machine.finish,
    }
    world |= changed
    given = {
        name: Pointer.to(value) if isinstance(value, torch.Tensor) else value
        for name, value in arguments.items()
    }
    for name in ("halves", "tails"):
        source = given[name]
        given[name] = types.SimpleNamespace(
            base=source.base,
            block_shape=source.block_shape,
            dtype=source.base.dtype,
            layout=None,
        )
    types.FunctionType(KERNEL.fn.__code__, world)(**given)
