# SPDX-License-Identifier: Apache-2.0
"""Keys of the objects that the application keeps for its endpoints."""

from collections.abc import Callable

from aiohttp import web

from scheduler_plugins.router.client.admin_auth import AdminAuth
from scheduler_plugins.router.client.connections import BodyBudget, ConnectionLimit
from scheduler_plugins.router.client.stopping import Stopping
from scheduler_plugins.router.endpoints.page import LiveState
from scheduler_plugins.router.engines.moving import Mover
from scheduler_plugins.router.metrics import Metrics
from scheduler_plugins.router.peer_routers.worker_place import WorkerPlace
from scheduler_plugins.router.request.shared import Shared
from scheduler_plugins.router.settings.config import RouterConfig

SHARED = web.AppKey("shared", Shared)
METRICS = web.AppKey("metrics", Metrics)
CONFIG = web.AppKey("config", RouterConfig)
CONNECTIONS = web.AppKey("connections", ConnectionLimit)
BODIES = web.AppKey("bodies", BodyBudget)
PLACE = web.AppKey[WorkerPlace | None]("place")
"""This process's place among the workers of the router; None: the router is one process."""
RENDER = web.AppKey[Callable[[], bytes]]("render")
"""Returns the answer of `/metrics`."""
ADMIN_AUTH = web.AppKey("operator", AdminAuth)
MOVER = web.AppKey("mover", Mover)
LIVE = web.AppKey("live", LiveState)
STOPPING = web.AppKey("stopping", Stopping)
