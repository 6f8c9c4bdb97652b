# SPDX-License-Identifier: Apache-2.0
"""Coverage-guided fuzzing of everything that a peer can reach: `python -m fuzz`, see docs/trust.md."""
