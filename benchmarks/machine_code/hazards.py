"""Finds missing synchronisation in PTX and SASS: errors that a run on a device would show only now and then.

Each rule follows the control flow from the entry and computes the possible states at an instruction:

- Fences: wgmma (sm_90) and tcgen05.mma (sm_100) read shared memory in the async proxy. If cp.async or a store wrote it,
  in the generic proxy, there must be a `fence.proxy.async` after the wait for the write and before the product (PTX
  ISA, "Async proxy").
- Copies: a wait for products applies to a single warp group. If a program has several, others may still read a buffer
  that a copy then fills, so there must be a barrier in between.
- Arrivals: if one thread arrives at an mbarrier for its warp group, the group must have met at a barrier before.
- Registers in flight: until its wait, an asynchronous product reads its operand and writes its result in registers that
  nothing else may touch. Assemblers have broken this (Triton's issue 11781).

The rules do not track addresses. If a load reads a store back (a change of layout, a sum over warps), the store is
assumed not to be an operand of a product.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from enum import IntFlag, auto
from operator import or_
from typing import NamedTuple

from benchmarks.machine_code import sass


class _State(IntFlag):
    """The events that may have happened on some path to an instruction."""

    COPYING = auto()  # cp.async was issued
    ARRIVED = auto()  # copies were waited for, and no fence has followed
    STORED = auto()  # a tile that no load reads back was stored, and no fence has followed
    FINISHED = auto()  # products were waited for, and no barrier has followed
    LOADED = auto()  # shared memory was read, and no barrier has followed


class _Ptx(NamedTuple):
    """An instruction of PTX: its kind, and its successors."""

    kind: str
    successors: list[int]


_PTX_LINE = re.compile(r"^\s*(@!?%?\w+\s+)?([a-z][\w.:]*)\s*([^;]*);")
_PTX_LABEL = re.compile(r"^\s*([\w$]+)\s*:")
# The kind of an instruction is that of the first pattern that its opcode matches.
_KINDS = (
    ("product", re.compile(r"wgmma\.mma_async|tcgen05\.mma")),
    ("product wait", re.compile(r"wgmma\.wait_group")),
    ("copy wait", re.compile(r"cp\.async\.wait_(group|all)")),
    ("copy", re.compile(r"cp\.async\.(ca|cg)\.shared")),
    ("fence", re.compile(r"fence\.proxy\.async")),
    ("barrier", re.compile(r"(bar|barrier)(\.cta)?\.sync")),
    ("arrival", re.compile(r"mbarrier\.arrive(?!\.expect_tx)")),
    ("store", re.compile(r"st\.shared\S*\.v\d|stmatrix")),
    ("load", re.compile(r"ld\.shared|ldmatrix")),
    ("branch", re.compile(r"bra\b")),
    ("jump", re.compile(r"brx\b")),
    ("end", re.compile(r"ret\b|exit\b|trap\b")),
)


def _events(ptx: str) -> list[_Ptx]:
    """Returns the instructions that matter to the rules, with the control flow between them."""
    labels: dict[str, list[int]] = {}
    tables: dict[str, list[str]] = {}
    instructions: list[tuple[str, bool, str]] = []  # kind, whether it always runs, operands
    table: list[str] | None = None
    name = ""  # the last label: from Triton 3.9 on, that of a table is on a line of its own
    for line in ptx.splitlines():
        if (targets := re.match(r"\s*(?:([\w$]+)\s*:)?\s*\.branchtargets(.*)", line)) is not None:
            table = tables[targets[1] or name] = re.findall(r"[\w$]+", targets[2])
        elif table is not None:
            table += re.findall(r"[\w$]+", line.partition("//")[0])
        elif (label := _PTX_LABEL.match(line)) is not None and "::" not in line.partition(";")[0][: label.end() + 1]:
            name = label[1]
            labels.setdefault(name, []).append(len(instructions))
        elif (match := _PTX_LINE.match(line)) is not None:
            kind = next((kind for kind, pattern in _KINDS if pattern.match(match[2])), None)
            # Stores to fixed addresses are Triton's: they tell warps their part of a warp-specialised kernel.
            if kind is not None and (kind != "store" or match[3].startswith("[%")):
                instructions.append((kind, not match[1], match[3]))
        if table is not None and ";" in line:
            table = None
    result = []
    for i, (kind, always, operands) in enumerate(instructions):
        after = [] if kind in ("branch", "jump", "end") and always else [i + 1]
        names = []
        if kind == "branch":
            names = [operands.strip()]
        elif kind == "jump":
            names = tables[operands.split(",")[1].strip()]
        for name in names:
            places = labels[name]
            # Each copy of inline assembly has its own label with the same name: the last one before the branch counts.
            after.append(max([target for target in places if target <= i], default=places[0]))
        result.append(_Ptx(kind, [successor for successor in after if successor < len(instructions)]))
    return result


_ORDERS = {
    ("product", _State.ARRIVED): "products read copies without a proxy fence",
    ("product", _State.STORED): "products read stores without a proxy fence",
    ("copy", _State.FINISHED): "copies go where another warp group may still multiply",
    ("arrival", _State.FINISHED): "arrivals before the warp group has met, behind products",
    ("arrival", _State.LOADED): "arrivals before the warp group has met, behind loads",
}


def _after(kind: str, state: _State) -> _State:
    if kind == "copy":
        return state | _State.COPYING
    if kind == "copy wait":
        return state | _State.ARRIVED if state & _State.COPYING else state
    if kind == "fence":
        return state & ~(_State.ARRIVED | _State.STORED)
    if kind == "store":
        return state | _State.STORED
    if kind == "load":
        return state | _State.LOADED
    if kind == "product wait":
        return state | _State.FINISHED
    if kind == "barrier":
        return state & ~(_State.FINISHED | _State.LOADED)
    return state


def orders(ptx: str) -> list[str]:
    """Returns the missing orderings in a kernel's PTX, each with the number of instructions that lack it."""
    events = _events(ptx)
    for i, event in enumerate(events):
        if event.kind == "store" and _is_read_back(events, i):
            events[i] = event._replace(kind="")
    states = sass.flow([event.successors for event in events], _State(0), lambda i, s: _after(events[i].kind, s), or_)
    counts: Counter[str] = Counter()
    threads = re.search(r"\.reqntid\s+(\d+)", ptx)
    is_one_group = threads is not None and int(threads[1]) <= 128
    for event, state in zip(events, states, strict=True):
        for (kind, bit), what in _ORDERS.items():
            if is_one_group and kind == "copy":
                continue
            if event.kind == kind and state is not None and state & bit:
                counts[what] += 1
    return [f"{count} {what}" for what, count in counts.items()]


