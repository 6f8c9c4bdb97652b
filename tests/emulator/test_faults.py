# SPDX-License-Identifier: Apache-2.0
"""What the emulator must notice, in kernels of a few lines."""

import numpy as np
import pytest
import torch
from driver import live_memory
from emulator import code_of
from extents import Extents, Reach, find_origins, names
from gangs import PARAMETERS
from machine import Launch
from memory import FaultError, Memory
from operands import UnknownError
from products import check_products
from ptx import Program

HEAD = """
.extern .shared .align 16 .b8 smem[];
.visible .entry kernel(.param .u64 kernel_param_0)
{
    .reg .pred %p<4>;
    .reg .b32 %r<20>;
    .reg .b64 %rd<20>;
    ld.param.b64 %rd0, [kernel_param_0];
    mov.u32 %r0, %tid.x;
    mul.wide.u32 %rd1, %r0, 4;
    add.s64 %rd2, %rd0, %rd1;
    shl.b32 %r1, %r0, 2;
    mov.b32 %r2, smem;
    add.s32 %r3, %r2, %r1;
    xor.b32 %r4, %r1, 128;
    add.s32 %r5, %r2, %r4;
    setp.lt.u32 %p0, %r0, 32;
"""
"""%rd2: a thread's word of global memory; %r3: its word of shared memory; %r5: that of the other warp; %p0: whether
it is in the first warp."""


def run(body: str, out: torch.Tensor | None = None, ctas: int = 1, seed: int = 0) -> torch.Tensor:
    """Execute the body with two warps a CTA, on 64 words."""
    words = torch.zeros(64 * ctas, dtype=torch.int32) if out is None else out
    program = Program.parse(HEAD + body + "\nret;\n}\n")
    find_origins(program)
    code = code_of(program)
    given = np.array([words.data_ptr()] * 32, np.uint64).view(np.uint8)
    launch = Launch(
        code, Memory(given, PARAMETERS), (ctas, 1, 1), 64, 1024, live_memory(), seed=seed
    )
    launch.shadow.reach = Reach(Extents([words], [words.data_ptr()]), launch.shadow)
    launch.run(bytearray(len(code.functions)))
    return words


SHARE = "st.shared.b32 [%r3], %r0; bar.sync 0; ld.shared.b32 %r6, [%r5]; st.global.b32 [%rd2], %r6;"
COPY = "cp.async.ca.shared.global [%r3], [%rd2], 4; cp.async.commit_group;"
READ = "st.shared.b32 [%r3], %r0; bar.sync 0; ld.shared.b32 %r7, [%r3]; xor.b32 %r6, %r3, 4;"
MADE = "setp.eq.b32 %p1, %r0, 0; @%p1 mbarrier.init.shared::cta.b64 [%r2], 1;"
WAIT = "mbarrier.try_wait.parity.shared::cta.b64 %p2, [%r2], 1;"


@pytest.mark.parametrize("seed", range(4))
def test_warps_exchange_words_behind_a_barrier(seed: int) -> None:
    assert run(SHARE, seed=seed).tolist() == [*range(32, 64), *range(32)]


