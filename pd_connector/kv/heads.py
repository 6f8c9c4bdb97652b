# SPDX-License-Identifier: Apache-2.0
"""Number of KV heads of a layer in the whole model. It can differ between layers of one model, so it is read from each
layer."""

from collections.abc import Collection, Iterable

from pd_connector.errors import UnsupportedGeometryError

_NAMES = ("total_num_kv_heads", "num_total_kv_heads")
"""Attributes of engines' modules: of an attention, and of the projection that shards its K and V."""


def named_heads(modules: Iterable[object]) -> frozenset[int]:
    """The numbers of KV heads in the whole model that modules of a layer name; empty if none does.

    >>> class Projection: total_num_kv_heads = 8
    >>> sorted(named_heads([object(), Projection()]))
    [8]
    """
    values = (getattr(module, name, None) for module in modules for name in _NAMES)
    return frozenset(int(value) for value in values if isinstance(value, int))


def total_heads(layer: str, own: int, ranks: int, named: Collection[int]) -> int:
    """KV heads of a layer in the whole model.

    If each rank holds one head, the total cannot be computed from the number of ranks: several ranks can hold the same
    head.

    Args:
        layer: its name, for messages.
        own: heads that each rank holds.
        ranks: number of ranks of the tensor-parallel group.
        named: from `named_heads` of the layer's modules.

    Raises:
        UnsupportedGeometryError: the number is not known, or contradicts `own`.

    >>> total_heads("layers.0", own=1, ranks=8, named={4})  # two ranks hold the same head
    4
    """
    if ranks == 1:
        return own
    if len(named) == 1:
        (total,) = named
        if own == max(1, total // ranks):
            return total
    elif not named and own > 1:
        return own * ranks
    what = f"names {' and '.join(map(str, sorted(named)))} in the whole model" if named else ""
    raise UnsupportedGeometryError(
        f"{layer} keeps {own} KV heads on each of {ranks} ranks, and its attention {what or 'does not say how many it has'}: "
        "PDConnector cannot tell which heads a rank holds; start the engine with --tensor-parallel-size 1, or without "
        "PDConnector"
    )
