"""The sources' experiments, each a module and a command. `python -m benchmarks.experiments` lists their verdicts.

To add an experiment: a module here with an `EXPERIMENT` and a `main`, and its line below.
"""

from __future__ import annotations

# In the order of the page. This file imports no library, so that listing the names is fast.
EXPERIMENTS = {
    "padding": "padding ratio against epoch time: random, bucketed and packed batches",
    "norm_order": "pre-norm against post-norm, with and without warm-up: loss curves",
    "lstm": "Transformer against LSTM with attention, as many parameters: quality over training time",
    "label_smoothing": "label smoothing 0 against 0.1: likelihood and exact match",
    "positions": "the two layouts of sines and cosines: the same quality?",
    "sharding": "fair shards against sources one after the other: loss curve and its swings",
    "ladder": "the decoding ladder on a trained model: tokens a second, exact match",
}
