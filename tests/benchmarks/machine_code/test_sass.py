"""The report reads hand-written SASS correctly: loops, instruction counts, and programs per SM."""

from __future__ import annotations

import pytest

from benchmarks.machine_code.hazards import in_flight, orders
from benchmarks.machine_code.sass import Counts, count, ctas_an_sm, loops, parse
from fastformer.kernels._fences import FENCE, fenced


def listing(code: str) -> str:
    """Returns code as nvdisasm prints it: an address before each instruction, and labels on separate lines."""
    lines, address = [], 0
    for line in filter(None, map(str.strip, code.splitlines())):
        if line.endswith(":"):
            lines.append(line)
        else:
            lines.append(f"        /*{address:04x}*/                   {line} ;")
            address += 16
    return "\n".join(lines)


SPIN = """
    .L_x_0:
    SYNCS.PHASECHK.TRANS64.TRYWAIT P0, [UR4], R0
    @!P0 BRA `(.L_x_2)
    .L_x_1:
    FFMA R1, R1, R2, R3
    @P1 BRA `(.L_x_0)
    EXIT
    .L_x_2:
    SYNCS.PHASECHK.TRANS64.TRYWAIT P0, [UR4], R0
    @!P0 BRA `(.L_x_2)
    BRA `(.L_x_1)
"""
BRANCHES = """
    .L_x_0:
    FADD R1, R1, R2
    @P0 BRA `(.L_x_1)
    FMUL R1, R1, R2
    .L_x_1:
    @!P1 CALL.REL.NOINC `(.L_x_3)
    BRA `(.L_x_0)
    .L_x_3:
    FFMA R1, R1, R2, R3
    EXIT
"""
LOOPS = {
    "only inner loops": (
        """
        .L_x_0:
        FADD R1, R1, R2
        .L_x_1:
        FMUL R1, R1, R2
        @P0 BRA `(.L_x_1)
        .L_x_2:
        FFMA R1, R1, R2, R3
        @P1 BRA `(.L_x_2)
        @P2 BRA `(.L_x_0)
        EXIT
        """,
        [["FMUL", "BRA"], ["FFMA", "BRA"]],
    ),
    "a spin on a barrier, far after the code, belongs to the loop that waits": (
        SPIN,
        [["SYNCS.PHASECHK.TRANS64.TRYWAIT", "BRA", "FFMA", "BRA", "SYNCS.PHASECHK.TRANS64.TRYWAIT", "BRA", "BRA"]],
    ),
    "a wait is no loop": (SPIN.replace("@P1 BRA `(.L_x_0)", "NOP"), []),
    # The first instructions behind a jump table wait for registers, and branch back to themselves.
    "code that a jump table reaches": (
        """
        BRX R2 -0x1c0
        .L_x_1:
        USETMAXREG.TRY_ALLOC.CTAPOOL UP0, 0xf0
        @!P0 BRA `(.L_x_1)
        FADD R2, R2, R3
        @P1 BRA `(.L_x_3)
        MUFU.EX2 R2, R2
        .L_x_3:
        FFMA R2, R2, R3, R4
        @P0 BRA `(.L_x_3)
        EXIT
        """,
        [["FFMA", "BRA"]],
    ),
    "a branch within the loop stays, and one out of it does not": (
        BRANCHES,
        [["FADD", "BRA", "FMUL", "CALL.REL.NOINC", "BRA"]],
    ),
    "a uniform branch": (
        BRANCHES.replace("@P0 BRA `(", "BRA.U UP0, `("),
        [["FADD", "BRA.U", "FMUL", "CALL.REL.NOINC", "BRA"]],
    ),
}


@pytest.mark.parametrize("name", LOOPS)
def test_loops(name: str) -> None:
    code, expected = LOOPS[name]
    assert [[instruction.opcode for instruction in loop] for loop in loops(parse(listing(code)))] == expected


