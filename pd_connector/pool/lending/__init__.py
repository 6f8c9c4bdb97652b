# SPDX-License-Identifier: Apache-2.0
"""Memory that this host lends to a Mooncake store, and how it is recalled."""
