# SPDX-License-Identifier: Apache-2.0
"""What a client sent: the body's fields, and the `Request` that policies see of it."""
