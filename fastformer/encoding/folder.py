"""Reads the folders that sentence-transformers and transformers save, and encoders in GGUF files.

modules.json                          the modules in their order, each with its folder
config_sentence_transformers.json     prompts, the similarity, the activation of a cross-encoder
sentence_bert_config.json             max_seq_length, do_lower_case (in the folder of the model)
1_Pooling/config.json, 2_Dense/...    the modules that follow the model

A folder of transformers has none of these files, and a GGUF file names the pooling alone. No code of a folder is run:
its modules are recognised by name.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fastformer.checkpoints import gguf
from fastformer.checkpoints.hf import (
    DECODER_FORMS,
    ENCODER_FORMS,
    FAMILIES,
    encoding_family,
    load_folder,
    model_type,
)
from fastformer.checkpoints.hf.common import flag_of, number_of, read_numbers
from fastformer.checkpoints.hf.encoder import CLASSIFIER
from fastformer.checkpoints.run import check_saved, why_refused
from fastformer.encoding.late_interaction import (
    TASKS,
    LateInteraction,
    LateSettings,
    is_late,
    late_settings,
    make_late,
    mask_token_of,
)
from fastformer.encoding.modules import ACTIVATIONS, Dense, LabelHead, LayerNorm, Normalize, Pooling, RowLayer
from fastformer.encoding.similarity import ALL
from fastformer.encoding.sparse import Splade, read_splade
from fastformer.encoding.templates import TemplateReader, format_of
from fastformer.encoding.tokens import Reader
from fastformer.files import NOT_DOWNLOADED, read_json, read_small
from fastformer.generation.chat_template import ChatTemplate
from fastformer.models import GPT
from fastformer.models.pooling import POOLINGS
from fastformer.models.pretrained import CONFIG
from fastformer.settings import suggestion

logger = logging.getLogger("fastformer")

_MODULES = "modules.json"
_SETTINGS = "config_sentence_transformers.json"
# The settings file in the folder of the model; older folders use the name of the model's family.
_MODEL_SETTINGS = tuple(
    f"sentence_{name}_config.json"
    for name in ("bert", "roberta", "distilbert", "camembert", "albert", "xlm-roberta", "xlnet")
)
_BY_TASK = ("query_length", "document_length", "query_expansion")  # settings that one kind of text has
_PACKAGE = "sentence_transformers."
_KNOWN = (
    "Transformer", "Pooling", "Dense", "LayerNorm", "Normalize", "Dropout", "LogitScore", "SpladePooling",
    "MultiVectorMask",
)  # fmt: skip
_ALIASES = {"pylate.models.Dense.Dense": "sentence_transformers.models.Dense"}
_WORDS = ("yes", "no")  # whose logits a language model compares, unless its folder names tokens
# The features that modules read and write: a row for each text, or one for each token.
_ROW, _TOKENS = "sentence_embedding", "token_embeddings"
_LEGACY = "pooling_mode_"
_LEGACY_POOLINGS = {"cls_token": "cls", "max_tokens": "max", "mean_tokens": "mean"} | {
    "mean_sqrt_len_tokens": "mean_sqrt_len_tokens", "weightedmean_tokens": "weightedmean", "lasttoken": "lasttoken"
}  # fmt: skip


@dataclass(frozen=True)
class Folder:
    """The contents of a folder.

    Attributes:
        path: the path of the folder.
        model: a `models.BERT`, or a `models.GPT` without its head, in evaluation mode.
        reader: makes rows from texts.
        pooling: the pooling of the model's rows; None: the folder doesn't name one.
        steps: the steps that follow the pooling.
        prompts: the prompts by name.
        default_prompt_name: the name of the prompt for calls that don't name one.
        similarity: "cosine", "dot", "euclidean" or "manhattan".
        truncate_dim: the number of dimensions that a row is truncated to; None: all.
        activation: the activation of a cross-encoder's scores; None: the folder doesn't name one.
        labels: the labels of a classifier, by index; empty if the folder doesn't name them.
        head: the head of a decoder that scores or classifies; None: the model has its own, or the folder has none.
        late: how a text has a vector for each token; None: it has one embedding.
    """

    path: Path
    model: Any
    reader: Reader
    pooling: Pooling | Splade | None = None
    steps: tuple[RowLayer, ...] = ()
    prompts: Mapping[str, str] = field(default_factory=dict)
    default_prompt_name: str | None = None
    similarity: str = "cosine"
    truncate_dim: int | None = None
    activation: nn.Module | None = None
    labels: tuple[str, ...] = ()
    head: LabelHead | None = None
    late: LateInteraction | None = None

    @property
    def num_labels(self) -> int:
        """The number of scores of a classifier or reranker; 0: the folder has no head."""
        return int(getattr(self.model.config, "num_labels", 0)) if self.head is None else self.head.num_labels


def read_folder(
    path: str | os.PathLike[str],
    *,
    device: torch.device | str | None = None,
    chat_template: str | None = None,
    ranks: bool = False,
) -> Folder:
    """Reads all contents of a folder, or of a GGUF file.

    Args:
        path: the path of the folder or of the file.
        device: the device for the model; None: the CPU.
        chat_template: the template that writes the texts, in place of the folder's; None: the folder's, if any.
        ranks: whether a language model's folder without modules.json is a reranker's; if not, it embeds.

    Raises:
        ImportError: a library that the files need is not installed.
        ValueError: a file is missing or damaged, a model or module is unknown, or files don't match each other.
    """
    folder = Path(path)
    if gguf.is_gguf(folder):
        return _read_gguf(folder, device)
    check_saved(folder, "the folder of an encoder, as transformers saves it, or a GGUF file")
    if not folder.is_dir():
        raise ValueError(f"expected the folder of an encoder, but there is no folder {folder}; {NOT_DOWNLOADED}")
    settings = _read(folder / _SETTINGS)
    modules = _modules(folder)
    model_folder = modules[0][1] if modules else folder
    model_settings = next((values for name in _MODEL_SETTINGS if (values := _read(model_folder / name))), {})
    max_len = model_settings.get("max_seq_length")
    if max_len is not None and number_of(model_settings, "max_seq_length") < 1:
        raise ValueError(f"expected {model_folder} to have a max_seq_length of at least 1, got {max_len}")
    foreign = _read(model_folder / CONFIG)
    late_form = None
    prompts = _prompts(folder, settings)
    if is_late([kind for kind, _ in modules], settings, foreign):
        masks = [_read(place / CONFIG) for kind, place in modules if kind == "MultiVectorMask"]
        mask, has_modules = next(iter(masks), None), bool(modules)
        late_form = late_settings(folder, settings, model_settings, mask, prompts, has_modules=has_modules)
        prompts = late_form.prompts
    for name in () if late_form is not None else _BY_TASK:
        if model_settings.get(name) is not None:
            raise ValueError(f"expected {model_folder} to read queries and documents alike, got a {name}")
    model, tokenizer = _load(model_folder, device)
    most = min(tokenizer.max_len if max_len is None else max_len, model.config.max_len)
    is_plain = not modules and late_form is None
    reader = _reader(tokenizer, most, model_settings, chat_template, model_folder, is_plain=is_plain)
    if late_form is not None:
        late = _late(folder, modules, model, reader, late_form, settings.get("similarity_fn_name"))
        return Folder(folder, model, reader, prompts=prompts, default_prompt_name=settings.get("default_prompt_name"),
                      similarity=late.similarity, late=late)  # fmt: skip
    head = _label_head(folder, modules, model, foreign, tokenizer, ranks=ranks)
    pooling, steps = (None, ()) if head is not None else _after(folder, modules, model)
    if not modules and head is None and _architecture(foreign).endswith("ForCausalLM"):
        pooling = Pooling(("lasttoken",))  # as in sentence-transformers
    similarity = settings.get("similarity_fn_name") or "cosine"
    if similarity not in ALL:
        raise ValueError(f"expected {folder / _SETTINGS} to name a similarity in {[*ALL]}, got {similarity!r}")
    truncate_dim = None if settings.get("truncate_dim") is None else number_of(settings, "truncate_dim")
    return Folder(
        path=folder,
        model=model,
        reader=reader,
        pooling=pooling,
        steps=steps,
        prompts=prompts,
        default_prompt_name=settings.get("default_prompt_name"),
        similarity=similarity,
        truncate_dim=truncate_dim,
        activation=_score_activation(folder, settings, foreign),
        labels=_labels(foreign),
        head=head,
    )


def _reader(
    tokenizer: Any,
    max_len: int,
    settings: Mapping[str, Any],
    chat_template: str | None,
    folder: Path,
    *,
    is_plain: bool,
) -> Reader:
    """Returns the reader of texts. As in sentence-transformers, modules.json without a modality means plain texts."""
    modality = (settings.get("modality_config") or {}).get("message")
    source = tokenizer.chat.get("chat_template") if chat_template is None else chat_template
    if modality is None and chat_template is None and not (is_plain and source is not None):
        return Reader(tokenizer, max_len, lowers=flag_of(settings, "do_lower_case", False))
    if source is None:
        raise ValueError(f"expected {folder} to have a chat template, in which its texts are to be written, got none")
    variables = dict((settings.get("processing_kwargs") or {}).get("chat_template") or {})
    restores = bool(variables.pop("restore_suffix", True))
    if unknown := variables.keys() & {"padding", "truncation", "max_length", "return_tensors"}:
        raise ValueError(f"expected {folder} to give the chat template variables alone, got {sorted(unknown)}")
    template = ChatTemplate(source, {name: text for name, text in tokenizer.chat.items() if name != "chat_template"})
    if template.reads("task"):
        raise ValueError(
            f"expected a chat template in {folder} that writes any text alike, got one that reads the task"
        )
    shape = (modality or {}).get("format", "auto")
    if shape not in ("auto", "flat", "structured"):
        raise ValueError(f"expected {folder} to have messages of a format flat or structured, got {shape!r}")
    shape = format_of(source) if shape == "auto" else shape
    return TemplateReader(
        tokenizer, max_len, template, structured=shape == "structured", variables=variables, restores=restores
    )


def _read_gguf(path: Path, device: torch.device | str | None) -> Folder:
    """Reads a GGUF file. Its embeddings are normalised, as llama.cpp does it."""
    pooling = gguf.pooling_of(path)
    model: Any
    tokenizer: Any
    model, tokenizer = gguf.load_file(path, device=device, encodes=True)
    if pooling is None and isinstance(model, GPT):
        pooling = "lasttoken"  # as of a folder of transformers
    kinds = None if pooling is None else Pooling((pooling,))
    return Folder(path, model, Reader(tokenizer, model.config.max_len), kinds, (Normalize(),))


def _load(folder: Path, device: torch.device | str | None) -> tuple[Any, Any]:
    if not (folder / CONFIG).is_file():
        raise ValueError(f"expected the file {folder / CONFIG}, which doesn't exist: was the model saved completely?")
    kind = model_type(folder)
    family = encoding_family(kind)
    if family is None:
        families = ", ".join(each.name for kind, each in FAMILIES.items() if encoding_family(kind) is not None)
        kind_found = "none of transformers' models" if kind is None else f"one of {kind!r}"
        end = "" if kind is None else why_refused(folder)
        raise ValueError(f"expected the folder of an encoder, one of {families}, got {kind_found}: {folder}{end}")
    return load_folder(folder, family, device=device)


def _modules(folder: Path) -> list[tuple[str, Path]]:
    """Returns the modules of modules.json, each with its folder; an empty list without that file."""
    file = folder / _MODULES
    if not file.is_file():
        return []
    try:
        listed = json.loads(read_small(file).decode("utf-8"))
        entries = [(str(entry["type"]), str(entry["path"])) for entry in listed]
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise ValueError(f"{file} is damaged, or no list of modules ({error!r}): copy it again") from error
    modules = []
    for kind, name in entries:
        kind = _ALIASES.get(kind, kind)
        last = kind.rpartition(".")[2]
        last = "Transformer" if last == "MLMTransformer" else last
        if not kind.startswith(_PACKAGE) or last not in _KNOWN:
            raise ValueError(f"expected {file} to have modules in {', '.join(_KNOWN)}, got {kind!r}")
        if Path(name).is_absolute() or ".." in Path(name).parts:
            raise ValueError(f"expected {file} to name folders within {folder}, got {name!r}")
        modules.append((last, folder / name))
    if not modules or [kind for kind, _ in modules].count("Transformer") != 1 or modules[0][0] != "Transformer":
        raise ValueError(
            f"expected {file} to begin with a Transformer, its only one, got {[kind for kind, _ in modules]}"
        )
    return modules


def _after(
    folder: Path, modules: Sequence[tuple[str, Path]], model: Any
) -> tuple[Pooling | Splade | None, tuple[RowLayer, ...]]:
    """Returns the pooling, and the steps that follow it."""
    kinds = [kind for kind, _ in modules]
    if kinds[1:] == ["SpladePooling"]:
        return read_splade(modules[0][1], modules[1][1]), ()
    if "Pooling" not in kinds:
        if len(kinds) > 1:
            raise ValueError(f"expected {folder / _MODULES} to have a Pooling after the Transformer, got {kinds}")
        return None, ()
    if kinds[1] != "Pooling" or kinds.count("Pooling") != 1:
        raise ValueError(f"expected {folder / _MODULES} to have one Pooling, after the Transformer, got {kinds}")
    pooling, width = _pooling(modules[1][1], model.config.d_model)
    steps: list[RowLayer] = []
    for kind, subfolder in modules[2:]:
        step = _step(kind, subfolder, width)
        if step is not None:
            steps.append(step)
            width = step.out_features or width
    return pooling, tuple(steps)


def _late(
    folder: Path,
    modules: Sequence[tuple[str, Path]],
    model: Any,
    reader: Reader,
    settings: LateSettings,
    similarity: object,
) -> LateInteraction:
    """Returns the late interaction of a folder's model."""
    if isinstance(reader, TemplateReader):
        raise ValueError(f"expected a model of a vector for each token that reads plain texts, got {folder}")
    width, steps = int(model.config.d_model), list[RowLayer]()
    for kind, place in modules[1:]:
        if kind not in ("Dense", "Normalize", "Dropout", "MultiVectorMask"):
            raise ValueError(f"expected {folder / _MODULES} to have modules on the vectors of tokens, got a {kind}")
        step = None if kind == "MultiVectorMask" else _step(kind, place, width, _TOKENS)
        if step is not None:
            steps.append(step)
            width = step.out_features or width
    if settings.has_projection:
        weight = read_numbers(folder).get("linear.weight")
        if weight is None or weight.shape[1] != width:
            raise ValueError(f"expected the weights in {folder} to have a linear.weight (dim, {width})")
        steps.append(Dense(weight.float(), None, nn.Identity()))
    if settings.adds_norm:
        steps.append(Normalize())
    model_folder = modules[0][1] if modules else folder
    expansion = settings.expansion
    if expansion is not None and reader.tokenizer.side == "left":
        raise ValueError(f"expected queries that are expanded to be cut at their end, got the other side: {folder}")
    late = make_late(
        folder, settings, tuple(steps), reader.tokenizer, model.config, similarity, mask_token_of(model_folder)
    )
    form = ENCODER_FORMS.get(str(_read(model_folder / CONFIG).get("model_type")))
    pad = model.config.special_ids.pad
    if late.expansion is not None and late.expansion.token == pad and form is not None and form.unused_positions(pad):
        raise ValueError(f"expected an expansion of {folder} by a token that counts in positions, got PAD")
    return late


