# SPDX-License-Identifier: Apache-2.0
"""The door to vLLM. Engine types stay inside; nothing else in the package imports vLLM."""
