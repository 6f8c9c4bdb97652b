# SPDX-License-Identifier: Apache-2.0
"""The rotation that a layer applies to its keys (rotary position embedding), by its defining values.

Engines keep tables of cosines in different dtypes, but compute them from the same values: the
frequency of each pair of dims, a magnitude, and which dims form a pair. These values are computed
here in float64 from the parameters that a layer was made with, so two engines agree in every digit.
"""

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

_DIGITS = 9
"""Significant digits that count: float32 has seven."""
_STANDARD = frozenset(
    {"default", "linear", "dynamic", "llama3", "yarn", "deepseek_yarn", "longrope"}
)
_NOT_DEFINING = frozenset({"type", "rope_type", "rope_theta"})


class Rotation(NamedTuple):
    """How keys are rotated.

    Attributes:
        dims: dims of a head that are rotated, from the first on.
        interleaved: whether dims 2i and 2i + 1 form a pair, and not i and i + dims / 2.
        frequencies: radians per position of each pair. Empty where the type is not known here: then
            `parameters` define the rotation.
        magnitude: factor of cosine and sine.
        parameters: other values that define the rotation, such as the sections of a multimodal
            rotation; as JSON.
    """

    dims: int
    interleaved: bool
    frequencies: tuple[float, ...]
    magnitude: float
    parameters: str

    @property
    def text(self) -> str:
        """All of it, in digits that count."""
        numbers = ",".join(_text(number) for number in (*self.frequencies, self.magnitude))
        order = "interleaved" if self.interleaved else "halves"
        return f"{self.dims} {order} {numbers} {self.parameters}"


def rotation_of(
    parameters: Mapping[str, Any],
    *,
    dims: int,
    interleaved: bool,
    max_positions: int,
    long: bool = False,
) -> Rotation:
    """The rotation with these parameters.

    Args:
        parameters: `rope_parameters` of a model's config, `rope_type` and `rope_theta` among them.
        dims: dims of a head that are rotated.
        interleaved: see `Rotation`.
        max_positions: positions that the layer was made for. Counts for the types `dynamic` and
            `longrope`, and for those that are not known here.
        long: for `longrope`, whether the factors for long sequences are in use.

    >>> plain = {"rope_type": "default", "rope_theta": 10000.0}
    >>> rotation_of(plain, dims=4, interleaved=False, max_positions=4096).frequencies
    (1.0, 0.01)
    """
    kind = str(parameters.get("rope_type", parameters.get("type", "default")))
    base = float(parameters.get("rope_theta", 10000.0))
    rest = {name: value for name, value in parameters.items() if name not in _NOT_DEFINING}
    computed = kind in _STANDARD and not (kind == "dynamic" and "alpha" in rest)
    if not computed or rest.get("use_fope") or rest.get("is_deepseek_v4"):
        defining = {**rest, "rope_type": kind, "rope_theta": base, "max_positions": max_positions}
        return Rotation(dims, interleaved, (), 1.0, _json(defining))
    plain = _frequencies(base, dims)
    magnitude = 1.0
    if kind == "linear":
        plain = [frequency / float(rest["factor"]) for frequency in plain]
    elif kind == "dynamic":
        plain = _dynamic(rest, base, dims, max_positions)
    elif kind == "llama3":
        plain = _llama3(rest, plain)
    elif kind == "yarn":
        plain, magnitude = _yarn(rest, base, dims, plain), _yarn_magnitude(rest)
    elif kind == "deepseek_yarn":
        plain, magnitude = _yarn(rest, base, dims, plain), _deepseek_magnitude(rest)
    elif kind == "longrope":
        factors = rest["long_factor" if long else "short_factor"]
        plain = [f / float(factor) for f, factor in zip(plain, factors, strict=True)]
        magnitude = _long_magnitude(rest, max_positions, long)
    sections = {name: value for name, value in rest.items() if name.startswith("mrope") and value}
    return Rotation(dims, interleaved, tuple(plain), magnitude, _json(sections))


