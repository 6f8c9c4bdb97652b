# SPDX-License-Identifier: Apache-2.0
"""Where a request goes: the able engines, the view for policies, the promises to its class, and the
queue at the front."""
