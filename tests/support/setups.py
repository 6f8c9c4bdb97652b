# SPDX-License-Identifier: Apache-2.0
"""Engines that are made up: which models they serve, and what their ranks hold. Without torch."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

from hypothesis import strategies as st

from pd_connector.kv.geometry import Geometry, Group, Kind, Shard

HEADS_APART = frozenset({"HND", "HND in parts", "packed", "packed in parts", "apart", "tiled"})
"""Layouts (`support.caches.LAYOUTS`) in which each head's part of a page is one run of bytes."""


class Layer(NamedTuple):
    """What one layer of a model keeps."""

    heads: int = 2
    key_dim: int = 8
    value_dim: int = 8
    window: int = 0
    kind: Kind = "attention"


Model = tuple[Layer, ...]
LATENT = Layer(heads=1, key_dim=12, value_dim=0, kind="latent")


@dataclass(frozen=True)
class Setup:
    """How an engine serves a model.

    Attributes:
        tp: ranks that share heads.
        starts: the first layer of each pipeline stage.
        labels: of each layer; layers of one label and one kind share a page table.
        page_sizes: of each label.
        windows: whether pages before a layer's window are given up.
        scales: of K and V of every layer.
    """

    tp: int = 1
    starts: tuple[int, ...] = (0,)
    labels: tuple[int, ...] = ()
    page_sizes: tuple[int, ...] = (16,)
    windows: bool = True
    dtype: str = "bfloat16"
    layout: str = "HND"
    scales: tuple[float, float] = (1.0, 1.0)

    def geometries(self, model: Model) -> tuple[Geometry, ...]:
        """Each rank's, all ranks of the first stage first."""
        stops = (*self.starts[1:], len(model))
        return tuple(
            Geometry(Shard(first, stop, rank, self.tp), tuple(self._groups(model, first, stop)))
            for first, stop in zip(self.starts, stops, strict=True)
            for rank in range(self.tp)
        )

    def _groups(self, model: Model, first: int, stop: int) -> Iterator[Group]:
        labels = self.labels or (0,) * len(model)
        alike: dict[tuple[Layer, int], list[int]] = {}
        for number in range(first, stop):
            alike.setdefault((model[number], labels[number]), []).append(number)
        for table, ((layer, label), numbers) in enumerate(alike.items()):
            yield Group(
                layer.kind,
                tuple(numbers),
                layer.heads,
                layer.key_dim,
                layer.value_dim,
                self.page_sizes[label],
                layer.window if self.windows else 0,
                self.dtype,
                self.layout,
                heads_apart=self.layout in HEADS_APART,
                table=table,
                scales=(self.scales,) * len(numbers) if self.dtype == "fp8_e4m3" else (),
            )


@st.composite
def models(draw: st.DrawFn) -> Model:
    """Layers of one or two kinds of attention, or of MLA."""
    count = draw(st.integers(1, 6))
    if draw(st.integers(0, 3)) == 0:
        return (LATENT,) * count
    heads = st.sampled_from([1, 2, 4, 8])
    full = Layer(draw(heads))
    sliding = Layer(draw(heads), window=draw(st.sampled_from([1, 2, 16, 17, 40, 100])))
    return tuple(draw(st.sampled_from([full, sliding])) for _ in range(count))


@st.composite
def setups(draw: st.DrawFn, model: Model, windows: bool) -> Setup:
    """Any way to serve the model."""
    cuts = draw(st.sets(st.integers(1, len(model) - 1), max_size=2)) if len(model) > 1 else set()
    sizes = st.sampled_from([16, 32, 64, 128])
    return Setup(
        tp=draw(st.sampled_from([1, 2, 4, 8])),
        starts=(0, *sorted(cuts)),
        labels=tuple(draw(st.integers(0, 1)) for _ in model),
        page_sizes=(draw(sizes), draw(sizes)),
        windows=windows,
        dtype=draw(st.sampled_from(["bfloat16", "float32", "fp8_e4m3"])),
        layout=draw(st.sampled_from(["HND", "NHD", "apart"])),
    )


@st.composite
def pairs(draw: st.DrawFn) -> tuple[Model, Setup, Setup]:
    """A model, and a producer and a consumer that serve it."""
    model = draw(models())
    consumer_windows = draw(st.booleans())
    source = draw(setups(model, consumer_windows and draw(st.booleans())))
    destination = draw(setups(model, consumer_windows))
    if draw(st.booleans()):  # so that whole pages pass often enough
        destination = replace(
            destination,
            labels=source.labels,
            page_sizes=source.page_sizes,
            dtype=source.dtype,
            layout=source.layout,
        )
    return model, source, destination
