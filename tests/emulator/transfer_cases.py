# SPDX-License-Identifier: Apache-2.0
"""Transfer kernels against their references in torch, byte for byte: every codec, and every variant that is
compiled differently."""

import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from extents import names

from pd_kernels.transfer import PayloadShape, Planes, Resharding, Stored, finish, new_sums
from pd_kernels.transfer.chunk_launch import ChunkLaunch
from pd_kernels.transfer.gather import launch_gather, reference_gather
from pd_kernels.transfer.reshard import launch_reshard, reference_reshard
from pd_kernels.transfer.scatter import launch_scatter, reference_scatter
from pd_kernels.transfer.sums import launch_payload_sums, reference_payload_sums

BF16, FP16, FP32, FP8 = torch.bfloat16, torch.float16, torch.float32, torch.float8_e4m3fn
PAGE, FIRST, LAYERS = 16, 5, 2
Launch = Callable[[ChunkLaunch], None]


class Cache:
    """Pages of random numbers, `[layer, page, head, token, K and V]`; `odd` rows begin at odd addresses."""

    def __init__(
        self, dtype: torch.dtype, heads: int, dims: tuple[int, ...], odd: bool, tokens: int
    ) -> None:
        self.dims, self.tokens = dims, tokens
        self.pages = -(-(FIRST + tokens) // PAGE)
        self.table = 1 + torch.randperm(self.pages + 2)[: self.pages].int()
        """Not page 0, the number that a load which is masked off gives."""
        numbers = torch.randn(LAYERS, self.pages + 3, heads, PAGE, sum(dims) + odd) * 3
        self.storage = numbers.to(dtype)

    def planes(self, codec: str, source: Stored, destination: Stored) -> Planes:
        parts = [layer[..., : sum(self.dims)].split(self.dims, dim=3) for layer in self.storage]
        values = [part[1] for part in parts] if len(self.dims) > 1 else []
        keys = [part[0] for part in parts]
        planes = Planes.of(keys, values, PAGE, codec, source, destination)
        names(planes.table, [chunk for view in planes.views for chunk in self._tokens(view)])
        return planes

    def _tokens(self, view: torch.Tensor) -> Iterator[torch.Tensor]:
        """The chunk's tokens in each of its pages, `[head, token, dim]`."""
        for number, page in enumerate(self.table.tolist()):
            begin, end = FIRST - number * PAGE, FIRST + self.tokens - number * PAGE
            yield view[page, :, max(0, begin) : min(PAGE, end)]

    def bits(self) -> torch.Tensor:
        """With all NaN alike: which of them a conversion gives is nobody's promise."""
        quiet = torch.full_like(self.storage, torch.nan)
        return torch.where(self.storage.isnan(), quiet, self.storage).view(torch.uint8)


def stored(dtype: torch.dtype, dims: tuple[int, ...]) -> Stored:
    return Stored(dtype, (0.3,) * (len(dims) * LAYERS) if dtype == FP8 else ())


def transfer(
    codec: str,
    source: torch.dtype = BF16,
    destination: torch.dtype = BF16,
    heads: int = 2,
    dims: tuple[int, ...] = (128, 128),
    odd: bool = False,
    check: bool = False,
    tokens: int = 40,
    edges: bool = False,
) -> None:
    """Gather a chunk, and scatter its payload into another cache. `edges` puts infinities, a NaN, and FP8's
    largest among the numbers."""
    torch.manual_seed(3)
    ours, theirs = (Cache(each, heads, dims, odd, tokens) for each in (source, destination))
    if edges:
        first, second = ours.storage[:, ours.table[1].long(), :2].unbind(
            1
        )  # `[layer, token, K and V]`
        first[:, 0, 3], first[:, 1, 6], first[0, 2, 77] = torch.inf, -torch.inf, torch.nan
        second[:, 3, 5] = 448
    kinds = stored(source, dims), stored(destination, dims)
    planes = ours.planes(codec, *kinds)
    nbytes = planes.nbytes(tokens)

    def sums() -> torch.Tensor | None:
        return new_sums(nbytes, torch.device("cpu")) if check else None

    def run(launch: Launch, planes: Planes, table: torch.Tensor, slot: torch.Tensor) -> bytes:
        added = sums()
        launch(ChunkLaunch(planes, table, slot, FIRST, tokens, added))
        return b"" if added is None else finish(added, nbytes)

    slots = [torch.full((nbytes,), 0xA5, dtype=torch.uint8) for _ in range(2)]
    digest = run(reference_gather, planes, ours.table, slots[0])
    assert digest == run(launch_gather, planes, ours.table, slots[1]), "sums of the gather differ"
    assert torch.equal(*slots), f"{int((slots[0] != slots[1]).sum())} bytes of the payload differ"
    before = theirs.storage.clone()
    found = run(launch_scatter, theirs.planes(codec, *kinds), theirs.table, slots[0])
    by_kernel, theirs.storage = theirs.bits(), before
    wanted = run(reference_scatter, theirs.planes(codec, *kinds), theirs.table, slots[0])
    assert found == wanted == digest, "sums of the scatter differ"
    assert torch.equal(by_kernel, theirs.bits()), "pages differ"


def _parts(rows: torch.Tensor, table: torch.Tensor) -> list[torch.Tensor]:
    """The rows of an engine's pages, each of which has two."""
    return [rows[2 * page : 2 * page + 2] for page in table.tolist()]


def verbatim(check: bool = False) -> None:
    """Some heads of whole pages, there and back."""
    torch.manual_seed(4)
    rows = torch.randint(0, 256, (9, 4, 3 * 1024), dtype=torch.uint8)
    table = torch.tensor([3, 1, 2], dtype=torch.int32)
    planes = Planes.of_rows([rows[:, 1:3]], 2)
    names(planes.table, _parts(planes.views[0], table))
    nbytes = planes.nbytes(6)
    slots = [torch.full((nbytes,), 0xA5, dtype=torch.uint8) for _ in range(2)]
    sums = [new_sums(nbytes, slots[0].device) if check else None for _ in slots]
    for launch, slot, own in zip((reference_gather, launch_gather), slots, sums, strict=True):
        launch(ChunkLaunch(planes, table, slot, 0, 6, own))
    assert torch.equal(*slots), "the payload differs"
    assert sums[0] is None or sums[1] is None or torch.equal(sums[0].sum(), sums[1].sum())
    found, wanted = torch.zeros(2, *rows.shape, dtype=torch.uint8)
    for launch, into in ((launch_scatter, found), (reference_scatter, wanted)):
        planes = Planes.of_rows([into[:, 1:3]], 2)
        names(planes.table, _parts(planes.views[0], table))
        launch(ChunkLaunch(planes, table, slots[0], 0, 6, None))
    assert wanted.any()
    assert torch.equal(found, wanted), "pages differ"


def reshard(codec: str, before: int, after: int) -> None:
    torch.manual_seed(5)
    payload = PayloadShape(codec, 4, 2, 40, 128, 128, 2)
    sources = [torch.randint(0, 256, (payload.nbytes(before),)).byte() for _ in range(before)]
    found = []
    for launch in (reference_reshard, launch_reshard):
        room = payload.nbytes(after)
        slabs = [torch.full((room,), 0xA5, dtype=torch.uint8) for _ in range(after)]
        told = Resharding.of(sources, slabs, payload)
        names(told.table, [*sources, *slabs])
        launch(told)
        found.append(torch.stack(slabs))
    assert torch.equal(*found), "slabs differ"


def payload_sums() -> None:
    torch.manual_seed(6)
    payload = torch.randint(0, 256, (100_000,)).byte()
    sums = new_sums(len(payload), payload.device)
    launch_payload_sums(payload, sums)
    wanted = new_sums(len(payload), payload.device).add_(reference_payload_sums(payload))
    assert finish(sums, len(payload)) == finish(wanted, len(payload)), "sums differ"


Case = Callable[[], None]
_MLA: dict[str, Any] = {"heads": 1, "dims": (576,)}
_UNLIKE: dict[str, Any] = {"dims": (192, 128)}
TRANSFERS: dict[str, Case] = {
    name: functools.partial(transfer, codec, **given)
    for name, codec, given in (
        ("raw", "raw", {}),
        ("raw, sums", "raw", {"check": True}),
        ("raw, MLA", "raw", _MLA),
        ("raw, odd rows", "raw", {"odd": True}),
        ("raw, 192 and 128", "raw", _UNLIKE),
        ("raw, float32 to bfloat16", "raw", {"source": FP32}),
        ("raw, FP8 to bfloat16", "raw", {"source": FP8}),
        ("raw, bfloat16 to FP8", "raw", {"destination": FP8, "check": True}),
        ("raw, FP8", "raw", {"source": FP8, "destination": FP8}),
        ("fp8", "fp8_e4m3", {}),
        ("fp8, sums", "fp8_e4m3", {"check": True}),
        ("fp8, MLA", "fp8_e4m3", _MLA),
        ("fp8, scale given", "fp8_e4m3", {"destination": FP8, "check": True}),
        ("fp8, 192 and 128", "fp8_e4m3", _UNLIKE),
        ("fp8, float16", "fp8_e4m3", {"source": FP16, "destination": FP16, "check": True}),
        ("fp8, float32", "fp8_e4m3", {"source": FP32, "destination": FP32, "check": True}),
        ("fp8, odd rows", "fp8_e4m3", {"odd": True}),
        ("fp8, 80", "fp8_e4m3", {"dims": (80, 80), "check": True}),
        ("fp8, two scales", "fp8_e4m3", {"tokens": 140, "check": True}),
        ("fp8, edges", "fp8_e4m3", {"edges": True, "check": True}),
        ("int8", "int8", {}),
        ("int8, sums", "int8", {"check": True}),
        ("int8, two scales", "int8", {"tokens": 140, "check": True}),
        ("int8, MLA", "int8", _MLA),
        ("int8, 80", "int8", {"dims": (80, 80), "check": True}),
        ("int8, 192 and 128", "int8", _UNLIKE),
        ("int8, odd rows", "int8", {"odd": True}),
        ("int8, float32", "int8", {"source": FP32, "destination": FP32, "check": True}),
        ("int8, float16 to FP8", "int8", {"source": FP16, "destination": FP8, "check": True}),
    )
} | {
    "verbatim": verbatim,
    "verbatim, sums": functools.partial(verbatim, check=True),
    "reshard, int8": functools.partial(reshard, "int8", 4, 2),
    "reshard, raw": functools.partial(reshard, "raw", 1, 4),
    "reshard, fp8": functools.partial(reshard, "fp8_e4m3", 2, 1),
    "payload sums": payload_sums,
}
