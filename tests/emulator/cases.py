# SPDX-License-Identifier: Apache-2.0
"""All cases, by name."""

from attention_cases import DECODES
from control_cases import CONTROLS
from direct_cases import DIRECT
from drawn_cases import DRAWN
from edge_cases import EDGES
from graph_cases import REPLAYS
from handoff_cases import DOORS
from launch_cases import COUNTS
from mla_cases import LATENTS
from peer_cases import PEERS
from public_cases import PUBLIC
from sglang_cases import SGLANG
from transfer_cases import TRANSFERS
from unlike_cases import UNLIKE
from vllm_cases import STEPS

TRANSFER_CASES = {f"transfer {name}": case for name, case in TRANSFERS.items()}
CASES = (
    TRANSFER_CASES
    | DECODES
    | DIRECT
    | DOORS
    | STEPS
    | UNLIKE
    | LATENTS
    | CONTROLS
    | REPLAYS
    | SGLANG
)
CASES |= PUBLIC | PEERS | COUNTS | EDGES | DRAWN

SWITCHES = {
    ("column_merge", True): ("mla, 16 heads", "latent_attention"),
    ("column_merge", False): ("mla, 16 heads, column_merge off", "latent_attention"),
    ("gluon", True): ("gluon", "latent_attention_tma"),
    ("gluon", False): ("gluon off", "latent_attention"),
    ("swapped", True): ("swapped", "paged_attention"),
    ("swapped", False): ("swapped off", "paged_attention"),
    ("direct_launch", True): ("vllm, decodes", "paged_attention"),
    ("direct_launch", False): ("vllm, decodes, direct_launch off", "paged_attention"),
    ("mixed_steps", True): ("vllm, mixed steps", "mixed_programs"),
    ("mixed_steps", False): ("vllm, decodes", "paged_attention"),
}
"""For each setting of `Tuning` a case, and the kernel that it executes under this setting."""

LAUNCHED = {
    "vllm, mla": "latent_attention",
    "vllm, mla, 40 heads": "latent_attention_tma",
    "vllm, graphs, mla": "latent_attention",
    "vllm, graphs, mla, 40 heads": "latent_attention_tma",
    "public, merge": "_merge",
    "public, mixed": "mixed_programs",
    "public, reshard": "reshard_heads",
    "public, payload sums": "_sum_payload",
}
"""Cases whose kernel is chosen behind an engine's door, or by a public function, which could take its reference."""
