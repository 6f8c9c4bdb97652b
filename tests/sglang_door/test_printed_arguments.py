# SPDX-License-Identifier: Apache-2.0
"""The commands that documents print for SGLang are ones that SGLang takes."""

import json
import subprocess
import sys

import pytest
from support.printed import PAGES, blocks, commands, words

pytest.importorskip("sglang.srt")

SERVER = ["python", "-m", "sglang.launch_server"]
ENGINES = [
    (block.page, words(command)[3:])
    for page in PAGES
    for block in blocks(page)
    if "sglang.launch_server" in block.text
    for command in commands(block.text)
    if words(command)[:3] == SERVER
]
MODELS = ("MODEL", "pd_connector/tools/demo/model")
PARSES = """
import argparse, json, sys
from sglang.srt.plugins import load_plugins
from sglang.srt.server_args import ServerArgs

load_plugins()  # as SGLang's server does first: backends are choices of arguments
for words in json.loads(sys.argv[1]):
    parser = argparse.ArgumentParser()
    ServerArgs.add_cli_args(parser)
    print("model", parser.parse_args(words).model_path)
"""
"""In a process of its own: what plugins hook stays hooked."""


def test_sglang_takes_every_printed_command() -> None:
    assert len(ENGINES) > 4
    told = json.dumps([arguments for _, arguments in ENGINES])
    command = [sys.executable, "-c", PARSES, told]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert ended.returncode == 0, ended.stderr[-2000:]
    models = [line.split()[1] for line in ended.stdout.splitlines() if line.startswith("model ")]
    assert len(models) == len(ENGINES)
    assert not [
        page for (page, _), model in zip(ENGINES, models, strict=True) if model not in MODELS
    ]
