# SPDX-License-Identifier: Apache-2.0
"""All cases, by name."""

from attention_cases import DECODES
from direct_cases import DIRECT
from transfer_cases import TRANSFERS

CASES = {f"transfer {name}": case for name, case in TRANSFERS.items()} | DECODES | DIRECT