def _architecture(foreign: Mapping[str, Any]) -> str:
    """Returns the name of transformers' class of a model; "" if its config.json doesn't name it."""
    names = foreign.get("architectures")
    return str(names[0]) if isinstance(names, list) and names else ""


def _label_head(
    folder: Path,
    modules: Sequence[tuple[str, Path]],
    model: Any,
    foreign: Mapping[str, Any],
    tokenizer: Any,
    *,
    ranks: bool,
) -> LabelHead | None:
    """Returns the head by which a decoder scores or classifies: that of its class, or the logits of two tokens."""
    is_default = ranks and not modules and _architecture(foreign).endswith("ForCausalLM")
    is_score = is_default or [kind for kind, _ in modules[1:]] == ["LogitScore"]
    if not isinstance(model, GPT) or not (is_score or _architecture(foreign).endswith(CLASSIFIER)):
        if "LogitScore" in [kind for kind, _ in modules]:
            raise ValueError(f"expected {folder / _MODULES} to have a LogitScore only after a decoder")
        return None
    heads = DECODER_FORMS[foreign["model_type"]].heads if is_score else ("score.weight",)
    state = read_numbers(modules[0][1] if modules else folder)
    if not is_score:
        if "score.weight" not in state:
            raise ValueError(
                f"expected the weights in {folder} to have a score.weight, as {_architecture(foreign)} has"
            )
        return LabelHead(state["score.weight"].float())
    tied, vocab = model.embedding.weight.detach().cpu(), model.config.vocab_size
    table = next((state[name] for name in heads if name in state), tied)
    tokens: list[Any]
    if is_default:
        ids = {tokenizer.backend.id_to_token(i): i for i in range(vocab)}
        if _WORDS[0] not in ids or _WORDS[1] not in ids:
            raise ValueError(f"expected {folder} to have the tokens {_WORDS}, whose logits score a pair, got others")
        tokens = [ids[word] for word in _WORDS]
    else:
        settings = read_json(modules[1][1] / CONFIG)
        tokens = [settings.get("true_token_id"), settings.get("false_token_id")]
    given = [token for token in tokens if token is not None]
    if not given or tokens[0] is None or not all(isinstance(token, int) and 0 <= token < vocab for token in given):
        raise ValueError(f"expected {modules[1][1] / CONFIG} to name tokens below {vocab}, got {tokens}")
    return LabelHead(table[given].float(), len(given) == 2, model.config.logit_softcap or 0.0)


