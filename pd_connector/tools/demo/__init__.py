# SPDX-License-Identifier: Apache-2.0
"""The demo's data: a small model made by examples/byte_model/train.py."""

from pathlib import Path

MODEL_DIR: Path = Path(__file__).parent / "model"
