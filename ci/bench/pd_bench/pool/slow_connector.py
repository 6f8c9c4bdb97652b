# SPDX-License-Identifier: Apache-2.0
"""The connector of an engine whose pool has a slow store: `bench pool --slow` names it as the engine's connector.

A variable in the engine's environment says how slow, as JSON: `call_s`, `bytes_per_s`, `silent`.
"""

import json
import os
import threading
from typing import Any, cast

from pd_bench.pool.faulty_store import FaultyStore
from pd_bench.pool.slow import VARIABLE
from pd_connector.pool.settings import PoolSettings
from pd_connector.pool.store.base import Store
from pd_connector.vllm.connector import PDConnector


def _slowly(settings: PoolSettings, opened: Any = PoolSettings.open) -> Store:
    fault_settings = json.loads(os.environ[VARIABLE])
    silent = threading.Event() if fault_settings.pop("silent", False) else None
    return cast(Store, FaultyStore(opened(settings), silent=silent, **fault_settings))


PoolSettings.open = _slowly  # type: ignore[method-assign,assignment]


class SlowPoolConnector(PDConnector):
    """As `PDConnector`; its processes open slow stores."""