def test_counts() -> None:
    code = """
        LDGSTS.E.BYPASS.128 [R1], desc[UR4][R2.64]
        LDG.E.U8 R1, desc[UR4][R2.64]
        @P0 LDG.E.128 R4, desc[UR4][R2.64]
        STG.E.64 desc[UR4][R2.64], R4
        LDL R1, [R2]
        STL.64 [R2], R4
        MUFU.EX2 R1, R1
        MUFU.EX2 R2, R2
        MUFU.RCP R2, R2
        HMMA.16816.F32.BF16 R4, R4, R6, R4
        HGMMA.64x64x16.F32.BF16 R24, gdesc[UR12], RZ, !UPT
        HGMMA.64x128x16.F32.BF16 R24, R88, gdesc[UR12].tnspB, R24, gsb0
        WARPGROUP.DEPBAR.LE gsb0, 0x1
        WARPGROUP.DEPBAR.LE gsb0, 0x0
        BAR.SYNC.DEFER_BLOCKING 0x0
        RED.E.ADD.F32.FTZ.RN.STRONG.GPU desc[UR4][R2.64], R4
        REDUX.SUM UR4, R4
        LDSM.16.M88.4 R4, [R2]
        LOP3.LUT R1, R1, R2, RZ, 0x3c, !PT
        IMAD.MOV.U32 R1, RZ, RZ, R2
        FFMA R1, R2, R3, R4
        NOP
    """
    counts = count(parse(listing(code)))
    assert counts == Counts(
        instructions=21, exp2=2, wgmma=2, mma_sync=1, waits=(1, 0), loads=2, async_loads=1, stores=1, barriers=1,
        atomics=1, local=2,
    )  # fmt: skip
    assert count([]) == Counts()


def test_ctas_an_sm() -> None:
    """Each limit is tested on both sides of its edge."""
    assert ctas_an_sm(90, 8, 128, 65536) == (2, "registers")
    assert ctas_an_sm(90, 8, 129, 65536) == (1, "registers")  # given out in units of 8 a thread
    assert ctas_an_sm(90, 4, 168, 0) == (3, "registers")
    assert ctas_an_sm(90, 5, 168, 0) == (2, "registers")  # 12 warps: three on each of the four schedulers
    assert ctas_an_sm(90, 8, 85, 0) == (2, "registers")  # a warp takes 88 * 32 = 11 * 256 of them
    assert ctas_an_sm(90, 6, 104, 0) == (2, "registers")  # 19 warps would fit, but only four on each scheduler
    assert ctas_an_sm(90, 4, 32, 115_712) == (2, "shared memory")  # 2 * (113 + 1) KB = 228 KB
    assert ctas_an_sm(90, 4, 32, 115_713) == (1, "shared memory")
    assert ctas_an_sm(80, 4, 32, 0) == (16, "registers")
    assert ctas_an_sm(80, 4, 24, 0) == (16, "warps")
    assert ctas_an_sm(89, 4, 32, 0) == (12, "warps")
    assert ctas_an_sm(86, 1, 32, 0) == (16, "programs")
    assert ctas_an_sm(100, 4, 32, 0, tensor_columns=256) == (2, "tensor memory")


# Each rule of the compile report accepts correct code and catches planted errors, in hand-written PTX and SASS.


