# SPDX-License-Identifier: Apache-2.0
"""Gather and scatter between an engine's paged cache and a slot."""
