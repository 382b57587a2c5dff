"""Conversion of whole models: transformers' to `models.Transformer` or `models.GPT`, and back."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from fastformer.checkpoints.hf import ENCODER_FORMS, FAMILIES, encoding_family, from_model, why_unsupported
from fastformer.checkpoints.hf.common import Checkpoint
from fastformer.checkpoints.hf.fields import FIELDS, unknown_fields
from fastformer.checkpoints.hf.mixtures import in_memory
from fastformer.checkpoints.hf.rope import without_old_names
from fastformer.checkpoints.hf.search_file import with_search_ids
from fastformer.integrations.replace import original_class
from fastformer.integrations.versions import check_version
from fastformer.models import BERT, GPT, Transformer

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def from_huggingface(model: nn.Module) -> Transformer | GPT | BERT:
    """Converts a model of transformers to one of this library that computes the same, with copies of its weights.

    An encoder-decoder becomes a `models.Transformer`, a decoder-only model a `models.GPT`, an encoder-only model a
    `models.BERT`. Dtype, device and mode are
    the model's. Sources and prompts may be padded as their tokenizers pad them.

    Differences to expect. Dropping whole layers in training (encoder_layerdrop) is omitted. The first two rows of a
    BART's learned positions are never used, and are omitted: position 0 here is row 2 of its table. A row of PAD that
    isn't zero is trained as that of any token; transformers trains it in a T5 alone. A T5 doesn't scale
    its scores, so the weights of queries are larger here by sqrt(d_kv), and their gradients smaller; this is exact if
    sqrt(d_kv) is a power of two. If a T5's heads don't fill d_model, heads of zeros do, which stay zeros in training.
    Its dropout after the final norms is omitted. Its max_len is n_positions, but no table ends there, so you may set
    `config.max_len` to more. If its head is untied, its one embedding becomes one for each side. An mT5 converts back
    to a T5.

    With `beam_rules="transformers"`, `fastformer.generate` returns the tokens of transformers' generate, greedy or with
    beams, for every option that both have. Beams are scored, ended and compared as in transformers (see
    `TransformersBeamSearch`). Options in the model's generation_config (bad_words_ids, forced_bos_token_id,
    forced_eos_token_id, no_repeat_ngram_size, num_beams) have to be passed again, or as
    `generation_config=model.generation_config`. From a BartConfig alone transformers makes one that forces EOS at the
    limit.

    `models.Transformer` and `torch.nn.Transformer` need no conversion: if the model is pre-norm with
    `attention_bias=True`, the entries of their state_dicts that begin with "encoder." and "decoder." are the same.

    The ids that end and pad a decoder's text are those of its generation_config. If that has no pad_token_id, the first
    eos pads, and nothing in a prompt is padding unless an attention_mask says so. Its rotary positions are scaled as
    its settings say. With "dynamic" and "longrope", the converted model's max_len is the length beyond which they would
    rotate all tokens of a sequence differently. With "linear" and "yarn" it is the scaled length. The norms of a Gemma
    are 1 + its weights, which is rounded once.

    An encoder's texts are padded on the right here, or packed. The first rows of a RoBERTa's table of positions, which
    no token uses, are omitted.

    Args:
        model: a BartForConditionalGeneration, MarianMTModel, MBartForConditionalGeneration,
            PegasusForConditionalGeneration, M2M100ForConditionalGeneration (an NLLB, too), T5ForConditionalGeneration
            (a MADLAD, too) or MT5ForConditionalGeneration; or a decoder: GPT2LMHeadModel; LlamaForCausalLM,
            MistralForCausalLM, MinistralForCausalLM, Qwen2ForCausalLM, Qwen3ForCausalLM, Olmo2ForCausalLM,
            Olmo3ForCausalLM, CwmForCausalLM or Phi3ForCausalLM; GemmaForCausalLM, Gemma2ForCausalLM,
            Gemma3ForCausalLM or Gemma4ForCausalLM; GPTNeoXForCausalLM or Starcoder2ForCausalLM; MixtralForCausalLM,
            OlmoeForCausalLM, Qwen2MoeForCausalLM, Qwen3MoeForCausalLM, GraniteMoeForCausalLM or GptOssForCausalLM;
            SmolLM3ForCausalLM, GraniteForCausalLM, GraniteMoeHybridForCausalLM, PhiForCausalLM,
            StableLmForCausalLM or Exaone4ForCausalLM; HunYuanDenseV1ForCausalLM, Ministral3ForCausalLM,
            SeedOssForCausalLM, Ernie4_5ForCausalLM, HeliumForCausalLM, GlmForCausalLM or Glm4ForCausalLM;
            Qwen3_5ForCausalLM, Qwen3_5MoeForCausalLM, Qwen3NextForCausalLM, Lfm2ForCausalLM or Lfm2MoeForCausalLM;
            Glm4MoeForCausalLM, AfmoeForCausalLM or Ernie4_5_MoeForCausalLM; or an encoder, with the head that
            classifies texts or without one: BertModel and BertForSequenceClassification, and the same classes of
            RoBERTa, XLM-RoBERTa, CamemBERT, DistilBERT, MPNet, ELECTRA, ALBERT, ModernBERT, NomicBert, Gte and
            EuroBert. The head of their ForMaskedLM is omitted.

    Raises:
        ImportError: transformers is older than 5.16.
        ValueError: the model is of another class, or has settings that fastformer's models don't have.
    """
    return convert(model)


def convert(
    model: nn.Module, change: Callable[[dict[str, Any]], dict[str, Any]] = dict, *, headless: bool = False
) -> Transformer | GPT | BERT:
    """Converts a model as `from_huggingface` does, with other settings.

    Args:
        model: see `from_huggingface`.
        change: (settings of the model) -> those that are read, by default all of them as they are.
        headless: whether the model is a decoder without its head.

    Raises:
        ValueError: see `from_huggingface`.
    """
    kind = getattr(getattr(model, "config", None), "model_type", None)
    family = encoding_family(kind) if headless else FAMILIES.get(kind or "")
    name = original_class(model).__name__
    if family is None or name not in ((family.headless,) if headless else (family.model_class, *family.others)):
        reason = None if kind is None else why_unsupported(settings_of(model))
        why = "" if reason is None else f": {reason}"
        known = ", ".join(name for each in FAMILIES.values() for name in (each.model_class, *each.others))
        raise ValueError(f"expected one of transformers' {known}, got {type(model).__name__}{why}")
    check_version()
    found: Any = model
    if unknown := new_fields(found.config):
        raise ValueError(f"expected a config without {unknown}, which this version of fastformer doesn't know")
    eps = {module.eps for module in model.modules() if isinstance(module, nn.LayerNorm)}
    if len(eps) > 1:
        raise ValueError(f"expected norms of one eps, got {sorted(eps)}")
    weight = found.get_input_embeddings().weight
    settings = change(settings_of(found))
    if family.kind == "decoder" and getattr(found, "generation_config", None) is not None:
        settings = with_search_ids(settings, found.generation_config.to_dict())
    if family.kind == "encoder" and not headless:
        _check_first_position(found, settings)
        settings["architectures"] = [name]  # it tells which head the model has
    usual = eps.pop() if eps else None
    saved = Checkpoint(settings, model.state_dict(), layer_norm_eps=usual, device=weight.device, dtype=weight.dtype)
    converted = family.to_model(saved)
    if isinstance(converted, Transformer):
        first = converted.embedding if converted.config.tie_embeddings else converted.source_embedding
        if first.position is not None:  # transformers rounds sines to fp32, then to the weights' dtype
            _copy_sines(found.model.encoder.embed_positions, first.position.table, converted.config.first_position)
    return converted.train(model.training)


def _check_first_position(model: Any, settings: dict[str, Any]) -> None:
    """Raises ValueError if an encoder counts positions from another id than that of PAD in its config."""
    count, pad = ENCODER_FORMS[settings["model_type"]].unused_positions, settings.get("pad_token_id")
    first = getattr(getattr(model.base_model, "embeddings", None), "padding_idx", None)
    if first is not None and pad is not None and count(first) != count(pad):
        raise ValueError(
            f"expected config.pad_token_id {first}, from which the model's embeddings count positions, got {pad}"
        )


def new_fields(config: Any) -> str | None:
    """Returns the fields of a config that a later version of transformers added and that don't have their defaults.

    Args:
        config: a config of transformers. One of an unknown class has no such fields.
    """
    kind = type(config)
    if kind.__module__.partition(".")[0] != "transformers" or config.model_type not in FIELDS:
        return None
    found = unknown_fields(config.to_dict(), kind().to_dict())
    return ", ".join(f"{name} = {value!r:.40}" for name, value in found.items()) or None


def settings_of(model: Any) -> dict[str, Any]:
    """Returns the settings of a model in memory, as its version of transformers reads them."""
    return without_old_names(model.config.to_dict())


def _copy_sines(module: Any, table: torch.Tensor, first: int) -> None:
    """Copies the positions of a model in memory, as far as its table reaches; M2M100's table grows when needed."""
    own = getattr(module, "weights", None)
    rows = (module.weight if own is None else own).detach()[first : first + len(table)]
    table[: len(rows)].copy_(rows)


