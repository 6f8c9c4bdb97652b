# SPDX-License-Identifier: Apache-2.0
"""The consuming half of an agent: sessions with producers, and chunks that come in."""
