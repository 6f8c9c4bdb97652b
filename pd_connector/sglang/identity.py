# SPDX-License-Identifier: Apache-2.0
"""Which model an SGLang engine serves, told as every engine tells it."""

import json
from pathlib import Path
from typing import Any

from pd_connector.kv.identity import model_fingerprint


def fingerprint_model(scheduler: Any) -> bytes:
    model = scheduler.model_config
    folder = Path(model.model_path)
    config = json.loads((folder / "config.json").read_text())
    return model_fingerprint(config | {"served_dtype": str(model.dtype)}, folder)