def _pooling(folder: Path, d_model: int) -> tuple[Pooling, int]:
    """Returns the pooling of a folder, and the width of its rows."""
    file = folder / CONFIG
    settings = read_json(file)
    kinds = settings.get("pooling_mode")
    if kinds is None:
        flags = {_LEGACY + name for name in _LEGACY_POOLINGS}
        chosen = {name for name, value in settings.items() if name.startswith(_LEGACY) and value is True}
        if chosen - flags:
            raise ValueError(f"expected {file} to have poolings in {sorted(flags)}, got {sorted(chosen - flags)}")
        kinds = [kind for name, kind in _LEGACY_POOLINGS.items() if _LEGACY + name in chosen] or ["mean"]
    kinds = (kinds,) if isinstance(kinds, str) else tuple(kinds)
    for kind in kinds or ([],):
        if kind not in POOLINGS:
            raise ValueError(f"expected {file} to have a pooling_mode in {POOLINGS}, got {kind!r}")
    dimension = settings.get("embedding_dimension", settings.get("word_embedding_dimension", d_model))
    if dimension != d_model:
        raise ValueError(f"expected {file} to fit the model, whose rows have {d_model} numbers, got {dimension!r}")
    return Pooling(kinds, flag_of(settings, "include_prompt", True)), len(kinds) * d_model


