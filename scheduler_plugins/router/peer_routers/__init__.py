# SPDX-License-Identifier: Apache-2.0
"""In-flight work of other workers and other routers: shared counts, and the exchange over ZMQ."""
