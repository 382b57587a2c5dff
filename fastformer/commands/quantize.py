"""`fastformer quantize`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Literal


def quantize(run: str, out: str, *, precision: Literal["int8", "int4"] = "int8") -> None:
    """Rounds a model's weights to int8 or int4, into a folder of its own.

    The folder has about a quarter of fp32's bytes, or a seventh. `fastformer translate` and `generate` take it, and
    compute in its precision where the CPU can. Their texts differ a little from those of the run with the same
    --precision: the folder has the table of embeddings rounded too, for its size, while that looks embeddings up in
    bf16.

    Args:
        run: the run folder
        out: the folder to write, a new or an empty one
        precision: int8 has 255 steps for each output of a matrix; int4 has 16 for each 32 weights
    """
    from fastformer.checkpoints import load_model
    from fastformer.checkpoints.hf.common import GENERATION
    from fastformer.files import write_atomically
    from fastformer.generation.folder_options import saved_options
    from fastformer.models.weights import weights_size

    folder = Path(out)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ValueError(f"expected a new or an empty folder, but there are files in {out}")
    model, tokenizer = load_model(run, ("Transformer", "GPT"))
    options = saved_options(run)
    model.quantize(precision).save_pretrained(folder, tokenizer)
    if options is not None:  # even without any, the folder then has transformers' defaults
        write_atomically(folder / GENERATION, f"{json.dumps(options)}\n".encode())
    before, after = (weights_size(Path(path)) for path in (run, out))
    instead = f" instead of {before / 2**20:.1f}" if before else ""
    print(f"wrote {out}: {after / 2**20:.1f} MiB of weights{instead}")
