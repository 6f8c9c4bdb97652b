# SPDX-License-Identifier: Apache-2.0
"""The door to vLLM. Engine types never pass it; nothing else in the package imports vLLM."""
