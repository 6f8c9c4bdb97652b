# SPDX-License-Identifier: Apache-2.0
"""The queue of waiting requests inside an engine. No clock, no engine, no I/O."""
