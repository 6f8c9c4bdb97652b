# SPDX-License-Identifier: Apache-2.0
"""Programs for operators: commands, launching of engines, the demo."""
