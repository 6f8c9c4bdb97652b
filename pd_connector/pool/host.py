# SPDX-License-Identifier: Apache-2.0
"""The store of this host, opened once in a process: vLLM's scheduler and worker may share one."""

from pathlib import Path

from pd_connector.pool.settings import PoolSettings, load, memory_folder
from pd_connector.pool.store.base import Store

_stores: dict[tuple[Path, Path | None], Store] = {}
_settings: dict[tuple[str, Path], PoolSettings | None] = {}


def settings_of(value: object) -> PoolSettings | None:
    """The value of the config key `pool`. It is checked once in a process, because the check looks at every file of the pool.

    Raises:
        ConfigError: the value is wrong, or a folder cannot be used.
    """
    key = repr(value), memory_folder()
    if key not in _settings:
        settings = load(value)
        if settings is not None:
            settings.try_out()
        _settings[key] = settings
    return _settings[key]


def open_pool(value: object) -> tuple[Store, PoolSettings] | None:
    """The store that the config key `pool` names, and this engine's settings for it; None if the pool is off.

    Raises:
        ConfigError: the value is wrong, or a folder cannot be used.
    """
    settings = settings_of(value)
    if settings is None:
        return None
    named = settings.memory.path, settings.disk.path if settings.disk else None
    if named not in _stores:
        _stores[named] = settings.open()
    return _stores[named], settings