def to_huggingface(model: Transformer | GPT | BERT) -> PreTrainedModel:
    """Converts a model of this library to one of transformers that computes the same, with copies of its weights.

    Args:
        model: a `GPT` becomes the first decoder in the list of `from_huggingface` that has its options, a `BERT` the
            first encoder, or its ForSequenceClassification if it has a head. A `Transformer` has to have full
            attention. With positions "relative" it becomes a T5ForConditionalGeneration, for which it has to be
            pre-norm, with norm "rms", no biases and no scale_embedding. With other positions it has to have biases, no
            scale_output, and LayerNorm of eps 1e-5. With positions "halves" it becomes a MarianMTModel, or if it is
            pre-norm a PegasusForConditionalGeneration. With positions "concatenated", which begin after PAD's id
            (`first_position`), a start other than PAD, and pre-norm it becomes an M2M100ForConditionalGeneration. With
            positions "learned" and `embedding_norm` it becomes a BartForConditionalGeneration, or if it is pre-norm an
            MBartForConditionalGeneration.

    Raises:
        ImportError: transformers is not installed, or older than 5.16.
        ValueError: the model has options that none of these has.
    """
    if type(model) not in (Transformer, GPT, BERT):
        raise ValueError(f"expected a models.Transformer, a models.GPT or a models.BERT, got {type(model).__name__}")
    settings, weights = from_model(model)
    try:
        import transformers
    except ImportError as error:
        raise ImportError("to_huggingface needs the transformers library: pip install transformers") from error
    check_version()
    kind = settings.pop("model_type")
    family = FAMILIES[kind]
    settings = without_old_names(settings)
    name, options = family.model_class, {}
    if isinstance(model, BERT):
        name = settings.pop("architectures")[0]
        if ENCODER_FORMS[kind].pooler is not None and not model.config.num_labels:
            options["add_pooling_layer"] = model.config.pooler
    if not hasattr(transformers, family.config_class):
        raise ValueError(
            f"expected a version of transformers that has {family.config_class}, got {transformers.__version__}"
        )
    config_class, model_class = getattr(transformers, family.config_class), getattr(transformers, name)
    theirs: Any = model_class(config_class(**settings), **options)
    if (
        type(model) is Transformer
        and model.config.positions == "relative"
        and not torch.equal(weights["shared.weight"], weights["lm_head.weight"])
    ):
        # Version 5 of transformers makes no T5 with an untied head, but it loads and saves one.
        theirs.lm_head.weight = nn.Parameter(theirs.lm_head.weight.detach().clone())
    weight = model.embedding.weight if isinstance(model, BERT) else model.output_weight
    theirs.to(device=weight.device, dtype=weight.dtype)
    kept = ("expert_bias", *(getattr(theirs, "_keep_in_fp32_modules_strict", None) or ()))
    for name, tensor in (*theirs.named_parameters(), *theirs.named_buffers()):
        if tensor.itemsize < 4 and name.endswith((*kept, *(f"{each}.weight" for each in kept))):
            tensor.data = tensor.data.float()  # as from_pretrained leaves it
    own = theirs.state_dict()
    weights = in_memory(weights, own)
    expected = {name for name in own if name in weights or "embed_positions" not in name}
    if expected != weights.keys():
        raise ValueError(f"this version of transformers has other tensors: {sorted(expected ^ weights.keys())[:5]}")
    with torch.no_grad():
        for name, weight in weights.items():
            own[name].copy_(weight)
    for name, weight in weights.items():
        if not torch.equal(own[name], weight.to(own[name].dtype)):
            raise ValueError(f"this version of transformers ties {name} to another matrix: its weights would be lost")
    if isinstance(model, Transformer) and model.config.suppress_tokens:
        theirs.generation_config.bad_words_ids = [[token] for token in model.config.suppress_tokens]
    found: PreTrainedModel = theirs.train(model.training)
    return found
