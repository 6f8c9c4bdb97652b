# SPDX-License-Identifier: Apache-2.0
"""The config of an SGLang engine's connector. SGLang has no argument for it, so a variable holds it."""

import os
from collections.abc import Mapping
from pathlib import Path

from pd_connector.config import CONFIG_VARIABLE, LOOPBACK, Config
from pd_connector.config_rules import JSON
from pd_connector.errors import ConfigError

BACKEND = "pd_connector"
"""This backend's name in SGLang's arguments."""
HOST_VARIABLE = "SGLANG_HOST_IP"
"""SGLang's own variable for the address of this host."""


def load_config(text: str, environment: Mapping[str, str] = os.environ) -> Config:
    """The config in a variable's text. Other variables fill in what it leaves out. Raises ConfigError."""
    if not text.strip():
        return Config.load({"peers": LOOPBACK}, environment, HOST_VARIABLE)
    # The text of the variable itself may contain the key, so messages do not repeat it.
    text = text.strip()
    is_file = text.startswith("@")
    source = f"{CONFIG_VARIABLE} {text!r}" if is_file and "{" not in text else CONFIG_VARIABLE
    try:
        given = JSON.decode(Path(text[1:]).read_text() if is_file else text)
    except (OSError, ValueError, RecursionError) as error:
        why = (error.strerror or "cannot be read") if isinstance(error, OSError) else error
        raise ConfigError(
            f"{source}: {why}; set it to a JSON object of config keys, or to @ "
            "and the path of a file that holds one"
        ) from None
    if not isinstance(given, dict):
        raise ConfigError(f"{source}: must be a JSON object of config keys")
    audit = given.get("audit", "first" if given.get("pool") else "off")
    if audit != "off" and not (audit == "first" and given.get("pool")):
        raise ConfigError(
            f"audit {audit!r}: a decode engine of SGLang computes no prompt, so it has nothing to compare KV "
            "with; leave `audit` out (config key audit). The KV pool knows `first` and `off`"
        )
    # A request names its prefill engine by an address without a seal.
    return Config.load({"peers": LOOPBACK, **given}, environment, HOST_VARIABLE)
