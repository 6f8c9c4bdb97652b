# SPDX-License-Identifier: Apache-2.0
"""Shared memory between processes of one machine and user."""
