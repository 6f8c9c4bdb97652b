# SPDX-License-Identifier: Apache-2.0
"""The commands that documents print for SGLang are ones that SGLang takes."""

import argparse

import pytest
from sglang.srt.plugins import load_plugins
from sglang.srt.server_args import ServerArgs
from support.printed import PAGES, Block, blocks, commands, words

SERVER = ["python", "-m", "sglang.launch_server"]
ENGINES = [
    (block, command)
    for page in PAGES
    for block in blocks(page)
    if "sglang.launch_server" in block.text
    for command in commands(block.text)
    if words(command)[:3] == SERVER
]


def test_engines_are_printed() -> None:
    assert len(ENGINES) > 4


@pytest.mark.parametrize(("block", "command"), ENGINES)
def test_sglang_takes_a_printed_command(block: Block, command: str) -> None:
    load_plugins()  # as SGLang's server does first: backends are choices of arguments
    parser = argparse.ArgumentParser()
    ServerArgs.add_cli_args(parser)
    taken = parser.parse_args(words(command)[3:])
    assert taken.model_path in ("MODEL", "pd_connector/tools/demo/model"), block.page
