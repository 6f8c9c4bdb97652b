# SPDX-License-Identifier: Apache-2.0
"""All targets behind one call: a script goes to those that take its steps."""

from typing import Self

from support.agents import KEY

from fuzz.control import ControlTarget
from fuzz.data import ShmTarget, TcpTarget
from fuzz.params import ParamsTarget
from fuzz.script import Step, read


class Targets:
    """Used for many scripts, for a `with` block.

    Args:
        keyed: whether the engines have a key.
        greeted: whether handshakes have been finished when a script begins.
        sums: whether, without a key, records over tcp have checksums.
    """

    def __init__(self, *, keyed: bool, greeted: bool, sums: bool = True) -> None:
        key = KEY if keyed else ""
        self._all = (
            ControlTarget(key, greeted=greeted),
            TcpTarget(key.encode(), greeted=greeted, sums=sums),
            ShmTarget(greeted=greeted),
            ParamsTarget(key),
        )

    def run(self, script: bytes) -> None:
        """Do what the script says, then let everything end.

        Raises:
            Exception: anything raised one that no peer may cause, its books did not agree after a
                step, or it held something at the end.
        """
        steps = read(script)
        for target in self._all:
            own: list[Step] = [step for step in steps if step.kind in target.kinds]
            if own:
                target.begin()
                for step in own:
                    target.step(step)
                target.finish()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        for target in self._all:
            target.close()
