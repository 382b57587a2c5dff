"""Models that transformers saved: similar families share a file, and each model_type has a line in the table."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from fastformer.checkpoints.hf import (
    bart,
    bart_tokenizers,
    bert,
    bert_kin,
    encoder_tokenizers,
    eurobert,
    gemma,
    gemma4,
    gpt2,
    granite4,
    lfm2,
    llama,
    llama_kin,
    mixtures,
    modernbert,
    neighbours,
    neox,
    nomic,
    prompts,
    qwen_hybrid,
    t5,
)
from fastformer.checkpoints.hf.bart import bart_from_transformer, transformer_from_bart
from fastformer.checkpoints.hf.common import Checkpoint, ReadTokenizer
from fastformer.checkpoints.hf.common import Family as Family
from fastformer.checkpoints.hf.common import load_folder as load_folder
from fastformer.checkpoints.hf.common import model_type as model_type
from fastformer.checkpoints.hf.decoder import Form
from fastformer.checkpoints.hf.encoder import CLASSIFIER, EncoderForm
from fastformer.checkpoints.hf.fields import check_fields, with_usual_ids
from fastformer.checkpoints.hf.search_file import generation_settings as generation_settings
from fastformer.checkpoints.hf.t5 import t5_from_transformer, transformer_from_t5
from fastformer.models import BERT, GPT, Transformer

# The families that a `GPT` may be saved as, by model_type. The first that has the model's options is taken.
DECODER_FORMS: dict[str, Form] = {
    "gpt2": gpt2.FORM,
    **llama.FORMS,
    **gemma.FORMS,
    **gemma4.FORMS,
    **neox.FORMS,
    **mixtures.FORMS,
    **llama_kin.FORMS,
    **qwen_hybrid.FORMS,
    **lfm2.FORMS,
    **granite4.FORMS,
    **neighbours.FORMS,
}
# The families that a `BERT` may be saved as, likewise.
ENCODER_FORMS: dict[str, EncoderForm] = {
    **bert.FORMS,
    **bert_kin.FORMS,
    "modernbert": modernbert.FORM,
    **nomic.FORMS,
    "eurobert": eurobert.FORM,
}


def _of_bart(name: str, classes: str, read: ReadTokenizer, head: str = "ForConditionalGeneration") -> Family:
    return Family(name, f"{classes}Config", f"{classes}{head}", transformer_from_bart, read)


def _decoder(kind: str, config_class: str, model_class: str, package: str | None = None) -> Family:
    form = DECODER_FORMS[kind]
    return Family(form.name, config_class, model_class, form.to_model, prompts.read_tokenizer, "decoder", package)


def _encoder(kind: str, *others: str, like: str | None = None) -> Family:
    """Returns the family of an encoder.

    Args:
        kind: its model_type.
        others: the ends of the names of further classes that have the encoder in them.
        like: the family whose tokenizer it has, unless its files name another; None: its own.
    """
    form = ENCODER_FORMS[kind]
    classes = tuple(f"{form.classes}{head}" for head in (CLASSIFIER, "ForMaskedLM", *others))
    read = functools.partial(encoder_tokenizers.read_tokenizer, kind if like is None else like)
    package = kind.replace("-", "_")
    return Family(
        form.name, f"{form.classes}Config", f"{form.classes}Model", form.to_model, read, "encoder", package, classes
    )


def _checked(kind: str, family: Family, *, encodes: bool = False) -> Family:
    """Returns the family with a conversion that reads what all families have in common, which no form knows."""

    def to_model(saved: Checkpoint) -> Transformer | GPT | BERT:
        check_fields(saved.settings, family.kind, encodes=encodes)
        model = family.to_model(saved._replace(settings=with_usual_ids(saved.settings)))
        model.source_settings = {**saved.settings, "model_type": kind}
        return model

    return family._replace(to_model=to_model)


# The beginning of the names of a decoder's classes, such as LlamaConfig and LlamaForCausalLM.
_CAUSAL = {
    "llama": "Llama", "mistral": "Mistral", "ministral": "Ministral", "qwen2": "Qwen2", "qwen3": "Qwen3",
    "olmo2": "Olmo2", "olmo3": "Olmo3", "phi3": "Phi3", "gemma": "Gemma", "gemma2": "Gemma2", "gpt_neox": "GPTNeoX",
    "starcoder2": "Starcoder2", "mixtral": "Mixtral", "granitemoe": "GraniteMoe", "olmoe": "Olmoe",
    "qwen2_moe": "Qwen2Moe", "qwen3_moe": "Qwen3Moe", "smollm3": "SmolLM3", "exaone4": "Exaone4", "granite": "Granite",
    "granitemoehybrid": "GraniteMoeHybrid", "phi": "Phi", "stablelm": "StableLm", "cwm": "Cwm", "gpt_oss": "GptOss",
    "qwen3_next": "Qwen3Next", "lfm2": "Lfm2", "seed_oss": "SeedOss", "ernie4_5": "Ernie4_5",
    "helium": "Helium", "glm": "Glm", "glm4": "Glm4", "lfm2_moe": "Lfm2Moe", "glm4_moe": "Glm4Moe", "afmoe": "Afmoe",
    "ernie4_5_moe": "Ernie4_5_Moe", "hunyuan_v1_dense": "HunYuanDenseV1", "ministral3": "Ministral3",
}  # fmt: skip
_ENCODERS = ("roberta", "xlm-roberta", "camembert", "distilbert", "mpnet", "modernbert", "eurobert")
_FAMILIES = {
    "bart": _of_bart("BART", "Bart", bart.read_tokenizer),
    "marian": _of_bart("Marian", "Marian", bart_tokenizers.read_marian, head="MTModel"),
    "mbart": _of_bart("mBART", "MBart", bart_tokenizers.read_mbart),
    "pegasus": _of_bart("Pegasus", "Pegasus", bart_tokenizers.read_pegasus),
    "m2m_100": _of_bart("M2M100", "M2M100", bart_tokenizers.read_m2m100),
    "t5": Family("T5", "T5Config", "T5ForConditionalGeneration", transformer_from_t5, t5.read_tokenizer),
    "mt5": Family("mT5", "MT5Config", "MT5ForConditionalGeneration", transformer_from_t5, t5.read_tokenizer),
    "gpt2": _decoder("gpt2", "GPT2Config", "GPT2LMHeadModel"),
    **{kind: _decoder(kind, f"{name}Config", f"{name}ForCausalLM") for kind, name in _CAUSAL.items()},
    "qwen3_5_text": _decoder("qwen3_5_text", "Qwen3_5TextConfig", "Qwen3_5ForCausalLM", "qwen3_5"),
    "qwen3_5_moe_text": _decoder("qwen3_5_moe_text", "Qwen3_5MoeTextConfig", "Qwen3_5MoeForCausalLM", "qwen3_5_moe"),
    "gemma3_text": _decoder("gemma3_text", "Gemma3TextConfig", "Gemma3ForCausalLM", "gemma3"),
    "gemma4_text": _decoder("gemma4_text", "Gemma4TextConfig", "Gemma4ForCausalLM", "gemma4"),
    "bert": _encoder("bert", "ForPreTraining"),
    **{kind: _encoder(kind) for kind in _ENCODERS},
    "electra": _encoder("electra", "ForPreTraining"),
    "albert": _encoder("albert", "ForPreTraining"),
    "nomic_bert": _encoder("nomic_bert", like="bert"),
    "gte": _encoder("gte", like="xlm-roberta"),
}
FAMILIES = {kind: _checked(kind, family) for kind, family in _FAMILIES.items()}


def encoding_family(kind: str | None) -> Family | None:
    """Returns the family of a folder whose model encodes texts: an encoder, or a decoder, without its head.

    A decoder's texts get the special tokens of its tokenizer around them, as those of an encoder do, and no prompt.
    """
    family = None if kind is None else FAMILIES.get(kind)
    if kind in (*qwen_hybrid.FORMS, *lfm2.FORMS):  # texts are encoded in one pass, in which no row has a state
        return None
    if kind is None or family is None or kind not in DECODER_FORMS:
        return family if family is not None and family.kind == "encoder" else None
    heads, whole = DECODER_FORMS[kind].heads, _checked(kind, _FAMILIES[kind], encodes=True)

    def to_model(saved: Checkpoint) -> Transformer | GPT | BERT:
        state = {name: tensor for name, tensor in saved.state.items() if name not in (*heads, "score.weight")}
        model = whole.to_model(saved._replace(state=state, settings={**saved.settings, "tie_word_embeddings": True}))
        if isinstance(model, GPT) and any(model.config.stateful):
            raise ValueError(f"expected a {family.name} whose layers attend, as encoders of texts do, got a Mamba")
        return model

    read = functools.partial(encoder_tokenizers.read_tokenizer, kind)
    return family._replace(to_model=to_model, read_tokenizer=read, kind="encoder")


# Families that you may try to load, and the reason why fastformer's models can't compute them.
UNSUPPORTED = {
    "umt5": "UMT5 has a table of relative positions in each layer",
    "nllb-moe": "NLLB-MoE sends each token to some of many experts",
    **dict.fromkeys(("deberta", "deberta-v2"), "DeBERTa attends to positions apart from words"),
    "roformer": "RoFormer rotates neighbouring features",
    **dict.fromkeys(("deepseek_v2", "deepseek_v3"), "DeepSeek compresses keys and values"),
    **dict.fromkeys(
        ("gemma3n", "gemma3n_text"),
        "Gemma 3n predicts and corrects several streams of states in each layer",
    ),
    "gemma4": "Gemma 4 with pictures and sounds has encoders for them (its text model alone is a gemma4_text)",
    "mistral3": "Mistral 3 with pictures has an encoder for them (the text model of a Ministral 3 is loaded)",
    "gemma3": "Gemma 3 with pictures has an encoder for them (its text model alone is a gemma3_text)",
}
_KINDS_OF_LAYERS = ("layer_types", "layers_block_type")  # settings with an entry for each layer
_KNOWN_LAYERS = ("full_attention", "sliding_attention", "attention")


def why_unsupported(settings: Mapping[str, Any]) -> str | None:
    """Returns the reason why no model here can compute one of transformers; None if its settings don't tell it."""
    kind = str(settings.get("model_type"))
    if kind in FAMILIES or kind in UNSUPPORTED:
        return UNSUPPORTED.get(kind)
    lists = [settings.get(name) for name in _KINDS_OF_LAYERS]
    kinds = [str(layer) for listed in lists if isinstance(listed, list | tuple) for layer in listed]
    if others := [layer for layer in dict.fromkeys(kinds) if layer not in _KNOWN_LAYERS]:
        return f"it has layers of kinds that fastformer doesn't compute ({', '.join(others)})"
    return "it reads more than text" if isinstance(settings.get("text_config"), Mapping) else None


def from_model(model: Transformer | GPT | BERT) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Returns the settings and the state_dict of the family that computes the same as a model.

    Raises:
        ValueError: the model has options that no family has.
    """
    if isinstance(model, Transformer):
        return t5_from_transformer(model) if model.config.positions == "relative" else bart_from_transformer(model)
    reasons = []
    forms: Any = ENCODER_FORMS if isinstance(model, BERT) else DECODER_FORMS
    for form in forms.values():
        try:
            converted: tuple[dict[str, Any], dict[str, Tensor]] = form.from_model(model)
            return converted
        except ValueError as error:
            reasons.append(error)
    # The reasons of families of another kind, such as with other positions, help only if they are the only ones.
    near = [error for error in reasons if getattr(error, "option", None) not in ("positions", "norm", "norm_placement")]
    raise ValueError("; or ".join(map(str, near or reasons)))