@pytest.mark.parametrize(
    ("body", "fault"),
    [
        (SHARE.replace("bar.sync 0;", ""), "race"),
        (SHARE.replace("st.shared.b32 [%r3], %r0;", ""), "uninitialised"),
        (f"{SHARE} st.shared.b32 [%r3], %r0;", "others still read"),
        ("st.global.b32 [%rd2+256], %r0;", "out of bounds"),
        ("st.global.b32 [%rd2+2], %r0;", "misaligned"),
        ("st.shared.b32 [%r3+1024], %r0;", "out of bounds"),
        ("st.shared.v2.b32 [%r3], {%r0, %r0};", "misaligned"),
        ("st.global.b32 [%rd2], %r9;", "uninitialised"),
        ("@%p0 bar.sync 0;", ""),
        ("@!%p0 bra $L; bar.sync 0; $L: mov.u32 %r6, 0;", "barrier that not all threads reach"),
        ("st.global.b32 [%rd0], %r0;", "different values"),
        ("@%p0 st.global.b32 [%rd2], %r0; @!%p0 ld.global.b32 %r6, [%rd2+-128];", "race"),
        (f"{COPY} ld.shared.b32 %r6, [%r3];", "a copy is under way"),
        (f"{COPY} cp.async.wait_group 1; ld.shared.b32 %r6, [%r3];", "a copy is under way"),
        (f"{COPY} cp.async.wait_group 0; ld.shared.b32 %r6, [%r3];", ""),
        (f"{COPY} cp.async.wait_group 0; ld.shared.b32 %r6, [%r5];", "race"),
        (
            "shl.b32 %r6, %r0, 31; setp.ne.b32 %p1, %r6, 0; @%p1 bra $L; shfl.sync.bfly.b32 %r7, %r0, 1, 31, -1; $L: mov.u32 %r6, 0;",
            "does not take part",
        ),
        (
            "st.shared.b32 [%r3], %r0; xor.b32 %r6, %r3, 4; ld.shared.b32 %r7, [%r6];",
            "bar.warp.sync",
        ),
        (
            "st.shared.b32 [%r3], %r0; xor.b32 %r6, %r3, 4; bar.warp.sync -1; ld.shared.b32 %r7, [%r6];",
            "",
        ),
        (f"{READ} st.shared.b32 [%r6], %r0;", "still reads this, without bar.warp.sync"),
        (f"{READ} bar.warp.sync -1; st.shared.b32 [%r6], %r0;", ""),
        ("$L: bra $L;", "no end"),
        (f"{MADE} bar.sync 0; {WAIT}", ""),
        (f"{MADE} {WAIT}", "no barrier since an mbarrier was made"),
        (MADE.replace("@%p1", ""), "where there is one"),
    ],
)
def test_what_a_kernel_must_not_do(body: str, fault: str) -> None:
    if not fault:
        run(body)
        return
    with pytest.raises(FaultError, match=fault):
        run(body)


@pytest.mark.parametrize(
    ("body", "fault"),
    [
        ("st.global.b32 [%rd2], %r0;", ""),
        ("st.global.b32 [%rd2+4], %r0;", "in no tensor that its address is of"),
        ("ld.global.b32 %r6, [%rd2+-4];", "in no tensor that its address is of"),
        ("cp.async.ca.shared.global [%r3], [%rd2+4], 4;", "in no tensor that its address is of"),
    ],
)
def test_an_access_may_not_leave_its_view_for_other_memory(body: str, fault: str) -> None:
    """The word behind a view's last one, and the one before its first, are of the same tensor."""
    words = torch.zeros(66, dtype=torch.int32)[1:65]
    if not fault:
        run(body, words)
        return
    with pytest.raises(FaultError, match=fault):
        run(body, words)


def test_an_access_may_not_fall_between_the_elements_of_a_view() -> None:
    """As in V beside K: only every second word belongs to it."""
    words, body = torch.zeros(64, 2, dtype=torch.int32)[:, 0], "shl.b64 %rd3, %rd1, 1;"
    body += "add.s64 %rd4, %rd0, %rd3; ld.global.b32 %r6, [%rd4"
    run(f"{body}];", words)
    with pytest.raises(FaultError, match="in no tensor that its address is of"):
        run(f"{body}+4];", words)


@pytest.mark.parametrize(
    "way", ["", "st.shared.b64 [%r2], %rd4; bar.sync 0; ld.shared.b64 %rd4, [%r2];"]
)
def test_an_address_from_a_table_reaches_what_the_table_names(way: str) -> None:
    words = torch.zeros(80, dtype=torch.int32)
    table = torch.tensor([words.data_ptr()] * 32)
    body = f"ld.global.b64 %rd4, [%rd0]; {way} add.s64 %rd5, %rd4, %rd1; ld.global.b32 %r6, [%rd5"
    run(f"{body}+4];", table)
    names(table, [words[:64]])
    run(f"{body}];", table)
    with pytest.raises(FaultError, match="in no tensor that its address is of"):
        run(f"{body}+4];", table)


