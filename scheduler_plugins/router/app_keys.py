# SPDX-License-Identifier: Apache-2.0
"""What the application keeps for its endpoints."""

from aiohttp import web

from scheduler_plugins.router.backend import Backend
from scheduler_plugins.router.config import RouterConfig
from scheduler_plugins.router.connections import BodyBudget, ConnectionLimit
from scheduler_plugins.router.metrics import Metrics
from scheduler_plugins.router.page import LiveState
from scheduler_plugins.router.shared import Shared

SHARED = web.AppKey("shared", Shared)
METRICS = web.AppKey("metrics", Metrics)
CONFIG = web.AppKey("config", RouterConfig)
CONNECTIONS = web.AppKey("connections", ConnectionLimit)
BODIES = web.AppKey("bodies", BodyBudget)
BACKEND = web.AppKey("backend", Backend)
LIVE = web.AppKey("live", LiveState)
