# SPDX-License-Identifier: Apache-2.0
"""What data sheets say of devices. The only place with such figures."""

from __future__ import annotations

from typing import NamedTuple


class Sheet(NamedTuple):
    """One device."""

    flops_per_s: float  # dense, 16 bit
    bytes_per_s: float  # of its memory
    memory_bytes: float
    watts: float  # board power


SHEETS = {
    "A10": Sheet(125e12, 600e9, 24e9, 150),
    "A100": Sheet(312e12, 2039e9, 80e9, 400),  # SXM, 80 GB
    "B200": Sheet(2250e12, 8000e9, 180e9, 1000),
    "H100": Sheet(989e12, 3350e9, 80e9, 700),  # SXM
    "H200": Sheet(989e12, 4800e9, 141e9, 700),  # SXM
    "L4": Sheet(121e12, 300e9, 24e9, 72),
    "L40S": Sheet(362e12, 864e9, 48e9, 350),
    "MI300X": Sheet(1307e12, 5300e9, 192e9, 750),
}
"""NVIDIA's and AMD's data sheets, read in 2026."""
