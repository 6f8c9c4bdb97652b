# SPDX-License-Identifier: Apache-2.0
"""What vLLM's pages hold, and what may be done with it."""
