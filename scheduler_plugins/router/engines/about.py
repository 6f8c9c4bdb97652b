# SPDX-License-Identifier: Apache-2.0
"""What people are shown of an engine and no decision needs."""

from typing import NamedTuple

MOST_CHARACTERS = 200
"""Longer names and versions are cut. Engines send them, and each page and `/health` repeats them."""


class About(NamedTuple):
    """An engine's own words about itself. Empty: it has not said."""

    model: str = ""
    """Name of its model; adapters have other names."""
    version: str = ""
    """Version of vLLM or SGLang."""
    pool_problem: str = ""
    """Why the router does not know what the engine's KV pool has, although the engine uses one."""
    weights: str = ""
    """How far the engine has read its weights, such as `weights read 3.1 of 16.0 GB`. Until it has read all, no KV passes."""
