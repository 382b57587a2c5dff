"""The same text in random, bucketed and packed batches: padding, and the time of a training epoch.

    python -m benchmarks.experiments.padding [--text train.en train.de] [--precision bf16] [--batches 8] [--out FILE]

One model trains on all of them, batch by batch in turn, so that they meet the same conditions. The time of an epoch is
its tokens divided by that speed. Without a text, the sentences are random tokens, as long as Multi30k's.
"""

from __future__ import annotations

import argparse
import contextlib
import math
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from benchmarks.cases.models.bench_training_step import MULTI30K
from benchmarks.experiments.experiment import Experiment, Row, Verdict
from benchmarks.measure.commands import count, positive
from benchmarks.publish import style
from fastformer.data.batching import Batch, collate, plan_epoch
from fastformer.data.bpe import train_bpe
from fastformer.data.examples import Example, encode_pair
from fastformer.data.text import read_pairs
from fastformer.models import Transformer

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# By the name of a line: the batching of plan_epoch, and the number of examples that are batched at a time (None: all).
LINES: dict[str, tuple[str, int | None]] = {
    "random": ("random", None),
    "bucketed, pools of 256": ("bucketed", 256),
    "bucketed, pools of 1024": ("bucketed", 1024),
    "bucketed": ("bucketed", None),
    "packed": ("packed", None),
}
NOTES = {0.6: 250.0, 0.05: 100.0}  # padding -> seconds of an epoch, in the notes of one author
_SENTENCES, _VOCAB_SIZE = 8192, 8000  # used without a text
_DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def judge(rows: Sequence[Row]) -> Verdict:
    """Judges "supports" if random batches cost about as much more than bucketed ones as their padding predicts.

    The notes' epoch times are in proportion to the computed slots (tokens and padding), within a few hundredths. So the
    time of an epoch is compared with its slots.
    """
    padding = {row["provider"]: float(row["shape"]["padding"]) for row in rows}
    seconds = {row["provider"]: float(row["value"]) for row in rows}
    measured = seconds["random"] / seconds["bucketed"]
    expected = (1 - padding["bucketed"]) / (1 - padding["random"])
    return "supports" if measured >= 1 + 0.75 * (expected - 1) else "contradicts"


def draw(rows: Sequence[Row], title: str, footer: str) -> Figure:
    """Draws epoch time, packed = 1, over padding, beside the notes and the number of slots."""
    fig = style.figure(title, footer=footer)
    (axes,) = fig.axes
    packed = next(float(row["value"]) for row in rows if row["provider"] == "packed")
    most = max([*NOTES, *(row["shape"]["padding"] for row in rows)])
    ratios = [most * step / 50 for step in range(51)]
    axes.plot(
        [100 * ratio for ratio in ratios], [1 / (1 - ratio) for ratio in ratios], color=style.GREY, linestyle="--",
        linewidth=1.2, label="as many times the slots",
    )  # fmt: skip
    least = min(NOTES)
    scale = NOTES[least] * (1 - least)  # the time of an epoch without padding, according to the notes
    axes.plot(
        [100 * ratio for ratio in NOTES], [seconds / scale for seconds in NOTES.values()], "D", color=style.BLUE,
        label="the notes (5 % put on the dashed line)",
    )  # fmt: skip
    points = [(100 * row["shape"]["padding"], float(row["value"]) / packed, row["provider"]) for row in rows]
    axes.plot(*zip(*((x, y) for x, y, _ in points), strict=True), "o", color=style.OURS, label="measured")
    for x, y, name in points:
        axes.annotate(name, (x, y), xytext=(7, -11), textcoords="offset points", fontsize=9)
    axes.set(xlabel="padding, % of all slots", ylabel="epoch time, packed = 1", ylim=(0, None))
    axes.set_xlim(-2, 100 * most + 8)
    style.legend(fig)
    return fig


def plan(lengths: torch.Tensor, line: str, max_tokens: int) -> list[list[int]]:
    """Returns the batches of an epoch, as lists of indices."""
    batching, pool = LINES[line]
    order = torch.randperm(len(lengths), generator=torch.Generator().manual_seed(0))
    batches = []
    for part in order.split(pool or len(order)):
        planned = plan_epoch(lengths[part], max_tokens=max_tokens, batching=batching, seed=0, epoch=0)
        batches += [part[batch].tolist() for batch in planned]
    return batches


def padding_ratio(lengths: torch.Tensor, line: str, batches: Sequence[Sequence[int]]) -> float:
    """Returns the share of padding among all computed tokens of an epoch, over both sides: 1 - real / computed."""
    if line == "packed":
        return 0.0
    return 1.0 - int(lengths.sum()) / sum(len(batch) * int(lengths[batch].max(0).values.sum()) for batch in batches)


