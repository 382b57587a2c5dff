"""The same text read in random, bucketed and packed batches: padding, and real tokens a second of training.

    python -m benchmarks.experiments.batching train.en train.de [--precision bf16] [--rounds 10] [--out FILE]

One model trains on all three, batch by batch in turn, so that they meet the same conditions.
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
import time
from pathlib import Path

import torch

from benchmarks import record
from fastformer.data.batching import BATCHINGS, collate, padding_ratio, plan_epoch
from fastformer.data.examples import encode_pair
from fastformer.data.text import read_pairs
from fastformer.data.tokenizer import train_bpe
from fastformer.models import Transformer


def main(arguments: list[str] | None = None) -> int:
    """Prints a line for each batching."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.experiments.batching", description=__doc__.splitlines()[0])
    parser.add_argument("source", type=Path, help="a text file")
    parser.add_argument("target", type=Path, help="its translation, line by line")
    parser.add_argument("--vocab-size", type=int, default=8000, help="of the joint BPE")
    parser.add_argument("--max-tokens", type=int, default=4096, help="of a batch, on the longer side")
    parser.add_argument("--d-model", type=int, default=256, help="of the 3 + 3 layers")
    parser.add_argument("--precision", choices=("fp32", "bf16"), default="fp32", help="bf16: under autocast")
    parser.add_argument("--rounds", type=int, default=10, help="training steps of each batching")
    parser.add_argument("--out", type=Path, help="append JSON lines to this file")
    options = parser.parse_args(arguments)

    pairs = read_pairs(options.source, options.target)
    tokenizer = train_bpe([line for pair in pairs for line in pair], options.vocab_size)
    examples = [encode_pair(*map(tokenizer.encode, pair)) for pair in pairs]
    lengths = torch.tensor([example.lengths for example in examples])
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = Transformer.from_preset(
        "base", vocab_size=tokenizer.vocab_size, d_model=options.d_model, d_ff=4 * options.d_model,
        num_heads=options.d_model // 64, num_encoder_layers=3, num_decoder_layers=3, device=device,
    )  # fmt: skip
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    context = torch.autocast(device, torch.bfloat16) if options.precision == "bf16" else contextlib.nullcontext()

    plans = {
        batching: plan_epoch(lengths, max_tokens=options.max_tokens, batching=batching, seed=0, epoch=0)
        for batching in BATCHINGS
    }
    speeds: dict[str, list[float]] = {batching: [] for batching in BATCHINGS}
    for turn in range(options.rounds + 1):
        for batching, plan in plans.items():
            packed = batching == "packed"
            batch = collate([examples[i] for i in plan[turn]], packed=packed).to(device)
            began = time.perf_counter()
            with context:
                assert batch.source is not None  # of pairs, each has one
                loss = model.loss(
                    batch.source, batch.target_in, batch.target_out,
                    source_layout=batch.source_layout, target_layout=batch.target_layout,
                )  # fmt: skip
            (loss / batch.num_target_tokens).backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            if device == "cuda":
                torch.cuda.synchronize()
            if turn:  # the first is the warm-up
                speeds[batching].append(batch.num_tokens / (time.perf_counter() - began))

    shared = record.environment(device)
    slowest = statistics.median(speeds[BATCHINGS[0]])
    for batching, plan in plans.items():
        padding = padding_ratio(lengths, plan, packed=batching == "packed")
        speed = statistics.median(speeds[batching])
        print(
            f"{batching:>9}: padding {100 * padding:4.1f} %, {len(plan)} batches, "
            f"{speed:,.0f} real tokens/s, {speed / slowest:.2f}x {BATCHINGS[0]}"
        )
        if options.out:
            row = {"op": "batching", "batching": batching, "padding": padding, "batches": len(plan), "tokens_s": speed,
                   "speedup": speed / slowest, "precision": options.precision}  # fmt: skip
            record.append(options.out, row | shared)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
