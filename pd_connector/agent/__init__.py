# SPDX-License-Identifier: Apache-2.0
"""The agent of a rank: one thread that owns every socket, slot and session."""
