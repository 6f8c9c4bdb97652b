# SPDX-License-Identifier: Apache-2.0
"""Where a request goes: who can serve it, what policies see, what its class is promised, who waits."""
