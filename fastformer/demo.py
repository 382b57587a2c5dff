"""The demo: a number translator, trained on this machine in about a minute on two cores, then shown and timed."""

from __future__ import annotations

import time
from pathlib import Path

import torch

from fastformer.checkpoints.lock import RunLock
from fastformer.checkpoints.training_state import FOLDER
from fastformer.commands import command_line
from fastformer.files import write_atomically
from fastformer.generation import Translator, draw_attention
from fastformer.number_words import english, german, number_pairs
from fastformer.plots import draw_losses
from fastformer.training import TrainConfig, Trainer, run_log, start
from fastformer.training.examples import number_texts
from fastformer.training.interrupts import Interrupted, Interrupts

UNSEEN = 1000
# The demo's own files: those of its training in a run folder, its pictures, and the file that marks a demo.
MARK = ".fastformer-demo"
OWN_FILES = (
    "config.json", "config.yaml", "model.safetensors", "tokenizer.json", "metrics.jsonl", "events.out.tfevents.*",
    "loss.png", "attention.png",
)  # fmt: skip
OWN_CHECKPOINTS = ("step-" + "[0-9]" * 8 + ".pt",)
SAMPLES = (21, 101_000, 1_000_001, 345_678_901)


def demo_config(seed: int) -> TrainConfig:
    """Returns the config of the built-in task, with fewer steps: they translate 0.997 of unseen numbers exactly.

    The demo itself scores the model at the end, so the training doesn't.
    """
    return TrainConfig.from_dict({"task": "numbers", "steps": 500, "val_examples": 0, "seed": seed})


def run_demo(folder: Path, *, seed: int = 0) -> float:
    """Trains, translates unseen numbers, times decoding without and with the cache, draws. Returns the exact match.

    Args:
        folder: the run folder: a new or empty one, or that of an earlier demo, whose own files are replaced.
        seed: the seed of data, weights and order.

    Raises:
        ValueError: the folder holds anything else.
    """
    config = demo_config(seed)
    with Interrupts() as interrupts:
        clear(folder)
        trainer = start(config, folder, interrupts=interrupts)
        return train_and_show(trainer, folder, seed)


def clear(folder: Path) -> None:
    """Makes room for a demo in a new folder, an empty one, or that of an earlier demo, whose own files are removed.

    Every other file stays: the demo removes only the files that it wrote, by name.

    Raises:
        ValueError: the folder has other files and isn't marked as a demo's, or a training is running in it.
    """
    if not folder.parts:
        raise ValueError("expected a folder to write the demo to that is not the current one: give --out demo")
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"expected a folder for the demo, got the file {folder}")
    mark = folder / MARK
    if not mark.is_file():
        if folder.is_dir() and any(folder.iterdir()):
            raise ValueError(
                f"{folder} holds files that no demo wrote: expected a new or an empty folder, or that of an earlier "
                "demo; give another --out"
            )
        folder.mkdir(parents=True, exist_ok=True)
        write_atomically(
            mark, b"`fastformer demo` wrote this folder. When it runs again, it replaces its own files here.\n"
        )
        return
    with RunLock(folder):
        saved = folder / FOLDER
        if saved.is_symlink():
            raise ValueError(f"expected {saved} to be a folder, got a link: give another --out")
        for directory, names in ((folder, OWN_FILES), (saved, OWN_CHECKPOINTS)):
            for path in directory.iterdir() if directory.is_dir() else ():
                if (path.is_file() or path.is_symlink()) and any(path.match(name) for name in names):
                    path.unlink()
        for path in filter(run_log.wrote, folder.glob("train*.log")):
            path.unlink()
        if saved.is_dir() and not any(saved.iterdir()):
            saved.rmdir()


def train_and_show(trainer: Trainer, folder: Path, seed: int) -> float:
    began = time.perf_counter()
    trainer.train()
    if trainer.interrupted and trainer.interrupts.signum is not None:
        raise Interrupted(trainer.interrupts.signum)
    print(f"trained for {time.perf_counter() - began:.0f} s on {torch.get_num_threads()} threads, {trainer.device}")

    translator = Translator.from_pretrained(folder, trainer.data.tokenizer, device=trainer.device)
    seen = {source for pairs in number_texts(seed) for source, _ in pairs}
    numbers = [n for n in number_pairs(2 * UNSEEN, seed=seed + 2_000_000) if english(n) not in seen][:UNSEEN]
    sources, references = [english(n) for n in numbers], [german(n) for n in numbers]
    translations = translator.translate(sources)
    exact_match = sum(a == b for a, b in zip(translations, references, strict=True)) / len(numbers)
    print(f"exact match: {exact_match:.4f} ({len(numbers)} unseen numbers)")
    for number, translation in zip(SAMPLES, translator.translate([english(n) for n in SAMPLES]), strict=True):
        print(f"  {english(number)}\n    -> {translation}" + ("" if translation == german(number) else "   (wrong)"))

    speeds = decoding_speeds(translator, sources[:200])
    print(
        f"decoding 200 numbers: {speeds['recompute']:.0f} sentences/s recomputing everything, "
        f"{speeds['kv_cache']:.0f} with the cache ({speeds['kv_cache'] / speeds['recompute']:.1f}x)"
    )
    loss, heatmap = folder / "loss.png", folder / "attention.png"
    draw_losses(trainer.position.losses, loss)
    source, target, weights = translator.attention(english(SAMPLES[-1]))
    draw_attention(source, target, weights, heatmap, title=english(SAMPLES[-1]))
    print(f"drew the loss curve: {loss}\ndrew what a translation looks at: {heatmap}")
    print(f"try it: {command_line('translate', folder, 'forty-two thousand and seven')}")
    return exact_match


def decoding_speeds(translator: Translator, sources: list[str]) -> dict[str, float]:
    """Measures sentences per second without and with the cache: medians of three interleaved rounds."""
    seconds: dict[str, list[float]] = {"recompute": [], "kv_cache": []}
    for _ in range(3):
        for engine, times in seconds.items():
            began = time.perf_counter()
            translator.translate(sources, engine=engine)
            times.append(time.perf_counter() - began)
    return {engine: len(sources) / sorted(times)[1] for engine, times in seconds.items()}
