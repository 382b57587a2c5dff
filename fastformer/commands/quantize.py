"""`fastformer quantize`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Literal


def quantize(run: str, out: str, *, precision: Literal["int8", "int4", "q8_0", "q4_0"] = "int8") -> None:
    """Rounds a model's weights to int8 or int4, into a folder of its own.

    The folder has about a quarter of fp32's bytes, or a seventh. `fastformer translate` and `generate` take it, and
    compute in its precision where the CPU can. Their texts differ a little from those of the run with the same
    --precision: the folder has the table of embeddings rounded too, for its size, while that looks embeddings up in
    bf16.

    Args:
        run: the run folder
        out: the folder to write, a new or an empty one; a name that ends with .gguf is a file that llama.cpp reads
        precision: int8 has 255 steps for each output of a matrix; int4 has 16 for each 32 weights; a .gguf file has
            q8_0 (also called int8) or q4_0 (int4) instead, with 255 or 16 steps for each 32 weights
    """
    import torch

    from fastformer.checkpoints import load_model
    from fastformer.checkpoints.gguf import Kind, is_gguf, write_gguf
    from fastformer.checkpoints.hf.search_file import GENERATION
    from fastformer.files import write_atomically
    from fastformer.generation.folder_options import saved_options
    from fastformer.models.weights import weights_size

    folder = Path(out)
    is_file = is_gguf(out)
    if not is_file and precision.startswith("q"):
        raise ValueError(f"expected precision int8 or int4 for a folder, got {precision}, which .gguf files have")
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ValueError(f"expected a new or an empty folder, but there are files in {out}")
    if is_file:
        model, tokenizer = load_model(run, ("GPT",), dtype=torch.float32)
        write_gguf(out, model, tokenizer, Kind.Q8_0 if precision in ("int8", "q8_0") else Kind.Q4_0)
        print(f"wrote {out}: {folder.stat().st_size / 2**20:.1f} MiB")
        return
    model, tokenizer = load_model(run, ("Transformer", "GPT"))
    options = saved_options(run)
    model.quantize(precision).save_pretrained(folder, tokenizer)
    if options is not None:  # even without any, the folder then has transformers' defaults
        write_atomically(folder / GENERATION, f"{json.dumps(options)}\n".encode())
    before, after = (weights_size(Path(path)) for path in (run, out))
    instead = f" instead of {before / 2**20:.1f}" if before else ""
    print(f"wrote {out}: {after / 2**20:.1f} MiB of weights{instead}")
