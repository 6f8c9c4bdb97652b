# SPDX-License-Identifier: Apache-2.0
"""What both sides compute by themselves stays as it is within a schema, or a rolling upgrade fails chunk by chunk."""

import hashlib
import random
from dataclasses import replace

import msgspec
import pytest

from pd_connector.kv.geometry import Geometry, Group, Section, Shard, state_group
from pd_connector.plan.chunks import chunk_limit, plan
from pd_connector.plan.route import routes
from pd_connector.plan.rules import RULES, PlanRules

CODECS = ("fp8_e4m3", "int8", "raw")
_FIRST = "0e58cb27db347d1306936e3baf1f2044a2c5331c98206f1e9175cc7da8e14a13"
DIGESTS = {1: _FIRST, 2: _FIRST}
"""Digests of the routes and plans of 1,500 pairs that schema 1 can say, by schema."""
EXTENDED_DIGESTS = {2: "83274e10f5017baad4a0e90b8b64b6b7395dd736f3fde762e027fb52e3400b78"}
"""Digests of the routes and plans of 500 pairs with states, context parallelism or entries for several tokens."""


def some_group(chosen: random.Random) -> dict[str, object]:
    """What the producer's and the consumer's layers have in common."""
    heads = chosen.choice([1, 2, 4, 8])
    latent = heads == 1 and chosen.random() < 0.5
    return {
        "kind": "latent" if latent else "attention",
        "layers": tuple(range(chosen.choice([1, 3, 8, 32]))),
        "heads": heads,
        "key_dim": chosen.choice([64, 96, 128]),
        "value_dim": 0 if latent else chosen.choice([64, 128]),
    }


def some_geometry(chosen: random.Random, common: dict[str, object], window: int) -> Geometry:
    """How one rank of a side holds them."""
    dtype = chosen.choice(["bfloat16", "bfloat16", "float32", "fp8_e4m3"])
    tp = chosen.choice([1, 1, 2, 4])
    layers = common["layers"]
    assert isinstance(layers, tuple)
    group = Group(
        **common,  # type: ignore[arg-type]
        page_size=chosen.choice([16, 16, 32, 128]),
        window=window,
        dtype=dtype,
        layout=chosen.choice(["HND", "HND", "NHD"]),
        heads_apart=chosen.random() < 0.5,
        scales=((0.5, 0.25),) * len(layers) if dtype == "fp8_e4m3" else (),
    )
    return Geometry(Shard(0, len(layers), chosen.randrange(tp), tp), (group,))


def digest_of(rules: PlanRules) -> str:
    chosen, summed = random.Random(7), hashlib.sha256()
    for _ in range(1500):
        common, window = some_group(chosen), chosen.choice([0, 0, 40])
        pair = [some_geometry(chosen, common, window) for _ in range(2)]
        accepted = chosen.choice([CODECS, ("int8", "raw"), ("raw",)])
        paths = routes(*pair, CODECS, accepted, rules)
        first = chosen.choice([0, 0, 16, 128])
        stop = first + chosen.choice([1, 15, 100, 1000, 2000, 5000])
        slot_bytes = chosen.choice([1 << 20, 16 << 20])
        limit = chunk_limit(paths, stop - first, slot_bytes, chosen.choice([None, 3e7, 1e9]))
        for path in paths:
            known = path.layers, path.heads, path.source_head, path.destination_head, path.codec
            summed.update(repr((*known, path.verbatim)).encode())
        for streamed in (False, True):
            try:
                chunks = plan(paths, first, stop, limit, streamed=streamed)
            except ValueError:
                summed.update(b"no plan")
                continue
            for chunk in chunks:
                summed.update(repr((*chunk, chunk.nbytes(paths[chunk.route]))).encode())
    return summed.hexdigest()


