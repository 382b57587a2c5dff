"""Compares fastformer with other programs on the same weights and inputs: engines that decode, and runtimes of models.

    python -m benchmarks.peers --case base --batch 1 16 --beams 1 4 --precision int8 bf16 fp32
    python -m benchmarks.peers --case run --run RUN --text test.en --batch 1 16    sources of different lengths
    python -m benchmarks.peers --case gpt2 --llama_bench PATH
    python -m benchmarks.peers --case llama --precision int4 int8 bf16 fp32 --rounds 3  prompts of 32 and 512 tokens
    python -m benchmarks.peers --case base --neighbours 2                          beside busy processes
    python -m benchmarks.peers --case bert_base --precision fp32 bf16              unchanged, accelerated, and others
    python -m benchmarks.peers --case encoders --rounds 3           MiniLM, 100 passages, Qwen3-Embedding's shape

`python -m benchmarks.run --suite decoding model` includes base, gpt2, llama and the models' cases, but not those of
`encoders`. Each program runs in processes of its own, which take turns in each round. Decoders run with one thread and
with all; the better median counts. The whole call is timed, from ids to ids. The floor is given as well: the weights
that a step reads, divided by the time of a step, as a share of the bandwidth of reading 256 MiB / of reading that many
bytes repeatedly, which may partly fit in a cache. In fp32 a peer has to give fastformer's tokens, and a model the
results of the unchanged model; otherwise it is not timed, and the exit status is 1. A missing program
becomes a row that says how to install it; `make peers` installs all of them.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path

import torch

from benchmarks.measure import record
from benchmarks.measure.commands import parser_of, positive
from benchmarks.measure.console import table
from benchmarks.measure.console import title as title_of
from benchmarks.peers import models, neighbours, suite
from benchmarks.peers.cases import CASES, GPTS, LLAMA_BENCHES, LLAMAS
from benchmarks.peers.job import PRECISIONS
from benchmarks.peers.side_by_side import Row
from benchmarks.peers.suite import SuitePlan
from benchmarks.peers.worker import Failed, peers

_ENCODERS = "encoders"  # several cases
# The fields of shapes that have no option of their own: of models, and of Llama's form.
_FIELDS = ("mode", "order", "prompt", "new")
_MODEL_CASES = (*models.CASES, *models.ENCODERS, *models.QUICK)


def main(arguments: list[str] | None = None) -> int:
    """Measures, prints a line for each row, and writes the rows."""
    options = _options(arguments)
    shared = record.environment("cpu")
    print(f"{shared['device']}, {shared['cores']} cores, commit {shared['commit']}")
    failed = False
    title: str | None = None
    try:
        for row in _rows(options):
            if (of := title_of(row)) != title:
                print(f"\n{of}", flush=True)
                title = of
            print(line(row), flush=True)
            if "wrong" in row:
                failed = True
            else:
                record.append(options.out, shared | row)
    except (ValueError, Failed) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    if title is None:
        print(f"error: --case {options.case} has nothing to measure with these options", file=sys.stderr)
        return 2
    return 1 if failed else 0


def _rows(options: argparse.Namespace) -> Iterator[Row]:
    for plan in _plans(options):
        if options.neighbours:
            yield from neighbours.measure(plan, options.rounds, options.neighbours)
        else:
            yield from suite.measure(plan, options.rounds)


def _plans(options: argparse.Namespace) -> list[SuitePlan]:
    all_threads = torch.get_num_threads()
    shape = dict(options.shape)
    if options.case == _ENCODERS:
        peers_of = options.peer or models.ENCODER_PEERS
        threads = options.threads or (all_threads,)
        *cases, decoder = models.ENCODERS
        plans = [SuitePlan(case, options.precision, threads, only=peers_of, shape=shape) for case in cases]
        # Each process of a decoder of this size takes several GiB, and conversions take more.
        return [*plans, SuitePlan(decoder, ("int8",), threads, only=("accelerated", "openvino"), shape=shape)]
    if options.case in models.MODELS:
        threads = options.threads or (all_threads,)
        of_model = [
            case
            for case in _MODEL_CASES
            if case["name"] == options.case and case["seqlen"] in (options.seqlen or (case["seqlen"],))
        ]
        return [SuitePlan(case, options.precision, threads, only=options.peer or (), shape=shape) for case in of_model]
    case = {"name": options.case}
    for name in ("run", "text"):
        if getattr(options, name) is not None:
            case[name] = str(getattr(options, name).resolve())
    many = ((1, 16), (1,)) if options.case in LLAMAS else ((1,), (1,)) if options.case in GPTS else ((1, 16), (1, 4))
    batches, beams = options.batch or many[0], options.beams or many[1]
    # The models of Llama's form are so large that one thread is never the better number.
    threads = options.threads or ((all_threads,) if options.case in LLAMAS else sorted({1, all_threads}))
    llama = {name: getattr(options, name) for name in LLAMA_BENCHES}
    return [SuitePlan(case, options.precision, threads, batches, beams, options.peer or (), llama, shape)]


def _options(arguments: list[str] | None) -> argparse.Namespace:
    parser = parser_of("peers", __doc__, out=True)
    parser.add_argument("--case", choices=(*CASES, *models.MODELS, _ENCODERS), default="base", help="the model")
    parser.add_argument("--run", type=Path, help="the run folder of --case run")
    parser.add_argument("--text", type=Path, help="a text in its source language")
    parser.add_argument("--batch", type=positive, nargs="+", help="outputs that are decoded together (1 16; GPT-2: 1)")
    parser.add_argument("--beams", type=positive, nargs="+", help="1 is greedy (1 4; a GPT: 1)")
    parser.add_argument(
        "--seqlen", nargs="+", help="lengths of a case of transformers or torch.nn, as '1 to 512' (all)"
    )
    parser.add_argument(
        "--shape", nargs="+", type=_field, default=[], metavar="FIELD=VALUE",
        help=f"only shapes with these values of {', '.join(_FIELDS)} (all)",
    )  # fmt: skip
    parser.add_argument("--precision", nargs="+", choices=PRECISIONS, default=["int8", "fp32"], help="of the weights")
    parser.add_argument("--threads", type=positive, nargs="+", help="the better number counts (decoders: 1 and all)")
    parser.add_argument("--peer", nargs="+", help="which ones (all)")
    for name in LLAMA_BENCHES:
        parser.add_argument(f"--{name}", default="", metavar="PATH", help="its program, if not on PATH")
    parser.add_argument("--neighbours", type=positive, help="time ours alone and beside so many busy processes")
    parser.add_argument("--rounds", type=positive, default=5, help="turns of each (5)")
    options = parser.parse_args(arguments)
    if (options.case == "run") != (options.run is not None and options.text is not None):
        parser.error("expected --run and --text along with --case run, and only there")
    if options.case in (*models.MODELS, _ENCODERS):
        for name in ("batch", "beams", "neighbours", *LLAMA_BENCHES):
            if getattr(options, name):
                parser.error(f"expected no --{name} beside --case {options.case}, which has its own")
    lengths = {case["seqlen"] for case in _MODEL_CASES if case["name"] == options.case}
    if not set(options.seqlen or ()) <= lengths:
        parser.error(f"expected --seqlen out of {sorted(lengths)} for --case {options.case}, got {options.seqlen}")
    names = sorted({name for plan in _plans(options) for name in peers(plan.case)} - {"read"})
    if unknown := sorted(set(options.peer or ()) - set(names)):
        parser.error(f"expected --peer out of {', '.join(names)}, got {', '.join(unknown)}")
    return options


def _field(text: str) -> tuple[str, str]:
    name, _, value = text.partition("=")
    if name not in _FIELDS or not value:
        raise argparse.ArgumentTypeError(f"expected FIELD=VALUE with a field out of {', '.join(_FIELDS)}, got {text!r}")
    return name, value


def line(row: Row) -> str:
    """Formats a row for people: the runner's line, and a peer's own figures."""
    if "wrong" in row:
        return f"    {row['provider']} is wrong and was not timed: {row['wrong']}"
    parts = [table(row)]
    if "missing" in row:
        return parts[0]
    parts.append(f"on {row['threads']}")
    if row["baseline"]:
        parts.append(f"against {row['baseline']}")
    if "share_of_dram" in row:
        parts.append(
            f"reads {row['weight_bytes_step'] / 2**20:.0f} MiB in {row['ms_step']:.2f} ms: "
            f"{100 * row['share_of_dram']:.0f} / {100 * row['share_of_cached']:.0f} %"
        )
    if row.get("same_tokens") is not None:
        parts.append(f"{row['same_tokens']} outputs as ours fp32")
    if "error" in row:
        parts.append(f"error {row['error']:.1e}")
    if "fair_share" in row:
        speedup, fair = row["speedup"], row["fair_share"]
        parts.append(f"(beside {row['neighbours']}; a fair share is {100 * fair:.0f} %: {speedup / fair:.2f}x)")
    return "  ".join(parts)


if __name__ == "__main__":
    sys.exit(main())
