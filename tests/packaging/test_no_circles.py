# SPDX-License-Identifier: Apache-2.0
"""No modules import each other in a circle, imports within functions and for types included.

A contract of import-linter orders rooms; this looks at every module.
"""

import grimp
import pytest

PACKAGES = ("pd_connector", "scheduler_plugins", "pd_kernels")


@pytest.fixture(scope="module")
def imports():
    graph = grimp.build_graph(*PACKAGES, cache_dir=None)
    return {module: graph.find_modules_directly_imported_by(module) for module in graph.modules}


def circles(imports):
    """The modules that can reach themselves, by the circle that they are in (Tarjan 1972)."""
    order, lowest, path, found = {}, {}, [], []

    def visit(module):
        order[module] = lowest[module] = len(order)
        path.append(module)
        for other in sorted(imports[module]):
            if other not in order:
                visit(other)
            if other in path:
                lowest[module] = min(lowest[module], lowest[other])
        if lowest[module] == order[module]:
            start = path.index(module)
            if len(path) - start > 1:
                found.append(set(path[start:]))
            del path[start:]

    for module in sorted(imports):
        if module not in order:
            visit(module)
    return found


def test_no_modules_import_each_other_in_a_circle(imports):
    assert circles(imports) == []


def test_a_circle_is_found(imports):
    choice, kernel = "pd_kernels.attention.mla", "pd_kernels.attention.mla_kernel"
    assert kernel in imports[choice]
    back = {**imports, kernel: {*imports[kernel], choice}}
    assert any({choice, kernel} <= circle for circle in circles(back))
