"""Hugging Face transformers with the weights of a fastformer model.

A post-norm Transformer becomes a Marian, a pre-norm one a Pegasus, a GPT of GPT-2's form a GPT2LMHeadModel, and one of
Llama's form a LlamaForCausalLM. Greedy decoding, and beam search over outputs of one length, give fastformer's tokens.
If outputs end by themselves, beam search divides by length ** length_penalty instead of
((5 + length) / 6) ** length_penalty.
"""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from benchmarks.peers.job import DecodingPeer, JobResult, Missing, Model, PeerJob, Tokens, transformers, until_end
from fastformer.integrations import to_huggingface
from fastformer.models import GPT, Transformer

_LENGTH_PENALTY = 0.6  # the default of generate


class HuggingFace(DecodingPeer):
    """transformers' generate, with its own cache."""

    name = "transformers"
    precisions = ("bf16", "fp32")  # transformers has no int8 of its own on a CPU
    settings: ClassVar[dict[str, Any]] = {}  # options of transformers' generate

    def __init__(self, model: Model, precision: str, threads: int, options: dict[str, str]) -> None:
        transformers()
        torch.set_num_threads(threads)
        self.ids = model.config.special_ids
        self.is_decoder_only = isinstance(model, GPT)
        self.model = convert(model).to(torch.bfloat16 if precision == "bf16" else torch.float32)

    def decode(self, batch: Tokens, job: PeerJob) -> Tensor:
        width = max(map(len, batch))
        ids = torch.full((len(batch), width), self.ids.pad)
        mask = torch.zeros_like(ids)
        for row, tokens in enumerate(batch):
            # Decoder-only models of transformers continue after the last column.
            columns = slice(width - len(tokens), width) if self.is_decoder_only else slice(0, len(tokens))
            ids[row, columns] = torch.tensor(tokens)
            mask[row, columns] = 1
        with torch.inference_mode():
            generated: Tensor = self.model.generate(
                input_ids=ids,
                attention_mask=mask,
                num_beams=job.num_beams,
                length_penalty=_LENGTH_PENALTY,
                max_new_tokens=job.limit(batch),
                do_sample=False,
                **self.settings,
            )
        return generated

    def tokens(self, output: Tensor, batch: Tokens) -> Tokens:
        width = max(map(len, batch)) if self.is_decoder_only else 1
        return [until_end(row[width:], self.ids.eos) for row in output.tolist()]


class StaticCache(HuggingFace):
    """generate with a cache of one size, and a model that torch.compile has compiled."""

    name = "transformers, static cache, compiled"
    settings: ClassVar[dict[str, Any]] = {"cache_implementation": "static"}

    def __init__(self, model: Model, precision: str, threads: int, options: dict[str, str]) -> None:
        super().__init__(model, precision, threads, options)
        # generate itself compiles only on GPUs. A prompt is read once, and a single token many times.
        self.model.forward = torch.compile(self.model.forward)

    def turn(self, job: PeerJob) -> JobResult:
        if sum(map(len, job.batches[0])) > 32:
            raise Missing("compiled for one prompt of 32 tokens alone: each shape takes about a minute")
        return super().turn(job)


def convert(model: Model) -> Any:
    """Converts a model to one of Hugging Face's with the same weights.

    Raises:
        Missing: transformers lacks an option, or this function doesn't map it.
    """
    return _converted(model) if isinstance(model, GPT) else _from_transformer(model)


def _converted(model: Model) -> Any:
    try:
        return to_huggingface(model).eval()
    except ValueError as error:
        raise Missing(f"its conversion can't have it: {error}") from error


def _from_transformer(model: Transformer) -> Any:
    """Converts a model as if it had Marian's positions and epsilon, and then sets its own."""
    config = model.config
    if config.positions not in ("interleaved", "concatenated"):
        raise Missing(f"its conversion has sines and cosines as positions alone, this model {config.positions}")
    like_theirs = Transformer(dataclasses.replace(config, positions="halves", layer_norm_eps=1e-5))
    like_theirs.load_state_dict(model.state_dict())
    marian = _converted(like_theirs)
    tied = config.tie_embeddings
    source, target = (model.embedding,) * 2 if tied else (model.source_embedding, model.target_embedding)
    for side, embedding in (("encoder", source), ("decoder", target)):
        assert embedding.position is not None
        getattr(marian.model, side).embed_positions.weight.data.copy_(embedding.position.table)
    for module in marian.modules():
        if isinstance(module, nn.LayerNorm):
            module.eps = config.layer_norm_eps
    marian.generation_config.forced_eos_token_id = None
    return marian
