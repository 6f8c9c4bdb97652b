# SPDX-License-Identifier: Apache-2.0
"""Finds contradictions between the configs of engines that serve together: roles, codecs, pools, drafts, hosts.
Pure."""

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from pd_connector.config import HOST_VARIABLE, KEY_VARIABLE, Config
from pd_connector.errors import ConfigError
from pd_connector.pool.codecs import PoolCodecs, pool_codecs
from pd_connector.tools.cli.checks.finding import Finding, Status
from pd_connector.tools.cli.checks.transfer_config import (
    ENGINE_HOST_VARIABLE,
    Drafting,
    Written,
    extra_of,
    parts_of,
)

_WITHOUT_KV = ("medusa", "mlp_speculator", "ngram", "ngram_gpu", "suffix")
"""Methods whose drafts have no KV, so none has to pass."""
_NAMES = ("method", "model")
"""What makes two drafts alike."""


_ALIKE: Mapping[str, tuple[object, str]] = {
    "dir": (
        None,
        "the catalog knows one disk folder, and an engine with another one does not start",
    ),
    "tenants": ([], "each engine divides the pool by its own list"),
}
"""Keys of `pool` that all engines of a host share: what counts where one is left out, and what happens if they differ."""

RoleAndConfig = tuple[str, Mapping[str, Any]]
"""An engine's `kv_role` and `kv_connector_extra_config`."""


def together(configs: Sequence[Written]) -> Iterator[Finding]:
    """Findings about engines that serve together, each of which is right alone."""
    ours = [
        (written.place, part)
        for written in configs
        if isinstance(written.value, Mapping)
        for part in parts_of(written.value)
    ]
    roles = {str(part.get("kv_role")) for _, part in ours}
    if len(ours) > 1 and len(roles) == 1 and roles <= {"kv_producer", "kv_consumer"}:
        yield Finding(
            ours[0][0],
            "roles",
            Status.FAIL,
            f"all {len(ours)} engines are {roles.pop()}: no KV can move between them",
            "give prefill engines kv_producer and decode engines kv_consumer",
        )
    codecs = {str(extra_of(part).get("codec", "raw")) for _, part in ours}
    if len(codecs) > 1:
        yield Finding(
            ours[0][0],
            "codec",
            Status.WARN,
            f"the engines name different codecs ({', '.join(sorted(codecs))}): one that only one side permits is not used",
            "set `codec` alike on both sides",
        )
    by_role = [(str(part.get("kv_role")), extra_of(part)) for _, part in ours]
    if by_role:
        yield from pools_together(ours[0][0], by_role)


def reaches_others(text: str, configs: Sequence[Written]) -> Iterator[Finding]:
    """Whether engines that a file starts in different pods or on different hosts can reach each other.

    Args:
        text: the whole file.
    """
    hosts = [
        "host" in extra_of(part)
        for written in configs
        if isinstance(written.value, Mapping)
        for part in parts_of(written.value)
    ]
    named = any(variable in text for variable in (HOST_VARIABLE, ENGINE_HOST_VARIABLE))
    named |= "network_mode: host" in text  # a compose file of one machine
    if hosts and not all(hosts) and not named:
        yield Finding(
            configs[0].place.partition(":")[0],
            "host",
            Status.WARN,
            "no engine is told its own address: KV passes between processes of one machine only",
            f"in each pod set {HOST_VARIABLE} to the pod's address (valueFrom: fieldRef: status.podIP), and the same "
            f"{KEY_VARIABLE} from a Secret",
        )


def drafts_together(engines: Sequence[Drafting]) -> Iterator[Finding]:
    """All findings. Engines that are all `kv_both` may share a pool only."""
    for engine in engines:
        draft = _draft(engine.speculation)
        if not draft or engine.role == "kv_producer":
            continue
        lacking = [
            other.place
            for other in engines
            if other is not engine
            and other.role != "kv_consumer"
            and _draft(other.speculation) != draft
        ]
        if lacking:
            yield Finding(
                engine.place,
                "drafts",
                Status.WARN,
                f"the engine drafts ({_text(draft)}), and the engine of {', '.join(lacking)} does not have that draft model: "
                "KV of that engine is not taken here, by a handoff or from a pool, since no draft would be accepted after it",
                "give both engines the same --speculative-config",
            )


def _draft(speculation: str) -> Mapping[str, Any]:
    """The draft model of a `--speculative-config`, if it keeps KV; empty otherwise. A text that is not JSON is kept as
    one value."""
    if not speculation:
        return {}
    try:
        config = json.loads(speculation)
    except ValueError:
        return {"config": speculation}
    named = {name: config[name] for name in _NAMES if name in config}
    kept_nowhere = any(str(value) in _WITHOUT_KV for value in named.values())
    return {} if kept_nowhere else named


def _text(draft: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} {value}" for name, value in draft.items())


def pools_together(place: str, engines: Sequence[RoleAndConfig]) -> Iterator[Finding]:
    """All findings.

    Args:
        place: where the configs were found.
    """
    pools = [config["pool"] for _, config in engines if config.get("pool")]
    given = [pool if isinstance(pool, Mapping) else {} for pool in pools]
    for key, (default, why) in _ALIKE.items():
        named = {json.dumps(pool.get(key, default)) for pool in given} - {"null"}
        if len(named) > 1:
            text = f"the engines name different pool.{key} ({', '.join(sorted(named))}): on one host, {why}"
            advice = f"set `pool.{key}` alike on all engines of a host"
            yield Finding(place, f"pool.{key}", Status.WARN, text, advice)
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
    """The codecs of an engine; None if its config is wrong; another finding says so."""
    given = {key: config[key] for key in ("codec", "pool") if key in config}
    try:
        return pool_codecs(Config.load(given, {}, ENGINE_HOST_VARIABLE), consumes=consumes)
    except ConfigError:
        return None


def _kept_in(pool: object) -> str:
    return str(pool.get("codec", "raw")) if isinstance(pool, Mapping) else "raw"
