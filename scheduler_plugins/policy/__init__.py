# SPDX-License-Identifier: Apache-2.0
"""Decisions as pure functions of state: the same objects run in engines and in simulation."""
