# SPDX-License-Identifier: Apache-2.0
"""Whether KV and states can pass between two caches; if not, why, with both sides' values. Pure functions."""

import math

from pd_connector.errors import UnsupportedGeometryError
from pd_connector.kv.coding import ELEMENT_BYTES
from pd_connector.kv.geometry import STATE_BYTES, Geometry, Group, Shard


def check(side: str, geometry: Geometry) -> None:
    """Raises UnsupportedGeometryError if a geometry contradicts itself.

    Args:
        side: `producer` or `consumer`, for the message.
    """
    shard = geometry.shard
    if shard.tp_rank >= shard.tp_size:
        raise UnsupportedGeometryError(f"{side} is rank {shard.tp_rank} of {shard.tp_size}")
    if shard.pcp_rank >= shard.pcp_size:
        raise UnsupportedGeometryError(
            f"{side} is rank {shard.pcp_rank} of {shard.pcp_size} ranks of prefill context parallelism"
        )
    seen: set[int] = set()
    for group in geometry.groups:
        if twice := seen.intersection(group.layers):
            raise UnsupportedGeometryError(f"{side} has layer {min(twice)} twice")
        seen.update(group.layers)
        for total in group.shares:
            if total % shard.tp_size and shard.tp_size % total:
                what = "units of a state" if group.sections else "KV heads"
                raise UnsupportedGeometryError(
                    f"{side} shares {total} {what} among {shard.tp_size} ranks: "
                    "one must divide the other"
                )
        if problem := _misfit(shard, group):
            raise UnsupportedGeometryError(f"{side} {problem}")
        if group.scales and len(group.scales) != len(group.layers):
            raise UnsupportedGeometryError(
                f"{side} has {len(group.scales)} scales for {len(group.layers)} layers"
            )
        if not all(0 < scale < math.inf for pair in group.scales for scale in pair):
            raise UnsupportedGeometryError(f"{side} has scales {group.scales}: must be above 0")


def _misfit(shard: Shard, group: Group) -> str:
    """What is wrong with a group's states, entries or share of the tokens, whatever the other side has; empty: nothing."""
    where = f"layers {group.layers[0]}-{group.layers[-1]}"
    if group.kind == "state":
        names = [section.name for section in group.sections]
        if not names or len(set(names)) < len(names):
            return f"has states with sections {', '.join(names) or 'none'} in {where}: names must differ"
        for section in group.sections:
            if section.dtype not in STATE_BYTES:
                allowed = ", ".join(STATE_BYTES)
                return f"has {section.name} of {section.dtype} in {where}: must be one of {allowed}"
        if group.interleave or group.state_tokens > 1:
            return f"has states in {where} that are split by tokens (interleave {group.interleave}): they never are"
        return ""
    if group.sections:
        return f"has sections in {where}, which are of kind {group.kind}: only states have them"
    if group.page_size % group.state_tokens:
        return f"has an entry for {group.state_tokens} tokens in pages of {group.page_size} in {where}: must divide them"
    if not group.interleave:
        return ""
    if group.page_size % group.interleave or group.interleave % group.state_tokens:
        return (
            f"has an interleave of {group.interleave} tokens in {where}, pages of {group.page_size} and an entry "
            f"for {group.state_tokens}: each must be a multiple of the next smaller one"
        )
    holders = shard.replicas(group.heads)
    if holders % shard.cp_size:
        return (
            f"shares the tokens of {where} among {shard.cp_size} context-parallel ranks, and {holders} ranks hold the "
            "same heads: must be a multiple"
        )
    return ""


def _unlike_states(ours: Group, theirs: Group, where: str) -> str:
    """Why states cannot pass from one group to the other; empty if they can."""
    sections = {section.name: section for section in theirs.sections}
    if {section.name for section in ours.sections} != set(sections):
        names = (", ".join(section.name for section in group.sections) for group in (ours, theirs))
        return f"{where}: producer / consumer keep states with sections {' / '.join(names)}: must be alike"
    hints = {
        "rows": "; start both engines with the same number of speculative tokens",
        "dtype": "; states are not converted: start both engines with the same --mamba-cache-dtype and --mamba-ssm-cache-dtype",
    }
    for mine in ours.sections:
        other = sections[mine.name]
        for name in ("units", "rows", "dim", "dtype"):
            if (here := getattr(mine, name)) != (there := getattr(other, name)):
                hint = hints.get(name, "")
                return f"{where}: producer / consumer differ in {name} of {mine.name} {here} / {there}{hint}"
    return ""


def unlike(ours: Group, theirs: Group, layers: tuple[int, ...]) -> str:
    """Why KV cannot pass from one group to the other; empty if it can."""
    where = f"layers {layers[0]}-{layers[-1]}"
    for name in ("kind", "heads", "key_dim", "value_dim", "state_tokens"):
        if getattr(ours, name) != getattr(theirs, name):
            return (
                f"{where}: producer / consumer differ in {name} "
                f"{getattr(ours, name)} / {getattr(theirs, name)}"
            )
    if ours.kind == "state":
        return _unlike_states(ours, theirs, where)
    if ours.window and not 0 < theirs.window <= ours.window:
        needed = theirs.window or "all"
        return (
            f"{where}: producer keeps a window of {ours.window} tokens, consumer wants {needed}; "
            "start both engines with the hybrid KV cache manager, or both without it"
        )
    convertible = ours.dtype in ELEMENT_BYTES and theirs.dtype in ELEMENT_BYTES
    same = [getattr(ours, n) == getattr(theirs, n) for n in ("dtype", "layout", "page_size")]
    if not convertible and not all(same):
        return (
            f"{where}: cache dtype {ours.dtype} / {theirs.dtype}, layout {ours.layout} / "
            f"{theirs.layout}, page size {ours.page_size} / {theirs.page_size}: "
            f"only {', '.join(ELEMENT_BYTES)} can be converted, others must be alike: start both engines with the "
            "same --kv-cache-dtype, --block-size and attention backend"
        )
    return ""
