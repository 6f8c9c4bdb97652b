# SPDX-License-Identifier: Apache-2.0
"""What people run: commands, launching of engines, the demo, benchmarks."""
