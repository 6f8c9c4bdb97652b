# SPDX-License-Identifier: Apache-2.0
"""Whether catalog and folders of a store agree, and nothing is left that nobody uses."""

import contextlib
import os
import time
from pathlib import Path

from pd_connector.pool.store.catalog import CatalogError
from pd_connector.pool.store.local import LocalStore
from pd_connector.pool.store.reconcile import sums_differ


def problems(store: LocalStore, writing: int = 0) -> list[str]:
    """What is wrong while no other process uses the store; empty if all is well. The store's own thread may still be at work."""
    until = time.monotonic() + 20
    while (found := problems_now(store, writing)) and time.monotonic() < until:
        time.sleep(0.05)
    return found


def sweep(store: LocalStore) -> None:
    """Remove what ended processes have left, on a machine that may be too busy for the first try."""
    until = time.monotonic() + 20
    while True:
        try:
            return store.maintenance.sweep()
        except CatalogError:
            if time.monotonic() > until:
                raise
            time.sleep(0.05)


def _blocks(file: Path) -> int:
    with contextlib.suppress(FileNotFoundError):
        return file.stat().st_blocks * 512
    return 0


def problems_now(store: LocalStore, writing: int = 0) -> list[str]:
    """What is wrong at this moment."""
    try:
        return _differences(store, writing)
    except CatalogError as error:
        return [str(error)]


def _differences(store: LocalStore, writing: int) -> list[str]:
    tier_storage, found = store._tier_storage, []
    tier_storage.flush()
    for tier, part in enumerate(tier_storage.folders):
        staged = os.listdir(part.staged)
        if len(staged) > writing:
            found.append(f"{part.name}: staged {staged}")
        entries = {key: part.entry(key) for key in part.entered()}
        files = {name for key, entry in entries.items() if entry for name in entry.files(key)}
        for key, entry in entries.items():
            if entry is None or not part.is_whole(key, entry):
                found.append(f"{part.name}: {key.hex()} is not whole")
        data = set(os.listdir(part.data))
        if data != files:
            found.append(
                f"{part.name}: data without entries {data - files}, missing {files - data}"
            )
        with tier_storage.catalog.transaction() as catalog:
            rows = {
                key for (key,) in catalog.execute("SELECT key FROM chunks WHERE tier = ?", (tier,))
            }
            rest = catalog.execute("SELECT * FROM files WHERE tier = ?", (tier,)).fetchall()
            leaving = catalog.execute("SELECT * FROM leaving WHERE tier = ?", (tier,)).fetchall()
            pins = catalog.execute("SELECT * FROM pins WHERE NOT named").fetchall()
            (budget, nbytes) = catalog.execute(
                "SELECT budget, bytes FROM tiers WHERE tier = ?", (tier,)
            ).fetchone()
        if rows != set(entries):
            lost, unknown = rows - set(entries), set(entries) - rows
            found.append(
                f"{part.name}: rows without entries {lost}, entries without rows {unknown}"
            )
        if len(rest) > writing or leaving or pins:
            found.append(f"{part.name}: left in the catalog: {rest} {leaving} {pins}")
        size = sum(_blocks(file) for file in (part.path / "data").iterdir())
        if size > budget or nbytes > budget:
            found.append(f"{part.name}: {size} bytes, {nbytes} in the catalog, budget {budget}")
    with tier_storage.catalog.transaction() as catalog:
        if sums_differ(catalog):
            found.append("sums differ")
    return found
