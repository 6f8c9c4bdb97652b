# SPDX-License-Identifier: Apache-2.0
"""Describes a rotation that an engine has loaded: by its defining values if the engine's table of cosines and sines
agrees with them, otherwise by what is known of it.
"""

import json
import logging
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from pd_connector.kv.rotation import Rotation, rotation_of

logger = logging.getLogger("pd_connector.kv.rotation")

Row = Callable[[int], Sequence[float] | None]
"""Cosines, then sines, at a position of the table in use; None where the table ends before it."""

_NEAR = (1, 3, 17)
"""Positions at which a table is compared with what its parameters say. It has to have them."""
_FAR = (1024, 16384)
"""More of them, if it has them. The farther, the smaller a difference of frequencies that shows; at the
last of these float32 is good for 0.002."""
_TOLERANCE = 0.02
"""Tables may be kept in bfloat16."""
_ROWS = 32
"""First positions of tables that stand for them where parameters do not."""


class Made(NamedTuple):
    """What an engine made a rotation with. See `rotation_of`."""

    parameters: Mapping[str, Any]
    dims: int
    interleaved: bool
    max_positions: int
    long: bool = False

    @property
    def rotation(self) -> Rotation:
        return rotation_of(
            self.parameters,
            dims=self.dims,
            interleaved=self.interleaved,
            max_positions=self.max_positions,
            long=self.long,
        )


def rotation_text(module: Any, made: Made | None, row: Row | None = None) -> str:
    """The text by which engines compare a rotation.

    Args:
        module: the engine's torch module.
        made: the arguments that it was made with; None if they are unknown.
        row: reads a row of its table, if the table is not the buffer `cos_sin_cache`.
    """
    buffers = dict(module.named_buffers(recurse=False))
    row = row or table_row(buffers.get("cos_sin_cache"))
    kind = type(module).__name__
    if made is not None:
        rotation = made.rotation
        if not rotation.frequencies or agrees(rotation, row):
            return rotation.text
        logger.warning(
            "the rotary table of %s is not what its parameters say: engines are compared by the table",
            kind,
        )
    numbers = {
        name: value
        for name, value in vars(module).items()
        if isinstance(value, int | float | str) and not name.startswith("_") and name != "training"
    }
    tables = {
        name: [f"{number:.3f}" for number in table[:_ROWS].double().flatten().tolist()]
        for name, table in buffers.items()
        if table.is_floating_point() and table.dim()
    }
    description = {"numbers": numbers, "made": made._asdict() if made else {}, "tables": tables}
    return f"{kind} {json.dumps(description, sort_keys=True, default=str)}"


def table_row(table: Any, first: int = 0, stop: int | None = None) -> Row:
    """Rows of a tensor [position, cosines and sines]; rows `first` to `stop` are in use. If the tensor is
    None, there is no table."""

    def row(position: int) -> Sequence[float] | None:
        if table is None or table.dim() != 2:
            return None
        if position >= (len(table) if stop is None else stop) - first:
            return None
        values: list[float] = table[first + position].double().tolist()
        return values

    return row


def agrees(rotation: Rotation, row: Row) -> bool:
    """Whether a table has the values of this rotation; True if there is no table."""
    if row(0) is None:
        return True
    pairs = len(rotation.frequencies)
    for position in (*_NEAR, *_FAR):
        values = row(position)
        if values is None and position in _FAR:
            break
        if values is None or len(values) < 2 * pairs:
            return False
        angles = [position * frequency for frequency in rotation.frequencies]
        expected = [math.cos(angle) for angle in angles] + [math.sin(angle) for angle in angles]
        off = max(
            abs(number - rotation.magnitude * unit)
            for number, unit in zip(values, expected, strict=False)
        )
        if not off <= _TOLERANCE * max(1.0, rotation.magnitude):
            logger.debug("position %d is off by %g", position, off)
            return False
    return True