def _is_read_back(events: list[_Ptx], store: int) -> bool:
    """Returns whether a load may follow a store, or the group of stores that contains it, without a fence or store."""
    seen: set[tuple[int, bool]] = set()
    work = [(store, False)]
    while work:
        place, is_behind = work.pop()
        for after in events[place].successors:
            kind = events[after].kind
            if kind == "load":
                return True
            following = (after, is_behind or kind not in ("store", ""))
            if kind != "fence" and not (is_behind and kind in ("store", "")) and following not in seen:
                seen.add(following)
                work.append(following)
    return False


# Registers in flight. The bits of an int represent a set of registers.
_WIDTHS = {"32": 1, "64": 2, "128": 4}
_LOADS = {"LDG", "LDS", "LD", "LDL", "LDC", "ATOMG", "ATOMS"}
_STORES = {"STG", "STS", "ST", "STL", "RED", "REDG"}
# Instructions that don't write the register of their first operand, or write no register.
_WITHOUT_RESULT = _STORES | {
    "STSM", "LDGSTS", "BAR", "BRA", "BRX", "EXIT", "SYNCS", "UTMALDG", "UTMASTG", "UTMAREDG", "WARPGROUP", "R2UR",
    "ISETP", "FSETP", "PLOP3", "VOTE", "VOTEU", "NOP", "BSSY", "BSYNC", "CCTL", "MEMBAR", "ERRBAR", "FENCE", "DEPBAR",
    "LDGDEPBAR", "R2P", "WARPSYNC", "USETMAXREG", "ELECT", "NANOSLEEP", "CALL", "RET", "YIELD", "UBLKCP",
}  # fmt: skip
_REGISTER = re.compile(r"(?<![A-Z])R(\d+)((?:\.\w+)*)")


def _bits(first: int, count: int) -> int:
    return ((1 << count) - 1) << first


