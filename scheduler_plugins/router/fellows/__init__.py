# SPDX-License-Identifier: Apache-2.0
"""What the other workers and other routers have in flight, counted in shared memory and told over ZMQ."""
