# SPDX-License-Identifier: Apache-2.0
"""Settings of the KV pool that do not fit together, by the configs of engines that serve together. Pure."""

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from pd_connector.config import Config
from pd_connector.errors import ConfigError
from pd_connector.pool.codecs import PoolCodecs, pool_codecs
from pd_connector.tools.cli.checks.finding import Finding, Status

HOST_VARIABLE = "VLLM_HOST_IP"
"""vLLM's own variable for the address of its host."""

_ALIKE: Mapping[str, tuple[object, str]] = {
    "dir": (None, "the books know one disk folder, and an engine with another one does not start"),
    "tenants": ([], "each engine divides the pool by its own list"),
}
"""Keys of `pool` that all engines of a host share: what counts where one is left out, and what happens if they differ."""

RoleAndConfig = tuple[str, Mapping[str, Any]]
"""An engine's `kv_role` and `kv_connector_extra_config`."""


def together(place: str, engines: Sequence[RoleAndConfig]) -> Iterator[Finding]:
    """All findings.

    Args:
        place: where the configs were found.
    """
    pools = [config["pool"] for _, config in engines if config.get("pool")]
    given = [pool if isinstance(pool, Mapping) else {} for pool in pools]
    for key, (default, why) in _ALIKE.items():
        named = {json.dumps(pool.get(key, default)) for pool in given} - {"null"}
        if len(named) > 1:
            found = f"the engines name different pool.{key} ({', '.join(sorted(named))}): on one host, {why}"
            advice = f"set `pool.{key}` alike on all engines of a host"
            yield Finding(place, f"pool.{key}", Status.WARN, found, advice)
    kept = {_kept_in(config["pool"]) for _, config in engines if config.get("pool")}
    if len(kept) > 1:
        yield Finding(
            place,
            "pool.codec",
            Status.WARN,
            f"the engines keep chunks in different codecs ({', '.join(sorted(kept))}): on one host, a prompt is kept once, in "
            "the codec of the engine that was first, and engines that do not permit it compute the prompt",
            "set `pool.codec` alike on all engines of a host",
        )
    if not any(_refuses(*pair) for pair in _pairs(engines)):
        return
    here = any(_keeps_int8(*engine) for engine in engines)
    loads = "loads INT8 chunks" + ("" if here else " if another engine of its host keeps such")
    yield Finding(
        place,
        "pool.codec",
        Status.FAIL if here else Status.WARN,
        f"a prefill engine {loads}, and what it computes on them has their error: decode engines that permit raw only "
        "refuse all KV of that engine, once it has loaded one",
        "set `codec: raw` and `pool.codec: raw` on prefill engines, or permit int8 on decode engines (`codec`, or "
        "`pool.codec`)",
    )


def _pairs(
    engines: Sequence[RoleAndConfig],
) -> Iterator[tuple[Mapping[str, Any], Mapping[str, Any]]]:
    """Configs of prefill engines and of decode engines that take KV from them. Engines that are all `kv_both` may share
    a pool only."""
    for role, prefill in engines:
        for other, decode in engines:
            if role != "kv_consumer" and other != "kv_producer" and role != other:
                yield prefill, decode


def _refuses(prefill: Mapping[str, Any], decode: Mapping[str, Any]) -> bool:
    pool, codecs = prefill.get("pool"), _codecs(prefill, consumes=False)
    reads = pool is True or (isinstance(pool, Mapping) and pool.get("read") is not False)
    permitted = _codecs(decode, consumes=True)
    if codecs is None or permitted is None:
        return False
    return reads and "int8" in codecs.readable and "int8" not in permitted.readable


def _keeps_int8(role: str, config: Mapping[str, Any]) -> bool:
    """Whether chunks that an engine keeps have passed in INT8, at rest or in handoffs to it."""
    pool = config.get("pool")
    given = pool if isinstance(pool, Mapping) else {}
    if not pool or given.get("write") is False:
        return False
    alone = {**config, "pool": {**given, "read": False}}  # without what it loads
    codecs = _codecs(alone, consumes=role != "kv_producer")
    return codecs is not None and codecs.passed == "int8"


def _codecs(config: Mapping[str, Any], *, consumes: bool) -> PoolCodecs | None:
    """The codecs of an engine; None if its config is wrong, which another finding tells."""
    told = {key: config[key] for key in ("codec", "pool") if key in config}
    try:
        return pool_codecs(Config.load(told, {}, HOST_VARIABLE), consumes=consumes)
    except ConfigError:
        return None


def _kept_in(pool: object) -> str:
    return str(pool.get("codec", "raw")) if isinstance(pool, Mapping) else "raw"