def extended_geometry(chosen: random.Random, page: int, entry: int, units: int) -> Geometry:
    """A rank with attention, whose tokens others may share, and states."""
    tp, pcp = chosen.choice([1, 2, 4, 8]), chosen.choice([1, 1, 2])
    cp = chosen.choice([n for n in (1, 2, 4) if max(1, tp // 2) * pcp % n == 0])
    shard = Shard(0, 6, chosen.randrange(tp), tp, cp, chosen.randrange(pcp), pcp)
    interleave = chosen.choice([entry, page]) if cp > 1 else 0
    kv = Group("attention", (0, 1, 2), 2, 64, 64, page, 0, "bfloat16", "HND", True)
    kv = msgspec.structs.replace(kv, state_tokens=entry, interleave=interleave)
    sections = (
        Section("conv.q", units, 3, 32, "bfloat16"),
        Section("ssm", 16, 64, 64, "float32"),
    )
    return Geometry(shard, (kv, state_group((3, 4, 5), sections, table=1)))


def digest_of_extended(rules: PlanRules) -> str:
    chosen, summed = random.Random(7), hashlib.sha256()
    for _ in range(500):
        entry, units = chosen.choice([1, 4]), chosen.choice([1, 2, 16])
        pages = [entry * chosen.choice([8, 32]) for _ in range(2)]
        pair = [extended_geometry(chosen, page, entry, units) for page in pages]
        paths = routes(*pair, CODECS, chosen.choice([CODECS, ("raw",)]), rules)
        stop = chosen.choice([1, 15, 100, 1000, 5000])
        limit = chunk_limit(paths, stop, 1 << 20, chosen.choice([None, 3e7]))
        for path in paths:
            known = path.layers, path.heads, path.source_head, path.destination_head, path.codec
            tokens = path.stripes and path.stripes.runs
            name = path.section and path.section.name
            summed.update(repr((*known, path.verbatim, tokens, name)).encode())
        for chunk in plan(paths, 0, stop, limit, state_token=max(1, stop - 1)):
            summed.update(repr((*chunk, chunk.nbytes(paths[chunk.route]))).encode())
    return summed.hexdigest()


@pytest.mark.parametrize("schema", sorted(EXTENDED_DIGESTS))
def test_what_schema_2_added_stays_as_it_was(schema: int) -> None:
    """See `test_routes_and_plans_of_a_schema_stay_as_they_were`."""
    assert digest_of_extended(RULES[schema]) == EXTENDED_DIGESTS[schema]


@pytest.mark.parametrize("schema", sorted(RULES))
def test_routes_and_plans_of_a_schema_stay_as_they_were(schema: int) -> None:
    """If this fails, what was changed needs a schema of its own (`protocol/wire/messages.py`)."""
    assert digest_of(RULES[schema]) == DIGESTS[schema]


def test_the_constant_for_models_with_states_shows_in_the_plans() -> None:
    other = replace(RULES[2], spare_bytes_beside_states=RULES[2].spare_bytes)
    assert digest_of_extended(other) != EXTENDED_DIGESTS[2]
    assert digest_of(other) == DIGESTS[2]


@pytest.mark.parametrize(("schema", "edges"), [(1, (0, 128, 256, 512)), (2, (0, 192, 384, 576))])
def test_pieces_are_whole_pages_of_any_size_from_schema_2_on(
    schema: int, edges: tuple[int, ...]
) -> None:
    """The digests have page sizes that divide 128, for which both are the same."""
    group = Group("attention", (0,), 8, 128, 128, 96, 0, "bfloat16", "HND", True)
    geometry = Geometry(Shard(0, 1, 0, 1), (group,))
    paths = routes(geometry, geometry, CODECS, ("raw",), RULES[schema])
    chunks = plan(paths, 0, 3499, chunk_limit(paths, 3499, 16 << 20, None))
    assert tuple(chunk.first_token for chunk in chunks[:4]) == edges


@pytest.mark.parametrize(
    "name",
    sorted({*PlanRules.__dataclass_fields__} - {"spare_bytes_beside_states", "whole_pieces"}),
)
def test_every_constant_shows_in_the_plans(name: str) -> None:
    """So that the digests would notice a change of any of them."""
    other = replace(RULES[1], **{name: getattr(RULES[1], name) * 2})
    assert digest_of(other) != DIGESTS[1]
