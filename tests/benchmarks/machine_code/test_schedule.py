"""Checks the model of a loop's schedule on a few instructions that can be followed by hand."""

from __future__ import annotations

import pytest

from benchmarks.machine_code.sass import parse
from benchmarks.machine_code.schedule import shares
from tests.benchmarks.machine_code.test_sass import listing

PRODUCT = "HGMMA.64x128x16.F32.BF16 R24, gdesc[UR4], R24, gsb0\n"  # 64 clocks, of shared memory 48
WAIT = "WARPGROUP.DEPBAR.LE gsb0, 0x0\n"
EXPONENTIALS = "MUFU.EX2 R1, R2\n" * 8  # 64 clocks


def test_the_order_of_a_wait_decides_if_exponentials_overlap() -> None:
    """With one warp, 64 clocks of products and 64 of exp2 take as long as the longer of them, or as their sum."""
    hidden = shares(parse(listing(PRODUCT + EXPONENTIALS + WAIT)), 1)
    serial = shares(parse(listing(PRODUCT + WAIT + EXPONENTIALS)), 1)
    assert hidden.tensor == pytest.approx(1, abs=0.1)
    assert serial.tensor == pytest.approx(0.5, abs=0.05)


def test_another_warp_fills_the_gap_unless_a_barrier_holds_it() -> None:
    loop = PRODUCT + WAIT + EXPONENTIALS
    alone, beside = (shares(parse(listing(loop)), warps) for warps in (1, 2))
    assert beside.tensor > 1.5 * alone.tensor
    blocked = shares(parse(listing(loop + "BAR.SYNC.DEFER_BLOCKING 0x0\n")), 2)
    free = shares(parse(listing(loop + "BAR.SYNC.DEFER_BLOCKING 0x2, 0x80\n")), 2)
    assert blocked.tensor < free.tensor


def test_reads_of_shared_memory_delay_products() -> None:
    loads = "LDS.128 R4, [R1]\n" * 8  # 16 clocks each; with the product's own, 176 to its 64
    assert shares(parse(listing(PRODUCT + loads + WAIT)), 1).tensor == pytest.approx(64 / 176, abs=0.05)


def test_copies_block_no_warp_and_delay_no_later_product() -> None:
    """Copies take 64 clocks of shared memory, during 64 clocks of exp2.

    A read of as many bytes would stall the warp.
    """
    copies = "LDGSTS.E.BYPASS.128 [R1], desc[UR4][R2.64]\n" * 4
    reads = "LDS.128 R4, [R1]\n" * 4
    with_none, with_copies, with_reads = (
        shares(parse(listing(PRODUCT + WAIT + body + EXPONENTIALS)), 1).tensor for body in ("", copies, reads)
    )
    assert with_copies == pytest.approx(with_none, abs=0.05) and with_reads < 0.8 * with_none
    # Just before a product they take from what it needs.
    assert shares(parse(listing(copies + PRODUCT + WAIT + EXPONENTIALS)), 1).tensor < 0.9 * with_none
