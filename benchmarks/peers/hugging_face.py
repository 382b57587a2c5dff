"""Hugging Face transformers with the weights of one of our models.

A post-norm Transformer is its Marian, a pre-norm one its M2M100, a GPT of GPT-2's form its GPT2LMHeadModel. Greedy
decoding, and beam search over outputs of one length, give our tokens; where outputs end by themselves, beam search
divides by length ** length_penalty instead of ((5 + length) / 6) ** length_penalty.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.peers.job import Decoder, Job, Missing, Model, Tokens, until_end
from fastformer.models import GPT, Transformer

_LENGTH_PENALTY = 0.6  # the number that generate has by default


class HuggingFace(Decoder):
    """Its generate, with its own cache."""

    name = "transformers"
    precisions = ("bf16", "fp32")  # it has no int8 on a CPU of its own

    def __init__(self, model: Model, precision: str, threads: int, options: dict[str, str]) -> None:
        try:
            import transformers
        except ImportError as error:
            raise Missing("not installed: pip install transformers") from error
        transformers.utils.logging.set_verbosity_error()
        torch.set_num_threads(threads)
        self.ids = model.config.special_ids
        self.is_decoder_only = isinstance(model, GPT)
        self.model = convert(model).to(torch.bfloat16 if precision == "bf16" else torch.float32)

    def decode(self, batch: Tokens, job: Job) -> Tensor:
        """Lists of ids to a tensor of ids."""
        width = max(map(len, batch))
        ids = torch.full((len(batch), width), self.ids.pad)
        mask = torch.zeros_like(ids)
        for row, tokens in enumerate(batch):
            # Its decoder-only models go on behind the last column.
            columns = slice(width - len(tokens), width) if self.is_decoder_only else slice(0, len(tokens))
            ids[row, columns] = torch.tensor(tokens)
            mask[row, columns] = 1
        with torch.inference_mode():
            found: Tensor = self.model.generate(
                input_ids=ids,
                attention_mask=mask,
                num_beams=job.num_beams,
                length_penalty=_LENGTH_PENALTY,
                max_new_tokens=job.limit(batch),
                do_sample=False,
            )
        return found

    def tokens(self, output: Tensor, batch: Tokens) -> Tokens:
        """Without the prompts, or the start token."""
        width = max(map(len, batch)) if self.is_decoder_only else 1
        return [until_end(row[width:], self.ids.eos) for row in output.tolist()]


def convert(model: Model) -> Any:
    """A model of Hugging Face's with the same weights.

    Raises:
        Missing: an option that it lacks, or that isn't mapped here.
    """
    return _from_gpt(model) if isinstance(model, GPT) else _from_transformer(model)


def _from_transformer(model: Transformer) -> Any:
    import transformers

    config, ids = model.config, model.config.special_ids
    if (
        config.norm != "layer"
        or config.activation != "relu"
        or config.output_bias
        or config.embed_pad
        or config.embedding_norm
        or config.positions in ("learned", "relative")
        or not config.scale_embedding
        or config.scale_output
        or not config.bias
        or config.window_size is not None
        or config.num_kv_heads not in (None, config.num_heads)
        or (config.source_vocab_size or config.vocab_size) != config.vocab_size
        or len(ids.eos) > 1
    ):
        raise Missing("its conversion has LayerNorm, relu, full attention and one vocabulary alone")
    kinds = (
        (transformers.M2M100Config, transformers.M2M100ForConditionalGeneration)
        if config.norm_first
        else (transformers.MarianConfig, transformers.MarianMTModel)
    )
    theirs = kinds[1](
        kinds[0](
            vocab_size=config.vocab_size,
            d_model=config.d_model,
            encoder_layers=config.num_encoder_layers,
            decoder_layers=config.num_decoder_layers,
            encoder_attention_heads=config.num_heads,
            decoder_attention_heads=config.num_heads,
            encoder_ffn_dim=config.d_ff,
            decoder_ffn_dim=config.d_ff,
            max_position_embeddings=config.max_len,
            activation_function="relu",
            scale_embedding=True,
            # A tied matrix has a row for PAD that we read as zeros and multiply by as it is: that takes two here.
            tie_word_embeddings=False,
            pad_token_id=ids.pad,
            eos_token_id=ids.first_eos,
            bos_token_id=None,
            decoder_start_token_id=ids.start,
            forced_eos_token_id=None,
        )
    ).eval()
    weights = theirs.state_dict()
    for weight in weights.values():
        weight.zero_()  # biases that we don't have
    tied = config.tie_embeddings
    for side, stack in (("encoder", model.encoder), ("decoder", model.decoder)):
        embedding = model.embedding if tied else model.source_embedding if side == "encoder" else model.target_embedding
        assert embedding.position is not None
        weights[f"model.{side}.embed_tokens.weight"].copy_(embedding.weight).index_fill_(0, torch.tensor(ids.pad), 0.0)
        _positions(getattr(theirs.model, side).embed_positions, embedding.position.table)
        if stack.norm is not None:
            _copy(weights, f"model.{side}.layer_norm", stack.norm)
        for place, layer in enumerate(stack.layers):
            name = f"model.{side}.layers.{place}."
            attentions = [("self_attn", layer.self_attn, layer.norm1)]
            if side == "decoder":
                attentions.append(("encoder_attn", layer.multihead_attn, layer.norm2))
            for theirs_name, attention, norm in attentions:
                blocks = zip("qkv", attention.in_proj_weight.chunk(3), strict=True)
                for letter, block in blocks:
                    weights[f"{name}{theirs_name}.{letter}_proj.weight"].copy_(block)
                if attention.in_proj_bias is not None:
                    for letter, block in zip("qkv", attention.in_proj_bias.chunk(3), strict=True):
                        weights[f"{name}{theirs_name}.{letter}_proj.bias"].copy_(block)
                _copy(weights, f"{name}{theirs_name}.out_proj", attention.out_proj)
                _copy(weights, f"{name}{theirs_name}_layer_norm", norm)
            _copy(weights, f"{name}fc1", layer.linear1)
            _copy(weights, f"{name}fc2", layer.linear2)
            _copy(weights, f"{name}final_layer_norm", layer.norm3 if side == "decoder" else layer.norm2)
    weights["model.shared.weight"].copy_(weights["model.encoder.embed_tokens.weight"])
    weights["lm_head.weight"].copy_(model.output_weight)
    for module in theirs.modules():
        if isinstance(module, nn.LayerNorm):
            module.eps = config.layer_norm_eps
    return theirs


def _positions(module: Any, table: Tensor) -> None:
    """Our table in the place of theirs."""
    if hasattr(module, "weights"):  # M2M100's: positions are counted from behind PAD's id, which PADs don't advance
        module.padding_idx = -1  # no id: the decoder begins with PAD, and padding at the end is masked anyway
        module.weights = table.detach().clone()
    else:
        module.weight.data.copy_(table)


def _copy(weights: dict[str, Tensor], name: str, module: nn.Module) -> None:
    for key, parameter in module.named_parameters():
        weights[f"{name}.{key}"].copy_(parameter)


def _from_gpt(model: GPT) -> Any:
    import transformers

    config = model.config
    check_gpt2(model)
    theirs = transformers.GPT2LMHeadModel(
        transformers.GPT2Config(
            vocab_size=config.vocab_size,
            n_positions=config.max_len,
            n_embd=config.d_model,
            n_layer=config.num_layers,
            n_head=config.num_heads,
            n_inner=config.d_ff,
            layer_norm_epsilon=config.layer_norm_eps,
            bos_token_id=None,
            eos_token_id=config.special_ids.first_eos,
            pad_token_id=config.special_ids.pad,
        )
    ).eval()
    weights = theirs.state_dict()
    assert model.embedding.position is not None
    weights["transformer.wte.weight"].copy_(model.embedding.weight)
    weights["transformer.wpe.weight"].copy_(model.embedding.position.table)
    assert model.decoder.norm is not None
    _copy(weights, "transformer.ln_f", model.decoder.norm)
    for place, layer in enumerate(model.decoder.layers):
        name = f"transformer.h.{place}."
        _copy(weights, f"{name}ln_1", layer.norm1)
        _copy(weights, f"{name}ln_2", layer.norm2)
        products = {
            "attn.c_attn": (layer.self_attn.in_proj_weight, layer.self_attn.in_proj_bias),
            "attn.c_proj": (layer.self_attn.out_proj.weight, layer.self_attn.out_proj.bias),
            "mlp.c_fc": (layer.linear1.weight, layer.linear1.bias),
            "mlp.c_proj": (layer.linear2.weight, layer.linear2.bias),
        }
        for theirs_name, (weight, bias) in products.items():
            weights[f"{name}{theirs_name}.weight"].copy_(weight.t())  # its Conv1D multiplies from the right
            weights[f"{name}{theirs_name}.bias"].copy_(bias)
    return theirs


def check_gpt2(model: GPT) -> None:
    """Whether a GPT has GPT-2's form.

    Raises:
        Missing: it has not; the option is named.
    """
    config = model.config
    wanted = {
        "norm": "layer",
        "activation": "gelu_tanh",
        "positions": "learned",
        "tie_embeddings": True,
        "bias": True,
        "window_size": None,
    }
    for name, value in wanted.items():
        if getattr(config, name) != value:
            raise Missing(f"GPT-2 has {name} {value}, this model {getattr(config, name)}")
    if config.num_kv_heads not in (None, config.num_heads):
        raise Missing(f"GPT-2 has as many heads of keys as of queries, this model {config.num_kv_heads}")
