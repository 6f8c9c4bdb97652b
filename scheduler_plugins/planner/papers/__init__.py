# SPDX-License-Identifier: Apache-2.0
"""Searches of papers, each a restriction of ours. They stand beside ours in every table."""
