"""Trains on two processes of this machine, then continues on one: their number may change between updates.

    python examples/train_on_two_processes.py RUN PAIRS.tsv --steps 8

PyTorch's torchrun starts the processes. After it comes the same command as for a training on one process.
"""

from __future__ import annotations

import argparse
import subprocess
import sys


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("run")
    parser.add_argument("pairs", help="a TSV file with source<TAB>target lines")
    parser.add_argument("--steps", type=int, default=8)
    options = parser.parse_args(arguments)

    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    train = ["-m", "fastformer.cli", "train", options.run]
    settings = [
        "--train_tsv", options.pairs, "--vocab_size", "300", "--preset", "tiny", "--warmup", "2", "--device", "cpu",
        "--accumulate", "2",  # batches per update, over all processes
        "--steps", str(options.steps), "--val_every", str(options.steps), "--save_every", str(options.steps),
    ]  # fmt: skip
    subprocess.run([*torchrun, *train, *settings], check=True)
    # One process computes both batches of an update.
    subprocess.run([sys.executable, *train, "--resume", "--steps", str(2 * options.steps)], check=True)
    print(f"{options.run}: {options.steps} updates by two processes, and as many by one")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
