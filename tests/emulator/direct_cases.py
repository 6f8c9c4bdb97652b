# SPDX-License-Identifier: Apache-2.0
"""Public functions that repeat a launch (`Tuning.direct_launch`), through Triton's own launcher."""

import contextlib
import functools
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from attention_cases import BF16, BOUND, FEW, LENGTHS, processors
from transfer_cases import Case

from pd_bench.kernels.decode_cases import latent_set, paged_set
from pd_kernels.attention import (
    direct,
    mla_decode,
    mla_kernel,
    paged_decode,
    paged_kernel,
    plan_mla_decode,
    plan_paged_decode,
)
from pd_kernels.attention.decode_call import DecodeCall
from pd_kernels.attention.mla_call import MlaCall
from pd_kernels.attention.paged_call import PagedCall
from pd_kernels.attention.reference import reference_mla_decode, reference_paged_decode


@contextlib.contextmanager
def _through_the_door() -> Iterator[None]:
    """Public functions launch kernels with CPU tensors, as on a GPU."""
    active = SimpleNamespace(
        get_current_device=lambda: -1,  # the number of a CPU
        get_current_stream=lambda _: 0,
    )
    with contextlib.ExitStack() as stack:
        for each in (
            mock.patch.object(DecodeCall, "on_gpu", True),
            mock.patch.object(torch.cuda, "device", return_value=contextlib.nullcontext()),
            mock.patch.object(direct, "driver", SimpleNamespace(active=active)),
        ):
            stack.enter_context(each)
        yield


def directly(latent: bool = False) -> None:
    """Two layers with one plan. The second has other tensors and another scale, and takes the
    first one's launch: Triton is not asked for the kernel."""
    kernel = mla_kernel.latent_attention if latent else paged_kernel.paged_attention
    call: Any = mla_decode if latent else paged_decode
    make: Any = plan_mla_decode if latent else plan_paged_decode
    reference: Any = reference_mla_decode if latent else reference_paged_decode
    lengths, plan = list(LENGTHS), None
    with _through_the_door(), processors(1), mock.patch.object(kernel, "run") as search:
        search.side_effect = type(kernel).run.__get__(kernel)
        for layer, scale in enumerate((0.05, 0.1)):
            torch.manual_seed(layer)
            given: Any = latent_set(lengths, 16, 1) if latent else paged_set(lengths, FEW, 16, BF16)
            plan = plan or make(*given[:2]).fill(given.lengths)
            out, lse = call(*given, scale=scale, plan=plan, return_lse=True)
            batch = (
                MlaCall(*given, scale, True)
                if latent
                else PagedCall(*given, scale, 1.0, 1.0, True, 0, None, None)
            )
            wanted, sums = torch.zeros(out.shape), torch.zeros(lse.shape)
            reference(batch, wanted, sums)
            assert float((out.float() - wanted).norm() / wanted.norm()) <= BOUND, (
                f"layer {layer} differs"
            )
            assert torch.allclose(lse, sums, atol=2e-3), f"lse of layer {layer} differs"
    assert search.call_count == len(plan.launches) == 1, (
        "the second layer did not take the first one's launch"
    )


DIRECT: dict[str, Case] = {
    "direct launch": directly,
    "direct launch, mla": functools.partial(directly, latent=True),
}
