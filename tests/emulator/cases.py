# SPDX-License-Identifier: Apache-2.0
"""All cases, by name."""

from attention_cases import DECODES
from direct_cases import DIRECT
from handoff_cases import DOORS
from transfer_cases import TRANSFERS
from vllm_cases import STEPS

TRANSFER_CASES = {f"transfer {name}": case for name, case in TRANSFERS.items()}
CASES = TRANSFER_CASES | DECODES | DIRECT | DOORS | STEPS
