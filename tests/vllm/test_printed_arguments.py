# SPDX-License-Identifier: Apache-2.0
"""The commands that documents print for vLLM are ones that vLLM takes, and that `pd-connector check` finds right."""

import json
import shlex
from pathlib import Path

import pytest

pytest.importorskip("vllm.entrypoints.launchers.cli_args", reason="no vLLM of 0.32")

from support.plan_cases import inputs, written
from support.printed import PAGES, Block, blocks, commands, words
from vllm.entrypoints.launchers.cli_args import make_arg_parser
from vllm.utils.argparse_utils import FlexibleArgumentParser
from vllm.utils.import_utils import resolve_obj_by_qualname

from pd_connector.config import KEY_VARIABLE
from pd_connector.control.keys import new_key
from pd_connector.tools.cli.check import examine
from pd_connector.tools.cli.checks.finding import Status
from scheduler_plugins.planner.mix import mix_of
from scheduler_plugins.router.policies.base import Role

ENGINES = [
    (block, command)
    for page in PAGES
    for block in blocks(page)
    if "vllm serve" in block.text
    for command in commands(block.text)
    if words(command)[:2] == ["vllm", "serve"]
]
BY_MODULE = "vllm.entrypoints.openai.api_server"


def test_engines_are_printed_in_one_form() -> None:
    """Only the lines for a CPU name the module: they stand for the command that does not work there."""
    assert len(ENGINES) > 15
    assert [words(command)[2] for _, command in ENGINES] == ["MODEL"] * len(ENGINES)
    modules = [block for page in PAGES for block in blocks(page) if BY_MODULE in block.text]
    assert [(block.page, block.section) for block in modules] == [
        ("docs/quickstart.md", "On a CPU")
    ]


@pytest.mark.parametrize(
    ("block", "command"), ENGINES, ids=[f"{b.page}-{n}" for n, (b, _) in enumerate(ENGINES)]
)
def test_vllm_takes_a_printed_command(block: Block, command: str) -> None:
    parser = make_arg_parser(FlexibleArgumentParser())
    taken = parser.parse_args(words(command)[2:])
    for name in (taken.scheduler_cls, *taken.middleware):
        assert name is None or resolve_obj_by_qualname(name), block.page
    if taken.kv_transfer_config is not None:
        flag = words(command).index("--kv-transfer-config")
        config = words(command)[flag + 1]
        assert json.loads(config)
        found = examine(config, {KEY_VARIABLE: new_key()}).findings
        assert not [one for one in found if one.status is Status.FAIL], block.page


@pytest.mark.parametrize("roles", [(Role.PREFILL, Role.DECODE), (Role.WHOLE, Role.WHOLE)])
def test_vllm_takes_every_option_of_a_plan(tmp_path: Path, roles: tuple[Role, Role]) -> None:
    mix = mix_of({("H100-tp1", roles[0]): 2, ("A100-tp2", roles[1]): 1})
    parser, lines = make_arg_parser(FlexibleArgumentParser()), 0
    for script in written(inputs(tmp_path), mix).glob("start-*.sh"):
        for line in script.read_text().splitlines():
            if "vllm serve" in line:
                taken = parser.parse_args(shlex.split(line.removesuffix(" &"))[3:])
                assert resolve_obj_by_qualname(taken.scheduler_cls)
                assert (taken.kv_transfer_config is None) is (roles[0] is Role.WHOLE)
                lines += 1
    assert lines == 3
