# SPDX-License-Identifier: Apache-2.0
"""Transports: how the bytes of a chunk get from a send slot into a landing slot."""
