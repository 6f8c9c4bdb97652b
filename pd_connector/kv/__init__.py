# SPDX-License-Identifier: Apache-2.0
"""What KV is: the shape of a cache, the identity of its content, how it is coded."""