def examples_of(options: argparse.Namespace) -> tuple[list[Example], int]:
    """Returns the examples, and the size of their vocabulary."""
    if options.text is None:
        generator = torch.Generator().manual_seed(0)
        sides = [MULTI30K[i] for i in torch.randint(len(MULTI30K), (_SENTENCES,), generator=generator).tolist()]
        ids = torch.randint(3, _VOCAB_SIZE, (sum(map(sum, sides)),), generator=generator).tolist()
        examples, at = [], 0
        for source, target in sides:
            examples.append(Example(ids[at : at + source], ids[at + source : at + source + target]))
            at += source + target
        return examples, _VOCAB_SIZE
    pairs = read_pairs(*options.text)
    tokenizer = train_bpe([line for pair in pairs for line in pair], _VOCAB_SIZE)
    return [encode_pair(*map(tokenizer.encode, pair)) for pair in pairs], tokenizer.vocab_size


def measure(options: argparse.Namespace) -> Iterator[Row]:
    """Trains one model on the batches of all lines in turn."""
    try:
        examples, vocab_size = examples_of(options)
    except (OSError, ValueError) as error:
        raise argparse.ArgumentTypeError(f"argument --text: {error}") from error
    lengths = torch.tensor([example.lengths for example in examples])
    model = Transformer.from_preset(
        "base", vocab_size=vocab_size, d_model=options.d_model, d_ff=4 * options.d_model,
        num_heads=options.d_model // 64, num_encoder_layers=3, num_decoder_layers=3, device=_DEVICE,
    )  # fmt: skip
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    context = torch.autocast(_DEVICE, torch.bfloat16) if options.precision == "bf16" else contextlib.nullcontext()

    def step(batch: Batch) -> float:
        """Returns the seconds of an update."""
        began = time.perf_counter()
        with context:
            assert batch.source is not None  # pairs always have a source
            loss = model.loss(
                batch.source, batch.target_in, batch.target_out,
                source_layout=batch.source_layout, target_layout=batch.target_layout,
            )  # fmt: skip
        (loss / batch.num_target_tokens).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if _DEVICE == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter() - began

    plans = {line: plan(lengths, line, options.max_tokens) for line in LINES}
    # Spread evenly over the whole epoch, so that the small last batch of a pool counts as often as it occurs.
    chosen = {
        line: [
            collate([examples[i] for i in batches[at * len(batches) // options.batches]], packed=line == "packed")
            for at in range(min(options.batches, len(batches)))
        ]
        for line, batches in plans.items()
    }
    fastest: dict[tuple[str, int], float] = {}
    for turn in range(options.rounds + 1):
        for at in range(options.batches if turn else 1):  # the first is the warm-up
            for line, line_batches in chosen.items():
                if at < len(line_batches):
                    seconds = step(line_batches[at].to(_DEVICE))
                    if turn:
                        fastest[line, at] = min(seconds, fastest.get((line, at), math.inf))

    for line, batches in plans.items():
        padding = padding_ratio(lengths, line, batches)
        elapsed = sum(seconds for (name, _), seconds in fastest.items() if name == line)
        speed = sum(batch.num_tokens for batch in chosen[line]) / elapsed
        epoch = int(lengths.sum()) / speed
        print(
            f"{line:>24}: padding {100 * padding:4.1f} %, {len(batches)} batches, {speed:,.0f} real tokens/s, "
            f"an epoch of {len(examples):,} pairs in {epoch:,.0f} s"
        )
        shape = {
            "batching": LINES[line][0], "pool": LINES[line][1], "padding": padding, "batches": len(batches),
            "pairs": len(examples), "text": options.text is not None, "max_tokens": options.max_tokens,
            "d_model": options.d_model, "precision": options.precision,
        }  # fmt: skip
        yield {"provider": line, "shape": shape, "value": epoch, "unit": "s", "tokens_s": speed}


def multiple_of_64(text: str) -> int:
    """Converts an argument for argparse."""
    value = positive(text)
    if value % 64:
        raise argparse.ArgumentTypeError(f"expected a multiple of 64, got {text}")
    return value


EXPERIMENT = Experiment(
    name="padding",
    title="Padding against the time of an epoch",
    claim="At 60 % padding an epoch took 250 s, at 5 % 100 s.",
    judge=judge,
    draw=draw,
    measure=measure,
    flags={
        "text": {"type": Path, "nargs": 2, "metavar": ("SOURCE", "TARGET"), "help": "two files, aligned by line"},
        "max-tokens": count(4096, "of a batch, on the longer side"),
        "d-model": count(256, "of the 3 + 3 layers, a multiple of 64") | {"type": multiple_of_64},
        "precision": {"choices": ("fp32", "bf16"), "default": "fp32", "help": "bf16: under autocast"},
        "batches": count(8, "of each batching that are trained on"),
        "rounds": count(2, "training steps with each, the faster of which counts"),
    },
    quick={"max_tokens": 1024, "d_model": 64, "batches": 2, "rounds": 1},
    device=_DEVICE,
)
main = EXPERIMENT.main

if __name__ == "__main__":
    raise SystemExit(main())
