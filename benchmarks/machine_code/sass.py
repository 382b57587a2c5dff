"""Machine code as text (SASS, from nvdisasm), its loops, and the work of the instructions of a loop.

A loop is found by its backward branch: a branch to an instruction that is on every path to the branch.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from operator import and_
from typing import Any, NamedTuple, TypeVar

State = TypeVar("State")


class Instruction(NamedTuple):
    """A line of SASS, such as `@!P0 BRA `(.L_x_1)`."""

    address: int
    predicate: str  # "@!P0", or "" if it always runs
    opcode: str  # with its modifiers: "LDG.E.128"
    operands: str
    target: int | None = None  # address of a label that it names

    @property
    def base(self) -> str:
        return self.opcode.partition(".")[0]


_INSTRUCTION = re.compile(r"^\s*/\*([0-9a-f]{4,})\*/\s+(@!?U?P\w+\s+)?([A-Z][\w.]*)\s*([^;]*?)\s*;")
_LABEL = re.compile(r"^([.$\w]+):\s*$")
_TARGET = re.compile(r"`\(([^)]+)\)")


def parse(sass: str) -> list[Instruction]:
    """Parses the instructions of a kernel from the output of `nvdisasm -c`."""
    labels: dict[str, int] = {}
    waiting: list[str] = []  # labels before the next instruction
    lines = []
    for line in sass.splitlines():
        if (label := _LABEL.match(line)) is not None:
            waiting.append(label[1])
        elif (match := _INSTRUCTION.match(line)) is not None:
            address = int(match[1], 16)
            labels |= dict.fromkeys(waiting, address)
            waiting.clear()
            lines.append((address, (match[2] or "").strip(), match[3], match[4]))
    instructions = []
    for address, predicate, opcode, operands in lines:
        name = _TARGET.search(operands)
        target = labels.get(name[1]) if name is not None else None
        instructions.append(Instruction(address, predicate, opcode, operands, target))
    return instructions


_LEAVES = {"EXIT", "RET", "KILL", "BRA", "BRX", "JMP", "JMX"}  # code after these is reached from elsewhere


def successors(instructions: list[Instruction]) -> list[list[int]]:
    """Returns, for each instruction, the indices of the instructions that may follow."""
    index = {instruction.address: i for i, instruction in enumerate(instructions)}
    meeting: dict[str, int] = {}  # the barrier register of a BSSY -> where its threads reconverge
    result: list[list[int]] = []
    for i, instruction in enumerate(instructions):
        after = []
        register = instruction.operands.split(",")[0]
        if instruction.base == "BSSY" and instruction.target is not None:
            meeting[register] = index[instruction.target]
        elif instruction.base == "BSYNC" and register in meeting:
            after.append(meeting[register])
        elif instruction.target is not None:  # a branch; a long branch is written as a far call
            after.append(index[instruction.target])
        # A uniform branch carries its condition among the operands: BRA.U !UP0, `(...).
        always = not instruction.predicate and "UP" not in instruction.operands.split("`")[0]
        if not (instruction.base in _LEAVES and always) and i + 1 < len(instructions):
            after.append(i + 1)
        result.append(sorted(set(after)))
    return result


def flow(
    successors: list[list[int]],
    start: State,
    after: Callable[[int, State], State],
    merge: Callable[[State, State], State],
) -> list[State | None]:
    """Returns the state before each instruction. Entries, to which no branch leads, begin with `start`."""
    states: list[Any] = [None] * len(successors)
    reached = {target for targets in successors for target in targets}
    for entry in sorted(range(len(successors)), key=lambda i: i > 0 and i in reached):
        if states[entry] is not None:
            continue
        states[entry] = start
        work = [entry]
        while work:
            i = work.pop()
            new = after(i, states[i])
            for target in successors[i]:
                old = states[target]
                merged = new if old is None else merge(old, new)
                if merged != old:
                    states[target] = merged
                    work.append(target)
    return states


def loops(instructions: list[Instruction]) -> list[list[Instruction]]:
    """Returns the inner loops in the order of the code: loops that do work and contain no other such loop.

    A loop that only waits (for a barrier in shared memory, or the endless one after the last EXIT) does no work.
    """
    following = successors(instructions)
    before: list[list[int]] = [[] for _ in instructions]
    for i, targets in enumerate(following):
        for target in targets:
            before[target].append(i)
    # The instructions, as bits, that are on every path to one from an entry.
    above = flow(following, 0, lambda i, state: state | 1 << i, and_)
    bodies: dict[int, set[int]] = {}  # by the head; branches with the same head form one loop
    for i, targets in enumerate(following):
        for head in targets:
            if head != i and not (above[i] or 0) >> head & 1:
                continue
            body = bodies.setdefault(head, {head})
            todo = [i]
            while todo:
                if (member := todo.pop()) not in body:
                    body.add(member)
                    todo += before[member]
    working = {head: body for head, body in bodies.items() if any(instructions[i].base in _WORK for i in body)}
    inner = [
        body
        for head, body in sorted(working.items())
        if not any(other in body and working[other] < body for other in working if other != head)
    ]
    return [[instructions[i] for i in sorted(body)] for body in inner]


