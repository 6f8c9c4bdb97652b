# SPDX-License-Identifier: Apache-2.0
"""Prompts that pass between engines, in vLLM's scheduler."""
