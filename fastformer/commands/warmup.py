"""`fastformer warmup`."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fastformer.generation.config import Precision

if TYPE_CHECKING:
    from fastformer.kernels._launch import Resolved

Call = Callable[[], object]


def warmup(
    run: str,
    *,
    batch_size: int = 8,
    length: int = 512,
    training: bool = False,
    device: str = "auto",
    precision: Precision | None = None,
    out: str | None = None,
) -> None:
    """Prepares the GPU kernels that a model launches, so that its first calls don't wait for a compiler.

    A kernel comes from a file of kernels, from Triton's cache, or is compiled into that cache for later processes. The
    exact sizes of batches and texts don't matter; other dtypes and options need other kernels.

    Args:
        run: the folder of the model
        batch_size: the largest batch that you will use
        length: the length of the longest texts, in tokens; at most the model's limit
        training: include the kernels of training
        device: auto (a GPU), cuda, cuda:1, ...
        precision: the precision of the calls: each dtype has kernels of its own
        out: write all these kernels into a file in this folder, for machines without a compiler; see the guide to GPUs
    """
    import torch

    from fastformer.checkpoints import load_model
    from fastformer.devices import choose_device
    from fastformer.generation.engines import rounded_for_steps
    from fastformer.generation.model_protocols import DTYPES

    if batch_size < 1 or length < 1:
        raise ValueError(f"expected a batch size and a length of at least 1, got {batch_size} and {length}")
    place = choose_device(device, precision)
    if place.type != "cuda":
        raise ValueError(f"expected a GPU, got {place}: kernels for CPUs were compiled when fastformer was installed")
    model, _ = load_model(run, ("Transformer", "GPT", "BERT"), device=place, dtype=DTYPES.get(precision or ""))
    model = rounded_for_steps(model, precision)
    from fastformer.kernels import _launch

    made: list[Resolved] = []
    _launch.watch(made.append)
    began = time.perf_counter()
    try:
        with torch.cuda.device(place):
            run_all(calls(model, batch_size, length, training))
            torch.cuda.synchronize()
    finally:
        _launch.unwatch(made.append)
    for line in told(made, time.perf_counter() - began):
        print(line)
    if out is not None:
        print(written(made, Path(out)))


def run_all(each: Iterator[Call]) -> None:
    """Runs the calls, one after the other."""
    for call in each:
        call()


def calls(model: Any, batch_size: int, length: int, training: bool) -> Iterator[Call]:
    """Yields calls of a model in all sizes that have kernels of their own: one row and many, short and long texts."""
    import torch

    from fastformer.generation import generate
    from fastformer.models.stored import stand_in

    longest = max(1, min(length, model.config.max_len - 8))
    token = model.config.vocab_size - 1
    kind = type(model).__name__

    def tokens(batch: int, size: int) -> torch.Tensor:
        return torch.full((batch, size), token, device=next(stand_in(model).parameters()).device)

    def infer(batch: int, size: int) -> None:
        texts = tokens(batch, size)
        with torch.inference_mode():
            if kind == "BERT":
                model.encode(texts)
            else:
                for beams in (1, 4):
                    generate(model, texts, num_beams=beams, max_new_tokens=4, do_sample=False)

    def train(batch: int, size: int) -> None:
        texts = tokens(batch, size)
        if kind == "BERT":
            loss = model.encode(texts).float().sum()
        elif kind == "GPT":
            loss = model.loss(texts, texts)
        else:
            loss = model.loss(texts, texts, texts)
        loss.backward()
        model.zero_grad()

    was_training = model.training
    # A length that is no multiple of 8 has other kernels, since its rows have another alignment in memory.
    sizes = sorted({(batch, size) for batch in (1, batch_size) for size in {min(16, longest), longest, longest - 3}})
    sizes = [(batch, size) for batch, size in sizes if size >= 1]
    model.eval()
    for batch, size in sizes:
        yield lambda batch=batch, size=size: infer(batch, size)  # type: ignore[misc]
    if training:
        model.train()
        for batch, size in sizes:
            yield lambda batch=batch, size=size: train(batch, size)  # type: ignore[misc]
    model.train(was_training)


def told(made: Sequence[Resolved], seconds: float) -> Iterator[str]:
    """Yields lines to print about the kernels that were made ready."""
    if not made:
        yield "no kernel was launched that was not ready"
        return
    by_origin = Counter(each.origin for each in made)
    compiling = sum(each.seconds for each in made if each.origin != "file")
    ahead, compiled = by_origin["file"], by_origin["compiler"]
    yield (
        f"{len(made)} kernels for sm_{made[0].arch} are ready: {ahead} from a file, {compiled} from Triton's cache or "
        f"compiler, in {compiling:.1f} s; {seconds:.1f} s in all"
    )
    for kernel, number in sorted(Counter(each.kernel for each in made if each.origin != "file").items()):
        yield f"  {kernel} {number}"


def written(made: Sequence[Resolved], folder: Path) -> str:
    """Adds the kernels to a file in the folder, beside those of the same sources; returns a line to print."""
    from fastformer.kernels import _binaries

    if not made:
        return f"{folder}: nothing to write"
    arch = made[0].arch
    binaries = {each.key: each.binary for each in made if each.binary is not None}
    path = folder / _binaries.file_name(arch)
    _binaries.add(path, arch, binaries)
    return f"{path}: {len(binaries)} kernels, {path.stat().st_size / 1e6:.2f} MB"
