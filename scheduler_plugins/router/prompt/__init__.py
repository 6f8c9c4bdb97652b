# SPDX-License-Identifier: Apache-2.0
"""The client's request: its body, and the `Request` that policies see."""
