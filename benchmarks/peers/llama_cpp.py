"""The benchmarks of llama.cpp and ik_llama.cpp on the weights of a model of GPT-2's or Llama's form.

llama-bench times the generation of tokens after an empty context; llama-batched-bench times prompts that are read and
continued together. Neither chooses tokens by the logits, so there are no tokens to compare. The mapping is that of
`hugging_face`, with GGUF's names.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.peers.job import PRECISIONS, JobResult, Missing, Model, Peer, PeerJob, needed
from fastformer.models import GPT
from fastformer.models.gpt_config import GPTConfig

_TYPES = {"int4": "Q4_0", "int8": "Q8_0", "bf16": "BF16", "fp32": "F32"}
_ATTEMPTS = 10
Tensors = tuple[dict[str, Tensor], dict[str, Tensor]]


class LlamaCpp(Peer):
    """A peer that runs one process of llama.cpp a turn; its reported time excludes loading."""

    name = "llama.cpp"
    precisions = PRECISIONS
    order = PeerJob
    # The name of llama-bench in options, in the environment as capitals, and in the folder of this Python with hyphens.
    bench = "llama_bench"
    # Options of llama-bench, and of llama-batched-bench.
    flags: tuple[tuple[str, ...], tuple[str, ...]] = ((), ())

    def __init__(self, model: Model, precision: str, threads: int, options: dict[str, str]) -> None:
        if not isinstance(model, GPT):
            raise Missing("compared with a GPT")
        self._folder = tempfile.TemporaryDirectory(prefix="fastformer-gguf-")
        self.program, self.threads = _program(self.bench, options), threads
        self.file = Path(self._folder.name) / "model.gguf"
        write_gguf(model, self.file, _TYPES[precision])

    def turn(self, job: PeerJob) -> JobResult:
        if len(job.batches) != 1 or job.num_beams != 1 or job.new_tokens is None:
            raise Missing("its benchmarks generate sequences of a fixed length, greedily")
        (prompts,) = job.batches
        lengths = set(map(len, prompts))
        if len(lengths) != 1:
            raise Missing("llama-batched-bench reads prompts of one length")
        if len(prompts) == 1 and lengths == {1}:
            output = self._run(self.program, *self.flags[0], "-p", 0, "-n", job.new_tokens, "-r", 1, "-o", "json")
            (result,) = json.loads(output.stdout)
            return JobResult(result["avg_ns"] / 1e9, None)
        batched = self.program.with_name(self.program.name.replace("bench", "batched-bench"))
        if not batched.is_file():
            raise Missing(f"no {batched.name} beside {self.program.name}: `make peers` builds both")
        # The first new token comes from reading the prompt, and the last one is not read.
        (length,), more = lengths, job.new_tokens - 1
        # Its last output may get lost when the process ends, so a short row follows the row that counts. If both rows
        # are short, it runs again.
        for _ in range(_ATTEMPTS):
            output = self._run(
                batched, *self.flags[1], "-c", len(prompts) * (length + job.new_tokens), "-npp", f"{length},1",
                "-ntg", max(1, more), "-npl", len(prompts),
            )  # fmt: skip
            lines = (output.stdout + output.stderr).splitlines()  # ik_llama.cpp logs them
            if rows := [line for line in lines if re.match(r"\|\s*\d", line)]:
                cells = rows[0].strip("| ").split("|")
                prompt_seconds, more_seconds = float(cells[4]), float(cells[6])
                return JobResult(prompt_seconds + (more_seconds if more else 0.0), None)
        raise Missing(f"llama-batched-bench printed no times in {_ATTEMPTS} runs")

    def _run(self, program: Path, *options: object) -> subprocess.CompletedProcess[str]:
        command = [str(program), "-m", str(self.file), "-t", str(self.threads), *map(str, options)]
        return subprocess.run(command, capture_output=True, text=True, check=True)


class IkLlamaCpp(LlamaCpp):
    """ik_llama.cpp, with its flash attention, and weights that are repacked when the file is loaded."""

    name = "ik_llama.cpp"
    bench = "ik_llama_bench"
    flags = (("-fa", "1", "-rtr", "1"), ("-fa", "on", "-rtr"))


def _program(name: str, options: dict[str, str]) -> Path:
    """Returns the path of a llama-bench.

    Raises:
        Missing: it doesn't exist.
    """
    file = name.replace("_", "-")
    built = Path(sys.executable).with_name(file)  # `make peers` installs it there
    configured = options.get(name) or os.environ.get(name.upper())
    program = configured or (str(built) if built.is_file() else shutil.which(file))
    if program is None or not Path(program).is_file():
        raise Missing(f"no {file}: `make peers` builds it; or have it on PATH, or name it in {name.upper()}")
    return Path(program)


def write_gguf(model: GPT, file: Path, kind: str, tokens: Sequence[str] = ()) -> None:
    """Writes a GGUF file.

    Args:
        model: a model of GPT-2's or Llama's form.
        file: the file to write.
        kind: the type of the matrices, one of GGUF's types such as "Q8_0". Vectors and positions are fp32.
        tokens: one for each id, in the spelling of GPT-2's tokenizer, so that ids become texts. Texts don't become ids:
            no merge makes a token. Empty: the file has no tokenizer.

    Raises:
        Missing: gguf is not installed, or the model has another form.
    """
    gguf = needed("gguf")
    matrices, vectors = tensors_of(model)
    config = model.config
    form = "llama" if config.norm == "rms" else "gpt2"
    assert config.d_ff is not None
    writer = gguf.GGUFWriter(file, form)
    writer.add_vocab_size(config.vocab_size)
    writer.add_context_length(config.max_len)
    writer.add_embedding_length(config.d_model)
    writer.add_block_count(config.num_layers)
    writer.add_feed_forward_length(config.d_ff)
    writer.add_head_count(config.num_heads)
    if tokens:
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre("gpt-2")
        writer.add_token_list(list(tokens))
        writer.add_token_merges([f"{tokens[-1][0]} {tokens[-1][1]}"])
        writer.add_eos_token_id(model.config.special_ids.first_eos)
    else:
        writer.add_tokenizer_model("no_vocab")
    if form == "llama":
        attention = model.decoder.layers[0].self_attn
        writer.add_head_count_kv(attention.num_kv_heads)
        writer.add_layer_norm_rms_eps(config.layer_norm_eps)
        writer.add_rope_dimension_count(attention.head_dim)
        writer.add_rope_freq_base(config.rotary_base)
    else:
        writer.add_layer_norm_eps(config.layer_norm_eps)
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


# The options of each form; the others, except for sizes, have their defaults.
_FORMS: dict[str, dict[str, Any]] = {
    "GPT-2": {"activation": "gelu_tanh"},
    "Llama": {"norm": "rms", "activation": "swiglu", "positions": "rotary", "bias": False},
}
_SIZES = (
    "d_model", "num_heads", "num_kv_heads", "num_layers", "d_ff", "layer_norm_eps", "rotary_base", "max_len",
    "special_ids", "dropout", "attention_dropout", "activation_dropout",
)  # fmt: skip


def tensors_of(model: GPT) -> Tensors:
    """Returns the matrices to quantise, by GGUF's names without ".weight", and the vectors, which are in fp32.

    Raises:
        Missing: the model has neither GPT-2's nor Llama's form; the message names the option.
    """
    config = model.config
    name = "Llama" if config.norm == "rms" else "GPT-2"
    for option, value in vars(GPTConfig(config.vocab_size, **_FORMS[name])).items():
        if option not in _SIZES and getattr(config, option) != value:
            raise Missing(f"{name} has {option} {value}, this model {getattr(config, option)}")
    if name == "Llama":
        return _llama_tensors(model)
    if config.num_kv_heads not in (None, config.num_heads):
        raise Missing(
            f"GPT-2 has as many heads of keys as of queries, this model has num_kv_heads {config.num_kv_heads}"
        )
    return _gpt2_tensors(model)


def _gpt2_tensors(model: GPT) -> Tensors:
    assert model.embedding.position is not None and model.decoder.norm is not None
    matrices = {"token_embd": model.embedding.weight}
    vectors = {"position_embd.weight": model.embedding.position.table}
    norms: dict[str, nn.Module] = {"output_norm": model.decoder.norm}
    for place, layer in enumerate(model.decoder.layers):
        name = f"blk.{place}."
        norms |= {f"{name}attn_norm": layer.norm1, f"{name}ffn_norm": layer.norm2}
        matrices[f"{name}attn_qkv"] = layer.self_attn.in_proj_weight
        vectors[f"{name}attn_qkv.bias"] = layer.self_attn.in_proj_bias
        linears = {"attn_output": layer.self_attn.out_proj, "ffn_up": layer.linear1, "ffn_down": layer.linear2}
        for tensor_name, linear in linears.items():
            matrices[name + tensor_name] = linear.weight
            vectors[f"{name}{tensor_name}.bias"] = linear.bias
    return matrices, vectors | _parameters(norms)


def _llama_tensors(model: GPT) -> Tensors:
    assert model.decoder.norm is not None
    matrices = {"token_embd": model.output_weight}
    norms: dict[str, nn.Module] = {"output_norm": model.decoder.norm}
    for place, layer in enumerate(model.decoder.layers):
        name, attention = f"blk.{place}.", layer.self_attn
        q, kv, size = attention.num_heads, attention.num_kv_heads, attention.head_dim
        parts = attention.in_proj_weight.split([q * size, kv * size, kv * size])
        for letter, heads, part in zip("qkv", (q, kv, kv), parts, strict=True):
            # llama.cpp rotates neighbouring features of queries and keys, fastformer rotates the two halves.
            turned = part.view(heads, 2, size // 2, -1).transpose(1, 2).reshape(part.shape)
            matrices[f"{name}attn_{letter}"] = part if letter == "v" else turned
        matrices[f"{name}attn_output"] = attention.out_proj.weight
        matrices[f"{name}ffn_gate"], matrices[f"{name}ffn_up"] = layer.linear1.weight.chunk(2)
        matrices[f"{name}ffn_down"] = layer.linear2.weight
        norms |= {f"{name}attn_norm": layer.norm1, f"{name}ffn_norm": layer.norm2}
    return matrices, _parameters(norms)


def _parameters(norms: dict[str, nn.Module]) -> dict[str, Tensor]:
    return {f"{name}.{key}": parameter for name, norm in norms.items() for key, parameter in norm.named_parameters()}
