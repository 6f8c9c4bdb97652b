# SPDX-License-Identifier: Apache-2.0
"""ASGI middleware of an engine's API server."""
