"""The demo: a number translator, trained on this machine in about a minute, then shown and timed."""

from __future__ import annotations

import shutil
import time
from pathlib import Path

import torch

from fastformer.data.number_words import english, german, number_pairs
from fastformer.generation import Translator, draw_attention
from fastformer.training import TrainConfig, start
from fastformer.training.checkpoint import FOLDER
from fastformer.training.examples import number_texts
from fastformer.training.plot import draw_losses

UNSEEN = 1000
SAMPLES = (21, 101_000, 1_000_001, 345_678_901)


def demo_config(seed: int) -> TrainConfig:
    """Settings that reach 0.99 on numbers of up to nine digits within a minute on two cores."""
    return TrainConfig(
        task="numbers",
        preset="tiny",
        settings={"dropout": 0.0, "attention_dropout": 0.0, "activation_dropout": 0.0},
        tokenizer="bpe",
        vocab_size=200,
        max_len=64,
        batching="bucketed",
        max_tokens=2048,
        steps=700,
        schedule="linear",
        lr=3e-3,
        warmup=100,
        log_every=100,
        val_examples=0,
        seed=seed,
    )


def run_demo(folder: Path, *, seed: int = 0) -> float:
    """Trains, translates unseen numbers, times decoding without and with the cache, draws. Returns the exact match.

    Args:
        folder: the run folder; what an earlier demo left there is removed.
        seed: of data, weights and order.
    """
    if (folder / FOLDER).is_dir():
        shutil.rmtree(folder)
    trainer = start(demo_config(seed), folder)
    began = time.perf_counter()
    trainer.train()
    print(f"trained for {time.perf_counter() - began:.0f} s on {torch.get_num_threads()} threads, {trainer.device}")

    translator = Translator.from_pretrained(folder, trainer.data.tokenizer, device=trainer.device)
    seen = {source for pairs in number_texts(seed) for source, _ in pairs}
    numbers = [n for n in number_pairs(2 * UNSEEN, seed=seed + 2_000_000) if english(n) not in seen][:UNSEEN]
    sources, references = [english(n) for n in numbers], [german(n) for n in numbers]
    found = translator.translate(sources)
    exact_match = sum(a == b for a, b in zip(found, references, strict=True)) / len(numbers)
    print(f"exact match: {exact_match:.4f} ({len(numbers)} unseen numbers)")
    for number, translation in zip(SAMPLES, translator.translate([english(n) for n in SAMPLES]), strict=True):
        print(f"  {english(number)}\n    -> {translation}" + ("" if translation == german(number) else "   (wrong)"))

    speeds = decoding_speeds(translator, sources[:200])
    print(
        f"decoding 200 numbers: {speeds['naive']:.0f} sentences/s recomputing everything, {speeds['cached']:.0f} with "
        f"the cache ({speeds['cached'] / speeds['naive']:.1f}x)"
    )
    loss, heatmap = folder / "loss.png", folder / "attention.png"
    draw_losses(trainer.losses, loss)
    source, target, weights = translator.attention(english(SAMPLES[-1]))
    draw_attention(source, target, weights, heatmap, title=english(SAMPLES[-1]))
    print(f"drew the loss curve: {loss}\ndrew what a translation looks at: {heatmap}")
    print(f'try it: fastformer translate {folder} "forty-two thousand and seven"')
    return exact_match


def decoding_speeds(translator: Translator, sources: list[str], rounds: int = 3) -> dict[str, float]:
    """Sentences per second without and with the cache: medians of interleaved rounds."""
    seconds: dict[str, list[float]] = {"naive": [], "cached": []}
    for _ in range(rounds):
        for rung, times in seconds.items():
            began = time.perf_counter()
            translator.translate(sources, rung=rung)
            times.append(time.perf_counter() - began)
    return {rung: len(sources) / sorted(times)[rounds // 2] for rung, times in seconds.items()}
