# SPDX-License-Identifier: Apache-2.0
"""The KV pool in vLLM's scheduler."""