def _frequencies(base: float, dims: int) -> list[float]:
    return [base ** (-2 * pair / dims) for pair in range(dims // 2)]


def _dynamic(rest: Mapping[str, Any], base: float, dims: int, max_positions: int) -> list[float]:
    factor = float(rest["factor"])
    trained = float(rest.get("max_trained_positions", max_positions))
    stretch = factor * max_positions / trained - (factor - 1)
    return _frequencies(base * stretch ** (dims / (dims - 2)), dims)


def _llama3(rest: Mapping[str, Any], plain: Sequence[float]) -> list[float]:
    factor, low, high = (
        float(rest[name]) for name in ("factor", "low_freq_factor", "high_freq_factor")
    )
    positions = float(rest["original_max_position_embeddings"])

    def scaled(frequency: float) -> float:
        wavelength = 2 * math.pi / frequency
        if wavelength < positions / high:
            return frequency
        if wavelength > positions / low:
            return frequency / factor
        smooth = 0.0 if low == high else (positions / wavelength - low) / (high - low)
        return (1 - smooth) * frequency / factor + smooth * frequency

    return [scaled(frequency) for frequency in plain]


def _yarn(rest: Mapping[str, Any], base: float, dims: int, plain: Sequence[float]) -> list[float]:
    factor = float(rest["factor"])
    positions = float(rest["original_max_position_embeddings"])

    def dim_of(turns: float) -> float:
        return dims * math.log(positions / (turns * 2 * math.pi)) / (2 * math.log(base))

    low, high = dim_of(float(rest.get("beta_fast", 32))), dim_of(float(rest.get("beta_slow", 1)))
    if rest.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dims - 1)
    width = (high - low) or 0.001

    def scaled(pair: int, frequency: float) -> float:
        kept = 1 - min(1.0, max(0.0, (pair - low) / width))
        return frequency / factor * (1 - kept) + frequency * kept

    return [scaled(pair, frequency) for pair, frequency in enumerate(plain)]


def _growth(factor: float, mscale: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1


def _yarn_magnitude(rest: Mapping[str, Any]) -> float:
    factor = float(rest["factor"])
    if rest.get("attention_factor") is not None:
        return float(rest["attention_factor"])
    mscale, all_dims = rest.get("mscale"), rest.get("mscale_all_dim")
    if not mscale or not all_dims:
        return _growth(factor, 1.0)
    return _growth(factor, float(mscale)) / _growth(factor, float(all_dims))


def _deepseek_magnitude(rest: Mapping[str, Any]) -> float:
    factor, mscale, all_dims = (
        float(rest.get(name, default))
        for name, default in (("factor", 1), ("mscale", 1), ("mscale_all_dim", 0))
    )
    grown = _growth(factor, mscale) / _growth(factor, all_dims)
    return grown * float(rest.get("attn_factor", 1))


def _long_magnitude(rest: Mapping[str, Any], max_positions: int, long: bool) -> float:
    magnitude = rest.get("long_mscale" if long else "short_mscale")
    if magnitude is not None:
        return float(magnitude)
    original = float(rest["original_max_position_embeddings"])
    stretch = max_positions / original
    return 1.0 if stretch <= 1 else math.sqrt(1 + math.log(stretch) / math.log(original))


def _json(values: Mapping[str, Any]) -> str:
    return json.dumps(_rounded(values), sort_keys=True, default=str) if values else ""


def _rounded(value: Any) -> Any:
    """The same with numbers as text, so that 8 and 8.0 are one."""
    if isinstance(value, Mapping):
        return {str(name): _rounded(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [_rounded(each) for each in value]
    if isinstance(value, int | float) and not isinstance(value, bool):
        return _text(value)
    return value


def _text(number: float) -> str:
    return f"{float(number):.{_DIGITS}g}"
