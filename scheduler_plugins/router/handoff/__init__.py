# SPDX-License-Identifier: Apache-2.0
"""What each engine of a pair is sent, and the prefill side of an attempt."""