def _step(kind: str, folder: Path, width: int, feature: str = _ROW) -> RowLayer | None:
    """Returns the layer of a module on rows of a width; None: it changes nothing.

    Args:
        kind, folder, width: the module's class, its folder, and the width of its input.
        feature: the feature that it has to read and to write.
    """
    settings = _read(folder / CONFIG)
    if kind == "Dropout":
        return None
    if kind == "Normalize" and feature == _TOKENS and settings.get("module_input_name") in (None, _ROW):
        return None  # there are no such rows, which sentence-transformers passes over
    for name in ("module_input_name", "module_output_name"):
        if settings.get(name) not in (None, feature):
            raise ValueError(f"expected {folder / CONFIG} to have {name} {feature}, got {settings[name]!r}")
    if kind == "Normalize":
        return Normalize()
    settings = read_json(folder / CONFIG)  # the file must exist
    weights = {name: tensor.float() for name, tensor in read_numbers(folder).items()}
    if kind == "LayerNorm":
        return LayerNorm(_get(weights, folder, "norm.weight", (width,)), _get(weights, folder, "norm.bias", (width,)))
    into, out = number_of(settings, "in_features"), number_of(settings, "out_features")
    if into != width:
        raise ValueError(f"expected {folder / CONFIG} to have in_features {width}, as the rows have, got {into}")
    bias = _get(weights, folder, "linear.bias", (out,)) if flag_of(settings, "bias", True) else None
    residual: Tensor | bool | None = flag_of(settings, "use_residual", False)
    if residual and into != out:
        residual = _get(weights, folder, "residual.weight", (out, into))
    activation = activation_named(settings.get("activation_function", "Tanh"), folder / CONFIG)
    return Dense(_get(weights, folder, "linear.weight", (out, into)), bias, activation, residual)


