# SPDX-License-Identifier: Apache-2.0
"""All cases, by name."""

from transfer_cases import TRANSFERS

CASES = {f"transfer {name}": case for name, case in TRANSFERS.items()}