# A pipelined loop as Triton writes it: copies two steps ahead, a wait, a barrier, a product, its wait.
LOOP = """
	cp.async.cg.shared.global [ %r1 + 0 ], [ %rd1 + 0 ], 0x10, %r2;
	cp.async.commit_group;
	@%p1 bra 	$L__BB0_3;
$L__BB0_2:                              // %.lr.ph
	cp.async.wait_group 	1;
	fence.proxy.async.shared::cta;
	bar.sync 	0;
	wgmma.fence.sync.aligned;
	wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {%r9}, %rd7, %rd8, %p4, 1, 1, 0, 0;
	wgmma.commit_group.sync.aligned;
	wgmma.wait_group.sync.aligned 0;
	bar.sync 	0;
	cp.async.cg.shared.global [ %r1 + 0 ], [ %rd1 + 0 ], 0x10, %r2;
	cp.async.commit_group;
	@%p2 bra 	$L__BB0_2;
$L__BB0_3:
	cp.async.wait_group 	0;
	ret;
"""
FENCED, WAITED, BARRED = "\tfence.proxy.async.shared::cta;\n", "\tcp.async.wait_group \t1;\n", "\tbar.sync \t0;\n"
PLANTED_ORDERS = {
    "no fence": (LOOP.replace(FENCED, ""), ["1 products read copies without a proxy fence"]),
    "a fence before the wait": (
        LOOP.replace(WAITED + FENCED, FENCED + WAITED),
        ["1 products read copies without a proxy fence"],
    ),
    "a fence behind the product": (
        LOOP.replace(FENCED, "").replace("aligned 0;\n", "aligned 0;\n" + FENCED),
        ["1 products read copies without a proxy fence"],
    ),
    "a copy before all have multiplied": (
        LOOP.replace("aligned 0;\n" + BARRED, "aligned 0;\n"),
        ["1 copies go where another warp group may still multiply"],
    ),
}
STORED = """
	stmatrix.sync.aligned.m8n8.x4.shared.b16 [%r60], {%r1, %r2, %r3, %r4};
	fence.proxy.async.shared::cta;
	bar.sync 	2, 128;
	wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {%r9}, %rd7, %rd8, %p4, 1, 1, 0, 0;
	wgmma.wait_group.sync.aligned 0;
	bar.sync 	2, 128;
	@%p26 mbarrier.arrive.shared::cta.b64 _, [%r553];
	ret;
"""
PLANTED_ORDERS |= {
    "a store without a fence": (STORED.replace(FENCED, ""), ["1 products read stores without a proxy fence"]),
    "an arrival before the group has met": (
        STORED.replace("aligned 0;\n\tbar.sync \t2, 128;\n", "aligned 0;\n"),
        ["1 arrivals before the warp group has met, behind products"],
    ),
    "an arrival behind loads": (
        STORED.replace("\t@%p26", "\tld.shared.v4.b32 \t{%r1, %r2, %r3, %r4}, [%r8];\n\t@%p26"),
        ["1 arrivals before the warp group has met, behind loads"],
    ),
}


@pytest.mark.parametrize("name", PLANTED_ORDERS)
def test_an_unenforced_order_is_found(name: str) -> None:
    planted, expected = PLANTED_ORDERS[name]
    assert planted not in (LOOP, STORED) and orders(planted) == expected
    assert orders(LOOP) == orders(STORED) == []
    # A single warp group needs no barrier before its copies.
    assert orders(".reqntid 256\n" + planted) == expected
    assert bool(orders(".reqntid 128\n" + planted)) == ("copies go" not in expected[0])


@pytest.mark.parametrize("place", ["\twgmma.mma_async", "\twgmma.wait_group", "\tret"])
def test_a_store_that_is_read_back_is_not_an_operand(place: str) -> None:
    """A tile changes its layout through shared memory, before or after a product."""
    load = "\tbar.sync \t2, 128;\n\tldmatrix.sync.aligned.m8n8.x4.shared.b16 {%r1}, [%r8];\n\tbar.sync \t2, 128;\n"
    bare = STORED.replace(FENCED, "")
    assert orders(bare.replace(place, load + place)) == []
    # Another store's tile is read back.
    second = "\tst.shared.v4.b32 \t[%r60], {%r1, %r2, %r3, %r4};\n"
    assert orders(bare.replace("\tret", second + load + "\tret")) == ["1 products read stores without a proxy fence"]


@pytest.mark.parametrize("table", ["$L_brx_0: .branchtargets", "JTI0_0:\n\t.branchtargets"])  # the latter: Triton 3.9's
def test_roles_of_a_specialised_kernel_are_followed(table: str) -> None:
    """Control flow goes through a table of branches, and through labels that each copy of inline assembly repeats."""
    waiting = "\t{\n\twaitLoop:\n\tmbarrier.try_wait.parity.shared.b64 c, [%r1], %r2;\n\t@!c bra.uni waitLoop;\n\t}\n"
    name = table.partition(":")[0]
    kernel = (
        f"\tst.shared.v2.b32 \t[global_smem+10], {{0, 5}};\n\t{table}\n\t\t$L__BB0_5,\n\t\t$L__BB0_6;\n"
        f"\tbrx.idx \t%r1, {name};\n$L__BB0_5:\n" + waiting + "FIRST\tret;\n$L__BB0_6:\n" + waiting + STORED
    )
    assert orders(kernel.replace("FIRST", "")) == []
    copying = LOOP.replace(FENCED, "").replace("BB0_2", "BB0_7").replace("BB0_3", "BB0_8")
    assert orders(kernel.replace("FIRST", copying)) == ["1 products read copies without a proxy fence"]