def _get(weights: Mapping[str, Tensor], folder: Path, name: str, shape: tuple[int, ...]) -> Tensor:
    tensor = weights.get(name)
    if tensor is None or tuple(tensor.shape) != shape:
        got = "none" if tensor is None else f"one of {tuple(tensor.shape)}"
        raise ValueError(f"expected the weights in {folder} to have a {name} of {shape}, got {got}")
    return tensor


def activation_named(name: object, file: Path) -> nn.Module:
    """Returns the torch.nn module that a folder names, such as "torch.nn.modules.activation.Tanh".

    Raises:
        ValueError: the name is not of a known module of torch.nn; it could refer to code in the folder.
    """
    last = str(name).rpartition(".")[2]
    if not isinstance(name, str) or last not in ACTIVATIONS or (last != name and not name.startswith("torch.nn.")):
        raise ValueError(f"expected {file} to name an activation of torch.nn in {(*ACTIVATIONS,)}, got {name!r}")
    return ACTIVATIONS[last]()


def _score_activation(folder: Path, settings: Mapping[str, Any], foreign: Mapping[str, Any]) -> nn.Module | None:
    """Returns the activation of scores, from one of the settings in which sentence-transformers' versions store it."""
    nested = foreign.get("sentence_transformers")
    sources: list[tuple[object, Path]] = [
        (settings.get("activation_fn"), folder / _SETTINGS),
        (nested.get("activation_fn") if isinstance(nested, Mapping) else None, folder / CONFIG),
        (foreign.get("sbert_ce_default_activation_function"), folder / CONFIG),
    ]
    return next((activation_named(name, file) for name, file in sources if name is not None), None)


