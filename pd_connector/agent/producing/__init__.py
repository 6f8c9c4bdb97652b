# SPDX-License-Identifier: Apache-2.0
"""The producing half of an agent: sessions with consumers, and chunks on their way out."""
