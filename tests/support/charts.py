# SPDX-License-Identifier: Apache-2.0
"""The chart's manifests."""

from pathlib import Path
from typing import Any

import pytest
import yaml

FOLDER = Path(__file__).parents[2] / "examples" / "deploy"


def rendered(values: dict[str, Any]) -> list[dict[str, Any]]:
    """The chart's manifests, by Helm's own library."""
    helm = pytest.importorskip("helm_python", reason="helm-python-sdk is not installed")
    with helm.Chart.load(FOLDER / "chart") as chart:
        found = chart.render(values=values, name="pd")
    text = found if isinstance(found, str) else "\n---\n".join(found.values())
    return [one for one in yaml.safe_load_all(text) if one]