def _prompts(folder: Path, settings: Mapping[str, Any]) -> dict[str, str]:
    prompts = settings.get("prompts") or {}
    default = settings.get("default_prompt_name")
    if not isinstance(prompts, dict) or not all(isinstance(prompt, str | None) for prompt in prompts.values()):
        raise ValueError(f"expected {folder / _SETTINGS} to have prompts by name, got {prompts!r:.60}")
    if default is not None and default not in (known := [*dict.fromkeys([*prompts, *TASKS])]):
        hint = suggestion(str(default), known)
        raise ValueError(
            f"expected {folder / _SETTINGS} to have a default_prompt_name in {known}, got {default!r}{hint}"
        )
    return {name: prompt or "" for name, prompt in prompts.items()}


def _labels(foreign: Mapping[str, Any]) -> tuple[str, ...]:
    named = foreign.get("id2label")
    if not isinstance(named, Mapping) or not all(str(index).isdecimal() for index in named):
        return ()
    by_index = {int(index): str(label) for index, label in named.items()}
    # Other numbers than 0, 1, ... name no outputs of the head.
    return tuple(by_index[index] for index in range(len(by_index))) if set(by_index) == {*range(len(by_index))} else ()


def _read(file: Path) -> dict[str, Any]:
    return read_json(file) if file.is_file() else {}