@pytest.mark.parametrize("wait", ["cp.async.wait_group \t0;", "cp.async.wait_group 2;", "cp.async.wait_all;"])
def test_fences_follow_every_wait(wait: str) -> None:
    """There is one fence after each wait, and only if products read shared memory."""
    bare = LOOP.replace(FENCED, "").replace("cp.async.wait_group \t1;", wait)
    mended = fenced(bare)
    assert orders(bare) and not orders(mended)
    assert mended.count(FENCE) == 2 and fenced(mended) == mended
    assert fenced(bare.replace("wgmma.mma_async", "mma")) == bare.replace("wgmma.mma_async", "mma")


# Two products, the first with its operand in registers, R4 to R7; the wait leaves the second one in flight.
FLIGHT = """
    WARPGROUP.ARRIVE
    HGMMA.64x16x16.F32.BF16 R24, R4, gdesc[UR8].tnspB, R24, gsb0
    HGMMA.64x16x16.F32.BF16 R40, gdesc[UR12], RZ, !UPT, gsb0
    {between}
    WARPGROUP.DEPBAR.LE gsb0, 0x1
    {behind}
    FADD R32, R24, R31
    WARPGROUP.DEPBAR.LE gsb0, 0x0
    FADD R40, R40, R47
    EXIT
"""


@pytest.mark.parametrize(
    "between, behind, expected",
    [
        ("MOV R8, R9", "MOV R4, R5", []),
        ("MOV R7, R9", "NOP", ["MOV at 0x30", "operand"]),
        ("LDS.128 R4, [R60]", "NOP", ["LDS.128", "operand"]),
        ("IMAD.WIDE R6, R60, R61, RZ", "NOP", ["IMAD.WIDE", "operand"]),
        ("FADD R60, R61, R31", "NOP", ["FADD", "result"]),
        ("STG.E.128 desc[UR4][R60.64], R20", "NOP", []),
        ("STG.E.128 desc[UR4][R60.64], R28", "NOP", ["STG", "result"]),
        ("NOP", "FMUL R1, R47, R2", ["FMUL", "result"]),
        ("NOP", "MOV R40, RZ", ["MOV", "result"]),
        ("HGMMA.64x16x16.F32.BF16 R4, gdesc[UR12], R4, gsb0", "NOP", ["HGMMA", "operand"]),
    ],
)
def test_a_register_in_flight_is_not_touched(between: str, behind: str, expected: list[str]) -> None:
    hazards = list(in_flight(parse(listing(FLIGHT.format(between=between, behind=behind)))))
    assert bool(hazards) == bool(expected)
    assert all(word in hazards[0] for word in expected), hazards


def test_registers_in_flight_are_followed_around_a_loop() -> None:
    """A product that is issued at the end of a loop is in flight at its beginning."""
    loop = """
    .L_x_1:
    MOV R4, R60
    WARPGROUP.DEPBAR.LE gsb0, {left}
    HGMMA.64x16x16.F32.BF16 R24, R8, gdesc[UR8], R24, gsb0
    HGMMA.64x16x16.F32.BF16 R40, R4, gdesc[UR8], R40, gsb0
    WARPGROUP.DEPBAR.LE gsb0, {end}
    @P0 BRA `(.L_x_1)
    EXIT
    """
    assert not list(in_flight(parse(listing(loop.format(left="0x0", end="0x0")))))
    hazards = list(in_flight(parse(listing(loop.format(left="0x0", end="0x1")))))
    assert len(hazards) == 1 and "MOV" in hazards[0]