def _written(instruction: sass.Instruction) -> int:
    """Returns the registers that an instruction writes."""
    base, *modifiers = instruction.opcode.split(".")
    if base in _WITHOUT_RESULT or base.startswith("U"):
        return 0
    for operand in instruction.operands.split(","):
        if (register := re.match(r"^\s*R(\d+)$", operand)) is not None:
            count = 1
            if base in _LOADS:
                count = max([_WIDTHS[modifier] for modifier in modifiers if modifier in _WIDTHS], default=1)
            elif base == "LDSM":
                count = int(next((modifier for modifier in modifiers if modifier in ("2", "4")), "1"))
            elif "WIDE" in modifiers or base in ("DADD", "DMUL", "DFMA") or (base == "CS2R" and "32" not in modifiers):
                count = 2
            return _bits(int(register[1]), count)
        if not re.match(r"^\s*!?U?P[T\d]", operand):
            return 0
    return 0


def _read(instruction: sass.Instruction) -> int:
    """Returns the registers that an instruction reads."""
    base, *modifiers = instruction.opcode.split(".")
    skips_result = base not in _WITHOUT_RESULT
    result = 0
    for operand in instruction.operands.split(","):
        if skips_result and re.match(r"^\s*R\d+$", operand):
            skips_result = False
            continue
        for number, width in _REGISTER.findall(operand):
            result |= _bits(int(number), 2 if ".64" in width else 1)
    stored = re.search(r",\s*R(\d+)$", instruction.operands.strip())
    if base in _STORES and stored is not None:
        widths = [_WIDTHS[modifier] for modifier in modifiers if modifier in _WIDTHS]
        widths += [int(modifier[-1]) for modifier in modifiers if modifier.startswith("F32x")]
        result |= _bits(int(stored[1]), max(widths, default=1))
    return result


class _Product(NamedTuple):
    """A wgmma: the registers of its result and of its operand, and whether it ends a group."""

    result: int
    operand: int
    is_last: bool


_PRODUCT = re.compile(r"^R(\d+), (?:R(\d+), )?gdesc")


def _product(instruction: sass.Instruction) -> _Product | None:
    match, shape = _PRODUCT.match(instruction.operands), re.search(r"64x(\d+)x", instruction.opcode)
    if not instruction.base.endswith("GMMA") or match is None or shape is None:
        return None
    result = _bits(int(match[1]), max(1, int(shape[1]) // 2))
    return _Product(result, _bits(int(match[2]), 4) if match[2] else 0, "gsb0" in instruction.operands)


class _Flight(NamedTuple):
    """The registers of products in flight: (operands, results) of each group, oldest first, and of the open group."""

    groups: tuple[tuple[int, int], ...] = ()
    operands: int = 0
    results: int = 0

    def all(self) -> tuple[int, int]:
        operands, results = self.operands, self.results
        for group in self.groups:
            operands, results = operands | group[0], results | group[1]
        return operands, results


def _joined(first: _Flight, second: _Flight) -> _Flight:
    length = max(len(first.groups), len(second.groups))
    padded = [((0, 0),) * (length - len(flight.groups)) + flight.groups for flight in (first, second)]
    groups = tuple((a[0] | b[0], a[1] | b[1]) for a, b in zip(*padded, strict=True))
    return _Flight(groups, first.operands | second.operands, first.results | second.results)


def in_flight(instructions: list[sass.Instruction]) -> Iterator[str]:
    """Yields descriptions of the instructions that access registers of a product before the wait for it."""
    products = list(map(_product, instructions))
    if not any(products):
        return
    waits = [
        int(instruction.operands.split(",")[-1], 16) if instruction.opcode.startswith("WARPGROUP.DEPBAR") else None
        for instruction in instructions
    ]

    def after(i: int, flight: _Flight) -> _Flight:
        product, wait = products[i], waits[i]
        if product is not None:
            operands, results = flight.operands | product.operand, flight.results | product.result
            if product.is_last:
                return _Flight((*flight.groups, (operands, results))[-8:])
            return _Flight(flight.groups, operands, results)
        return flight._replace(groups=flight.groups[-wait:] if wait else ()) if wait is not None else flight

    flights = sass.flow(sass.successors(instructions), _Flight(), after, _joined)
    for instruction, product, flight in zip(instructions, products, flights, strict=True):
        if flight is None:
            continue
        operands, results = flight.all()
        where = f"{instruction.opcode} at {instruction.address:#x}"
        if product is not None:
            if product.result & operands:
                yield f"{where} writes the operand of a product in flight"
            continue
        if operands | results:
            written = _written(instruction)
            if written & operands:
                yield f"{where} writes the operand of a product in flight"
            if written & results or _read(instruction) & results:
                yield f"{where} touches the result of a product in flight"
