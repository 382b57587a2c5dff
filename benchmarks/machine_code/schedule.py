"""Simulates how busy a loop of an sm_90 kernel could keep the tensor cores, clock by clock.

This models one quarter of an SM, with a scheduler, a tensor core, and a quarter of everything else. Its warps run the
loop repeatedly:

- A warp issues its instructions in order. All warps together issue one per clock; the warp that waited longest is
first.
- The 32 results of a warp take 8 clocks of the exp2 unit, 2 of the integer lanes, 1 of the fp32 lanes (an IMAD: 2).
- An HGMMA goes to the tensor core, which works in the order of issue. It takes n / 2 clocks for 64 x n x 16, or as long
  as its operands need to be read from shared memory, at 32 bytes per clock, if that is longer.
- WARPGROUP.DEPBAR waits until at most the given number of the warp's groups is in flight. A barrier of the whole
  program waits for all warps of the program.
- Other accesses to shared memory, including shuffles, overtake queued products and share the 32 bytes per clock with
  running ones: they use what these leave, and the next product takes longer by the accesses that still wait when it
  starts.
- A warp waits until shared memory has accepted its reads and writes, but not for asynchronous copies.

The model omits latencies of instructions and memory, waits for copies, barriers within a warpgroup and between the
consumers, bank conflicts, lowered clocks, and all code before and after the loop. So the share is an upper bound that
no kernel reaches.

The order of the code matters: exponentials that the compiler places after the wait for a product can't overlap with it,
but only with the products of other warps.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from benchmarks.machine_code import sass

# For a quarter of an SM: the clocks of a unit for an instruction of one warp.
EXP2, INTEGER, FP32 = 8.0, 2.0, 1.0
SHARED_BYTES = 32.0  # per clock
STEPS = 12  # iterations of each warp; the first half fills the pipeline


class IssueStep(NamedTuple):
    """An instruction in the model."""

    unit: str  # "" for one that only takes an issue slot
    clocks: float  # the clocks of the unit
    shared: float = 0.0  # additional clocks of shared memory
    ends_group: bool = False
    waits: int | None = None  # waits until at most this many groups are in flight
    meets: bool = False  # waits for all warps of the program


def step_of(instruction: sass.Instruction) -> IssueStep | None:
    """Returns the step of an instruction; None if it takes no issue slot."""
    counts = sass.count([instruction])
    if not counts.instructions:
        return None
    shared = counts.shared_bytes / SHARED_BYTES
    if counts.wgmma:
        return IssueStep("tensor", 4 * counts.tensor_clocks, shared, ends_group="gsb0" in instruction.operands)
    if counts.waits:
        return IssueStep("", 0.0, waits=counts.waits[0])
    if instruction.base == "BAR":
        # With a number of threads, the barrier is for one warpgroup, whose warps are in different quarters.
        return IssueStep("", 0.0, meets=instruction.operands.count(",") == 0)
    if counts.async_loads:
        return IssueStep("", 0.0, shared)
    if counts.special:
        return IssueStep("exp2", EXP2)
    if counts.integer:
        return IssueStep("integer", INTEGER)
    if counts.fp32:
        return IssueStep("fp32", FP32 * counts.fp32)
    return IssueStep("shared", shared, shared) if shared else IssueStep("", 0.0)


class WarpState:
    """A warp of the model."""

    def __init__(self, program: int) -> None:
        self.program = program
        self.at = 0
        self.turns = 0
        self.issued = -1.0  # when it last issued
        self.groups: list[float] = []  # when its groups of products end
        self.meetings = 0


class Shares(NamedTuple):
    """The results of the model for a loop."""

    clocks: float  # the clocks of an iteration of all warps
    tensor: float  # the share of the clocks in which the tensor core is busy


def shares(loop: Sequence[sass.Instruction], warps: int, programs: int = 1) -> Shares:
    """Runs the loop on `warps` warps of each of `programs` programs, in one quarter of an SM."""
    steps = [step for step in map(step_of, loop) if step is not None]
    running = [WarpState(program) for program in range(programs) for _ in range(warps)]
    free: dict[str, float] = dict.fromkeys(("tensor", "exp2", "integer", "fp32", "shared"), 0.0)
    memory = _SharedMemory()
    now, worked, begun = 0.0, 0.0, 0.0
    half = 0.0  # the tensor core's clocks at half time
    while any(warp.turns < STEPS for warp in running):
        ready = [warp for warp in running if _may_issue(warp, steps[warp.at], now, free, running)]
        if ready:
            warp = min(ready, key=lambda w: w.issued)
            worked += _issue(warp, steps[warp.at], now, free, memory)
            warp.at += 1
            if warp.at == len(steps):
                warp.at, warp.turns = 0, warp.turns + 1
                if begun == 0.0 and min(w.turns for w in running) == STEPS // 2:
                    begun, half = now, worked
        now += 1.0
    turns = STEPS - STEPS // 2
    return Shares((now - begun) / turns, (worked - half) / (now - begun))


def _may_issue(warp: WarpState, step: IssueStep, now: float, free: dict[str, float], running: list[WarpState]) -> bool:
    if step.waits is not None:
        unfinished = sum(end > now for end in warp.groups)
        return unfinished <= step.waits
    if step.meets:
        # The other warps of its program have reached the barrier or passed it.
        others = (w for w in running if w.program == warp.program)
        return all(w.meetings > warp.meetings or (w.meetings, w.at) == (warp.meetings, warp.at) for w in others)
    # Products queue for the tensor core; the other units only accept what they can start immediately.
    return not step.unit or step.unit == "tensor" or free[step.unit] <= now


def _issue(warp: WarpState, step: IssueStep, now: float, free: dict[str, float], memory: _SharedMemory) -> float:
    """Occupies the units for an instruction; returns the clocks of the tensor core."""
    warp.issued = now
    warp.meetings += step.meets
    if step.unit == "tensor":
        end = free["tensor"] = memory.run_product(step, now, max(now, free["tensor"]))
        if step.ends_group:
            warp.groups = [*(group_end for group_end in warp.groups if group_end > now), end]
        return step.clocks
    if step.unit:
        free[step.unit] = max(now, free[step.unit]) + step.clocks
    if step.shared:
        memory.serve(now)
        memory.waiting += step.shared
    return 0.0


class _SharedMemory:
    """The accesses to shared memory that don't come from products.

    Attributes:
        waiting: the clocks that pending accesses need.
    """

    def __init__(self) -> None:
        self.waiting = 0.0
        self._now = 0.0
        self._products: list[tuple[float, float, float]] = []  # start, end, and the share that it leaves

    def serve(self, now: float) -> None:
        """Processes pending accesses until `now`."""
        self.waiting = max(0.0, self.waiting - self._left(now))
        self._now = now
        self._products = [product for product in self._products if product[1] > now]

    def run_product(self, step: IssueStep, now: float, start: float) -> float:
        """Queues a product, which starts at `start`; returns when it ends."""
        self.serve(now)
        late = max(0.0, self.waiting - self._left(start))
        self.waiting -= late
        clocks = max(step.clocks, step.shared + late)
        self._products.append((start, start + clocks, 1 - (step.shared + late) / clocks))
        return start + clocks

    def _left(self, until: float) -> float:
        """Returns the clocks that products leave free from the last call until `until`."""
        left, at = 0.0, self._now
        for start, end, share in self._products:
            left += max(0.0, min(start, until) - at)
            at = max(at, min(start, until))
            left += share * max(0.0, min(end, until) - at)
            at = max(at, min(end, until))
        return left + max(0.0, until - at)