# Opcodes by kind. Matrix instructions: of a warp group (sm_90), with tensor memory (sm_100), of one warp.
_WGMMA = {"HGMMA", "QGMMA", "IGMMA", "BGMMA"}
_TCGEN05 = {"UTCHMMA", "UTCQMMA", "UTCIMMA", "UTCOMMA"}
_MMA_SYNC = {"HMMA", "QMMA", "IMMA", "BMMA", "OMMA", "DMMA"}
_GLOBAL_STORES = {"STG", "ST", "UTMASTG", "UBLKCP"}
_ASYNC_LOADS = {"LDGSTS", "UTMALDG", "UBLKCP"}
_ATOMICS = {"ATOM", "ATOMG", "RED", "REDG", "UTMAREDG", "UBLKRED"}
_FP32 = {"FFMA", "FMUL", "FADD", "HFMA2", "HADD2", "HMUL2"}
# A loop without any of these does no work.
_WORK = {"LDG", "LD", "MUFU"}.union(_WGMMA, _TCGEN05, _MMA_SYNC, _GLOBAL_STORES, _ASYNC_LOADS, _ATOMICS, _FP32)


class Counts(NamedTuple):
    """The work of one warp in one pass through some code; blocks that may be skipped count in full."""

    instructions: int = 0
    exp2: int = 0
    wgmma: int = 0  # matrix instructions of a warp group, or with tensor memory
    mma_sync: int = 0
    waits: tuple[int, ...] = ()  # the wgmma groups that each wait leaves in flight; 0: none
    loads: int = 0  # from global memory into registers: nothing in the loop hides their latency
    async_loads: int = 0  # into shared memory, ahead of their use
    stores: int = 0
    barriers: int = 0
    atomics: int = 0
    local: int = 0  # spilled registers, written or read


def count(instructions: Iterable[Instruction]) -> Counts:
    """Counts the work of some code, such as a loop."""
    counts = list(map(_count_one, instructions))
    sums = {name: sum(getattr(c, name) for c in counts) for name in Counts._fields if name != "waits"}
    return Counts(**sums, waits=tuple(wait for c in counts for wait in c.waits))


def _count_one(instruction: Instruction) -> Counts:
    base, opcode = instruction.base, instruction.opcode
    return Counts(
        instructions=base != "NOP",
        exp2=opcode.startswith("MUFU.EX2"),
        wgmma=base in _WGMMA | _TCGEN05,
        mma_sync=base in _MMA_SYNC,
        waits=(int(instruction.operands.split(",")[-1], 16),) if opcode.startswith("WARPGROUP.DEPBAR") else (),
        loads=base in ("LDG", "LD"),
        async_loads=base in _ASYNC_LOADS,
        stores=base in _GLOBAL_STORES - _ASYNC_LOADS,
        barriers=base == "BAR",
        atomics=base in _ATOMICS,
        local=base in ("LDL", "STL"),
    )


class SmLimits(NamedTuple):
    """The resources of one SM of an architecture (CUDA C++ Programming Guide, "Compute Capabilities")."""

    warps: int
    ctas: int
    shared: int  # bytes; each CTA uses RESERVED more than it requests
    registers: int = 65536
    tensor_columns: int = 512  # sm_100's tensor memory


RESERVED = 1024
SM_LIMITS = {
    80: SmLimits(64, 32, 167_936), 86: SmLimits(48, 16, 102_400), 89: SmLimits(48, 24, 102_400),
    90: SmLimits(64, 32, 233_472), 100: SmLimits(64, 32, 233_472), 120: SmLimits(48, 24, 102_400),
}  # fmt: skip


def ctas_an_sm(arch: int, warps: int, registers: int, shared: int, tensor_columns: int = 0) -> tuple[int, str]:
    """Returns how many programs an SM runs at a time, and the resource that limits them.

    Args:
        warps: the warps of a program.
        registers: the registers of a thread; warps get them in units of 256.
        shared: the bytes of shared memory of a program.
        tensor_columns: the columns of tensor memory of a program.
    """
    limits = SM_LIMITS[arch]
    of_a_warp = -(-32 * registers // 256) * 256
    warps_by_registers = limits.registers // of_a_warp // 4 * 4  # each of the four schedulers has a quarter
    fits = {
        "registers": warps_by_registers // warps,
        "shared memory": limits.shared // (-(-shared // 128) * 128 + RESERVED),
        "warps": limits.warps // warps,
        "programs": limits.ctas,
    }
    if tensor_columns:
        fits["tensor memory"] = limits.tensor_columns // tensor_columns
    limit = min(fits, key=lambda name: fits[name])
    return fits[limit], limit