def test_a_copy_of_a_register_is_another_register() -> None:
    body = "mov.u32 %r6, %r0; @%p0 mov.u32 %r6, 7; st.global.b32 [%rd2], %r0;"
    assert run(body).tolist() == list(range(64))


def test_an_instruction_that_is_not_known_is_named() -> None:
    with pytest.raises(UnknownError, match=r"'tanh' is not known: `tanh.approx.f32 %r6, %r0`"):
        run("bra $L; tanh.approx.f32 %r6, %r0; $L: mov.u32 %r6, 0;")


@pytest.mark.parametrize(("order", "fault"), [("acq_rel", ""), ("relaxed", "race")])
def test_ctas_see_stores_behind_an_atomic_with_release_and_acquire(order: str, fault: str) -> None:
    """The last CTA to count reads what the first stored."""
    body = """
    mov.u32 %r7, %ctaid.x;
    mul.wide.u32 %rd3, %r7, 256;
    add.s64 %rd4, %rd2, %rd3;
    st.global.b32 [%rd4+256], %r0;
    bar.sync 0;
    setp.eq.b32 %p1, %r0, 0;
    @%p1 atom.global.gpu.acq_rel.add.u32 %r6, [%rd0], 1;
    @!%p1 bra $L;
    setp.eq.b32 %p2, %r6, 1;
    @!%p2 bra $L;
    ld.global.b32 %r8, [%rd2+256];
    ld.global.b32 %r9, [%rd2+512];
    $L: mov.u32 %r10, 0;"""
    words = torch.zeros(192, dtype=torch.int32)
    if fault:
        with pytest.raises(FaultError, match=fault):
            run(body.replace("acq_rel", order), words, 2)
    else:
        run(body, words, 2)


@pytest.mark.parametrize(("order", "fault"), [("acq_rel", ""), ("relaxed", "uses by atomics")])
def test_a_count_is_reset_behind_all_that_counted(order: str, fault: str) -> None:
    """The last to count resets it, so that the last atomic is its own."""
    body = f"""
    setp.eq.b32 %p1, %r0, 0;
    @%p1 atom.global.gpu.{order}.add.u32 %r6, [%rd0], 1;
    @!%p1 bra $L;
    setp.eq.b32 %p2, %r6, 1;
    @%p2 st.global.b32 [%rd0], %r0;
    $L: mov.u32 %r10, 0;"""
    if fault:
        with pytest.raises(FaultError, match=fault):
            run(body, ctas=2)
    else:
        assert run(body, ctas=2)[0] == 0


SUMS = "{%f0,%f1,%f2,%f3}"
PRODUCT = f"wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16 {SUMS}, %rd0, %rd1, 1, 1, 1, 0, 0;"
FENCE = "wgmma.fence.sync.aligned;"
RESCALE = "mul.f32 %f2, %f2, %f2;"


@pytest.mark.parametrize(
    ("body", "right"),
    [
        (f"{FENCE} {PRODUCT} {PRODUCT}", True),
        (PRODUCT, False),
        (f"{RESCALE} {FENCE} {PRODUCT}", True),
        (f"{FENCE} {RESCALE} {PRODUCT}", False),
        (f"$L: {FENCE} {PRODUCT} {RESCALE} bra $L;", True),
        (f"{FENCE} $L: {PRODUCT} @%p0 bra $L;", True),
        (f"{FENCE} $L: {PRODUCT} {RESCALE} @%p0 bra $L;", False),
        (f"@%p0 bra $L; {FENCE} $L: {PRODUCT}", False),
    ],
)
def test_a_product_needs_a_fence_behind_other_uses_of_its_registers(body: str, right: bool) -> None:
    program = Program.parse(HEAD.replace("{", "{ .reg .f32 %f<4>;", 1) + body + "ret; }")
    if right:
        check_products(program)
    else:
        with pytest.raises(FaultError, match=r"no wgmma.fence"):
            check_products(program)
