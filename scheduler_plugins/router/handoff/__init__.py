# SPDX-License-Identifier: Apache-2.0
"""The requests to the two engines of a pair, and the prefill side of an attempt."""
