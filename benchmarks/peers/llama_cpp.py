"""llama.cpp's llama-bench on the weights of a model of GPT-2's form, in Q8_0.

It times the generation of tokens behind an empty context by itself, without choosing among the logits, so that there
are no tokens to compare: the mapping is the one of `hugging_face`, under GGUF's names.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from torch import nn

from benchmarks.peers.hugging_face import check_gpt2
from benchmarks.peers.job import Job, Missing, Model, Peer, Turn
from fastformer.models import GPT

_TYPES = {"int8": "Q8_0", "bf16": "BF16", "fp32": "F32"}


class LlamaCpp(Peer):
    """One process of llama-bench a turn; loading is outside of the time that it reports."""

    name = "llama.cpp"
    order = Job

    def __init__(self, model: Model, precision: str, threads: int, options: dict[str, str]) -> None:
        built = Path(sys.executable).with_name("llama-bench")  # where `make peers` puts it
        program = options.get("llama_bench") or (str(built) if built.is_file() else shutil.which("llama-bench"))
        if not isinstance(model, GPT):
            raise Missing("compared with a GPT")
        if program is None or not Path(program).is_file():
            raise Missing("no llama-bench: `make peers` builds it; or have it on PATH, or give --llama_bench PATH")
        self._folder = tempfile.TemporaryDirectory(prefix="fastformer-gguf-")
        self.program, self.threads = program, threads
        self.file = Path(self._folder.name) / "model.gguf"
        write_gguf(model, self.file, _TYPES[precision])

    def turn(self, job: Job) -> Turn:
        if len(job.batches) != 1 or len(job.batches[0]) != 1 or job.num_beams != 1 or job.new_tokens is None:
            raise Missing("llama-bench generates one sequence of a fixed length, greedily")
        # fmt: off
        command = [self.program, "-m", str(self.file), "-p", "0", "-n", str(job.new_tokens), "-t", str(self.threads),
                   "-r", "1", "-o", "json"]
        # fmt: on
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        (result,) = json.loads(done.stdout)
        return Turn(result["avg_ns"] / 1e9, None)


def write_gguf(model: GPT, file: Path, kind: str) -> None:
    """Writes a GGUF file without a tokenizer.

    Args:
        model: of GPT-2's form.
        file: to write.
        kind: of the matrices, one of GGUF's types such as "Q8_0". Vectors and positions are fp32.

    Raises:
        Missing: gguf is not installed, or the model has another form.
    """
    try:
        import gguf
    except ImportError as error:
        raise Missing("not installed: pip install gguf") from error
    check_gpt2(model)
    config = model.config
    assert config.d_ff is not None and model.embedding.position is not None and model.decoder.norm is not None
    writer = gguf.GGUFWriter(file, "gpt2")
    writer.add_vocab_size(config.vocab_size)
    writer.add_context_length(config.max_len)
    writer.add_embedding_length(config.d_model)
    writer.add_block_count(config.num_layers)
    writer.add_feed_forward_length(config.d_ff)
    writer.add_head_count(config.num_heads)
    writer.add_layer_norm_eps(config.layer_norm_eps)
    writer.add_tokenizer_model("no_vocab")
    matrices = {"token_embd": model.embedding.weight}
    vectors = {"position_embd.weight": model.embedding.position.table}
    norms: dict[str, nn.Module] = {"output_norm": model.decoder.norm}
    for place, layer in enumerate(model.decoder.layers):
        name = f"blk.{place}."
        norms |= {f"{name}attn_norm": layer.norm1, f"{name}ffn_norm": layer.norm2}
        matrices[f"{name}attn_qkv"] = layer.self_attn.in_proj_weight
        vectors[f"{name}attn_qkv.bias"] = layer.self_attn.in_proj_bias
        linears = {"attn_output": layer.self_attn.out_proj, "ffn_up": layer.linear1, "ffn_down": layer.linear2}
        for theirs, linear in linears.items():
            matrices[name + theirs] = linear.weight
            vectors[f"{name}{theirs}.bias"] = linear.bias
    for name, norm in norms.items():
        vectors |= {f"{name}.{key}": parameter for key, parameter in norm.named_parameters()}
    quantized = getattr(gguf.GGMLQuantizationType, kind)
    for name, matrix in matrices.items():
        data = gguf.quants.quantize(matrix.detach().to(torch.float32).numpy(), quantized)
        writer.add_tensor(f"{name}.weight", data, raw_dtype=quantized)
    for name, vector in vectors.items():
        writer.add_tensor(name, vector.detach().to(torch.float32).numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
