# SPDX-License-Identifier: Apache-2.0
"""The KV pool of this user on this host: where it lies, what is in it, and why it is off."""

import os
from dataclasses import replace
from pathlib import Path

from pd_connector.errors import ConfigError, PDConnectorError
from pd_connector.pool.advertised import advertised_engines
from pd_connector.pool.room import file_system
from pd_connector.pool.settings import SHM_VARIABLE, load, memory_folder, text_of
from pd_connector.pool.store.base import DISK
from pd_connector.pool.store.local import LocalStore
from pd_connector.pool.store.tier_storage import Space
from pd_connector.tools.cli.checks import carrier
from pd_connector.tools.cli.checks.facts import Facts, Pool
from pd_connector.tools.cli.checks.finding import Finding, Status

AREA = "KV pool"


def look() -> Pool:
    """The facts. Changes nothing."""
    memory = memory_folder()
    tmpfs = memory.parents[1]
    size = 0
    if os.path.isdir(tmpfs):
        room = os.statvfs(tmpfs)
        size = room.f_blocks * room.f_frsize
    budget, refused = 0, ""
    try:
        if settings := load(True):
            budget = settings.memory.budget
            inner = next(path for path in (memory, memory.parent, tmpfs) if os.path.isdir(path))
            if not os.access(inner, os.W_OK | os.X_OK):
                refused = f"{inner}: this user cannot write there; mount it writable, or name another tmpfs in {SHM_VARIABLE}"
    except ConfigError as error:
        refused = str(error)
    facts = Pool(
        str(memory), file_system(tmpfs), size, budget, refused, carrier=carrier.look(memory)
    )
    if not os.path.isdir(memory):
        return facts
    try:
        return _inside(facts, memory)
    except (PDConnectorError, OSError) as error:
        return replace(facts, refused=refused or str(error))


def _inside(facts: Pool, memory: Path) -> Pool:
    store = LocalStore(Space(memory, 0), visits=True)
    try:
        status = store.status()
        disk = next((Path(tier.path) for tier in status.tiers if tier.name == DISK), None)
        if disk is not None:
            store.close()
            store = LocalStore(Space(memory, 0), Space(disk, 0), visits=True)
            status = store.status()
        held = tuple(
            (tier.name, tier.path, tier.chunks, tier.nbytes, tier.budget) for tier in status.tiers
        )
        unknown = tuple(
            engine.engine for engine in advertised_engines(store.advertised()) if not engine.model
        )
        return Pool(
            facts.folder,
            facts.kind,
            facts.tmpfs_bytes,
            facts.default_bytes,
            facts.refused,
            held,
            status.engines - 1,
            unknown,
            status.problem,
            tuple((tier.tier, tier.why) for tier in status.unwritable),
            facts.carrier,
        )
    finally:
        store.close()


def check(facts: Facts) -> list[Finding]:
    """All findings of this area."""
    pool = facts.pool
    if pool is None:
        return []
    far = carrier.findings(pool.carrier, AREA)
    return [folder(pool), *contents(pool), *engines(pool), *far]


def folder(pool: Pool) -> Finding:
    """Whether an engine with `pool: true` would start."""
    text = f"{pool.folder} ({pool.kind or 'nothing there'}, {text_of(pool.tmpfs_bytes)})"
    if not pool.refused:
        text += f"; memory by default {text_of(pool.default_bytes)}"
        return Finding(AREA, "folder", Status.OK, text)
    advice = f"engines with the config key pool do not start: {pool.refused}"
    return Finding(AREA, "folder", Status.WARN, text, advice)


def contents(pool: Pool) -> list[Finding]:
    """What is held, by tier."""
    if not pool.held:
        text = "no engine of this user has used it since this machine started"
        return [Finding(AREA, "contents", Status.OK, text)]
    lines = []
    for tier, path, chunks, nbytes, budget in pool.held:
        of = f" of {text_of(budget)}" if budget else ""
        lines.append(
            Finding(
                AREA,
                tier,
                Status.OK,
                f"{chunks:,} chunks, {text_of(nbytes)}{of}, in {path}",
            )
        )
    return lines


def engines(pool: Pool) -> list[Finding]:
    """The engines that use it, and why one of them does not."""
    if not pool.held:
        return []
    lines = [Finding(AREA, "engines", Status.OK, f"{pool.engines} processes use it")]
    if pool.problem:
        advice = "engines repair that by themselves within seconds; look-ups go on"
        lines.append(Finding(AREA, "saves", Status.WARN, pool.problem, advice))
    for tier, why in pool.unwritable:
        place, _, advice = why.partition("; ")
        lines.append(Finding(AREA, f"saves in {tier}", Status.WARN, place, advice))
    if pool.unknown:
        text = f"{', '.join(pool.unknown)}: does not know all bytes of its weights"
        advice = (
            "it neither reads nor writes until it does: after a start that takes a while; weights without files, or changed "
            "without a version, are never known (docs/pool.md)"
        )
        lines.append(Finding(AREA, "off at", Status.WARN, text, advice))
    return lines
