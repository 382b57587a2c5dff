"""Files that `quantize` writes are read by llama.cpp itself, which finds the same tokens and probabilities.

pip install xllamacpp && pytest -m slow tests/checkpoints/test_llama_cpp.py
"""

from __future__ import annotations

import dataclasses
import json
import unicodedata
import urllib.request
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from fastformer.checkpoints.gguf.blocks import numbers
from fastformer.checkpoints.gguf.file import read_gguf
from fastformer.cli import main
from fastformer.models import GPT
from tests.checkpoints.test_gguf import EXPECTED, contents, load, to_bytes
from tests.foreign.gguf_files import FOLDER

pytest.importorskip("tokenizers", reason="the tokenizers library is not installed")
pytest.importorskip("sentencepiece", reason="the sentencepiece library is not installed")


WRITTEN = [
    "llama", "mistral", "smollm", "qwen2", "qwen3", "gemma", "gemma2", "gemma3", "phi3", "olmo2", "starcoder2", "gpt2"
]  # fmt: skip
GELU = ("gemma", "gemma2", "gemma3", "starcoder2", "gpt2")  # llama.cpp has a table of it, in fp16
PROMPTS, MOST = 4, 24


class LlamaCpp:
    """A file in llama.cpp, which computes in fp32 except that it rounds the inputs of matrices to int8."""

    def __init__(self, path: Path) -> None:
        import xllamacpp as library

        params = library.CommonParams()
        params.model.path, params.n_ctx, params.n_parallel, params.warmup = str(path), 128, 1, False
        params.cache_type_k = params.cache_type_v = library.ggml_type.GGML_TYPE_F32
        params.flash_attn_type = library.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
        params.cpuparams.n_threads = 1
        self._server = library.Server(params)

    def encode(self, text: str) -> list[int]:
        body = {"content": text, "add_special": True, "parse_special": True}
        address, kind = f"{self._server.listening_address}/tokenize", {"Content-Type": "application/json"}
        request = urllib.request.Request(address, json.dumps(body).encode(), kind)
        with urllib.request.urlopen(request) as answer:
            ids: list[int] = json.load(answer)["tokens"]
        return ids

    def next(self, tokens: list[int], vocab_size: int) -> Tensor:
        """Returns the log-probabilities of the next token.

        The server hides the numbers of tokens that are a part of a letter, so it is made to choose another one.
        """
        (whole,) = self.encode(" t")[-1:]
        body = {"prompt": tokens, "n_predict": 1, "n_probs": vocab_size, "logit_bias": [[whole, 1000.0]]}
        (choice,) = self._server.handle_completions({**body, "temperature": 0})["choices"]
        row = torch.full((vocab_size,), torch.nan)
        for each in choice["logprobs"]["content"][0]["top_logprobs"]:
            row[each["id"]] = each["logprob"]
        assert row.isfinite().all()
        return row

    def continued(self, prompt: list[int], vocab_size: int) -> tuple[list[int], Tensor]:
        """Returns the likeliest tokens one after the other, and the log-probabilities at each of their places."""
        rows, tokens = list[Tensor](), list[int]()
        for _ in range(MOST):
            rows.append(self.next(prompt + tokens, vocab_size))
            tokens.append(int(rows[-1].argmax()))
        return tokens, torch.stack(rows)


def with_floats(path: Path) -> Path:
    """Writes a file with the same numbers in fp32, for which llama.cpp doesn't round the inputs of matrices."""
    values, tensors = contents(path)
    for name, stored in read_gguf(path).tensors.items():
        tensors[name] = 0, stored.shape[::-1], numbers(*stored[:3]).float().numpy().tobytes()
    (copy := path.with_name("floats.gguf")).write_bytes(to_bytes(values, tensors))
    return copy


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["q8_0", "q4_0"])
@pytest.mark.parametrize("name", WRITTEN)
def test_llama_cpp_reads_what_is_written(name: str, kind: str, tmp_path: Path, record_property: Any) -> None:
    pytest.importorskip("xllamacpp", reason="the xllamacpp library is not installed")
    path, source = tmp_path / "x.gguf", FOLDER / f"{name}.gguf"
    if name == "phi3":  # the file's has a scaling that is not written, and without one and half of it a Llama
        long, names = load(source, dtype=torch.float32)
        model = GPT(dataclasses.replace(long.config, rotary_scaling=None, rotary_fraction=0.5))
        model.load_state_dict(long.state_dict())
        model.save_pretrained(source := tmp_path / "phi3", names)
    assert main(["quantize", str(source), str(path), "--precision", kind]) == 0
    model, tokenizer = load(path, dtype=torch.float32)
    exact, rounded, size = LlamaCpp(with_floats(path)), LlamaCpp(path), model.config.vocab_size
    for text in EXPECTED[name]["texts"]:
        normal = unicodedata.normalize("NFC", text) if name.startswith("qwen") else text  # llama.cpp doesn't do it
        assert rounded.encode(normal) == tokenizer.encode_prompt(text), text
    limit = 1e-2 if name in GELU else 1e-4
    draw = torch.Generator().manual_seed(5)
    for _ in range(PROMPTS):
        prompt = torch.randint(4, size, (8,), generator=draw).tolist()
        (tokens, expected), (others, near) = (engine.continued(prompt, size) for engine in (exact, rounded))
        with torch.inference_mode():
            found, other = (
                model(torch.tensor([prompt + new[:-1]]))[0, len(prompt) - 1 :].log_softmax(-1)
                for new in (tokens, others)
            )
        assert (found - expected).abs().max() < limit and found.argmax(-1).tolist() == tokens
        change = float((other - near).square().mean().sqrt() / other.std(-1).mean())
        record_property("change", change)
        assert change < 0.1  # by the rounded inputs alone
