"""Decoder-only families: each is a `Form`, which converts a checkpoint to a `GPT` and back.

A form has three tables: the settings as options of `GPTConfig`, the options as settings, and the names of the tensors.
Options of `GPTConfig` that a form's settings don't contain have their defaults.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fastformer.checkpoints.hf.common import (
    Checkpoint,
    check_empty,
    check_floating,
    eos_setting,
    flag_of,
    load_foreign,
    taken,
)
from fastformer.checkpoints.hf.fields import with_usual_ids
from fastformer.models import GPT, BERTConfig, GPTConfig
from fastformer.models.pretrained import check_depth, config_from_dict
from fastformer.special_ids import SpecialIds

_FEW_EXPERTS = 10_000
EMBEDDING, OUTPUT, OUTPUT_BIAS = "embedding.weight", "output.weight", "output_bias"
BOTH = ("weight", "bias")  # the kinds of a module's tensors


def as_it_is(name: str, tensor: Tensor, config: GPTConfig) -> Tensor:
    """Returns the tensor unchanged."""
    return tensor


def as_saved(state: Mapping[str, Tensor], settings: Mapping[str, Any]) -> dict[str, Tensor]:
    """Returns the state unchanged."""
    return dict(state)


class Form(NamedTuple):
    """A decoder-only family.

    Attributes:
        name: the name in messages.
        prefix: the prefix of all names but the head's. Files of a model without a head lack it.
        options: settings -> options of `GPTConfig`, without vocab_size, tie_embeddings and special_ids. Raises a
            ValueError for a setting that a `GPT` doesn't support.
        settings: a config -> the settings, without those of the vocabulary. Raises a ValueError for an option that the
            family doesn't have.
        names: a config -> for each of fastformer's tensors, the family's names of the tensors that are concatenated to
            it (dimension 0). The family's names lack the prefix; the output is not included.
        is_tied: the value of tie_word_embeddings if the settings don't contain it.
        convert: (fastformer's name, a tensor of the family, config) -> fastformer's tensor.
        revert: the inverse of `convert`.
        open: (state, settings) -> the state whose tensors have the names of `names`.
        close: its inverse for a state that is written.
        unread: the ends of the names of tensors that old files contain and no model reads.
        heads: the names of the output's matrix, with that of newer versions of transformers first.
    """

    name: str
    prefix: str
    options: Callable[[Mapping[str, Any]], dict[str, Any]]
    settings: Callable[[GPTConfig], dict[str, Any]]
    names: Callable[[GPTConfig], dict[str, tuple[str, ...]]]
    is_tied: bool
    convert: Callable[[str, Tensor, GPTConfig], Tensor] = as_it_is
    revert: Callable[[str, Tensor, GPTConfig], Tensor] = as_it_is
    open: Callable[[Mapping[str, Tensor], Mapping[str, Any]], dict[str, Tensor]] = as_saved
    close: Callable[[Mapping[str, Tensor], Mapping[str, Any]], dict[str, Tensor]] = as_saved
    unread: tuple[str, ...] = ()
    heads: tuple[str, ...] = ("lm_head.weight",)

    def to_model(self, saved: Checkpoint) -> GPT:
        """Builds the model, as `ToModel` describes."""
        settings = saved.settings
        check_floating(settings, saved.state)
        left = self._with_prefix(self.open(saved.state, settings))
        hf_name = self.names(_ANY)[EMBEDDING][0]
        embedding, output = left.get(self.prefix + hf_name), None
        for name in self.heads:
            output = left.pop(name, output)
        if embedding is None or embedding.dim() != 2:
            raise ValueError(f"expected the tensors of a {self.name}, got no matrix called {self.prefix}{hf_name}")
        tied = flag_of(settings, "tie_word_embeddings", self.is_tied)
        if output is None and not tied:
            raise ValueError(
                f"expected the tensors of a {self.name} that generates text, got none called {self.heads[0]}, which "
                "isn't tied to the embedding (tie_word_embeddings): the model was saved without its head"
            )
        if output is not None and tied:  # unless one of the two matrices was changed afterwards
            tied = output is embedding or (output.shape == embedding.shape and torch.equal(output, embedding))
        # Before the options, which have lists with an entry for each layer.
        check_depth("num_hidden_layers", settings.get("num_hidden_layers"), len(left), "the settings")
        options = self.options(settings)
        check_depth("layers", options["num_layers"], len(left), "the settings")
        # The names of so many experts alone would take memory.
        experts = options.get("num_experts")
        if experts and experts * options["num_layers"] > max(len(left), _FEW_EXPERTS):
            raise ValueError(f"expected the settings to fit {len(left)} tensors, got {experts} experts in each layer")
        if saved.layer_norm_eps is not None:
            options["layer_norm_eps"] = saved.layer_norm_eps
        if options.get("output_bias") and output is None and self._bias not in left:
            options["output_bias"] = False  # a model without its head
        config: GPTConfig = config_from_dict(
            GPTConfig,
            {
                **options,
                "vocab_size": len(embedding),
                "tie_embeddings": tied,
                "special_ids": special_ids(settings, len(embedding), saved.unk),
            },
        )
        weights = {
            own_name: taken(left, [self.prefix + name for name in names], self.name)
            for own_name, names in self.names(config).items()
        }
        for own_name, parts in weights.items():
            # A sum of lengths would not show that they differ.
            if ".linear" in own_name and len({part.shape for part in parts}) > 1:
                shapes = ", ".join(str((*shape,)) for shape in {part.shape for part in parts})
                raise ValueError(f"expected matrices of one shape for {own_name}, got {shapes}")
        if output is not None and not tied:
            weights[OUTPUT] = (output,)
        if config.output_bias:
            weights[OUTPUT_BIAS] = taken(left, [self._bias], self.name)
        check_empty(left, self.name)
        return load_foreign(
            config,
            weights,
            device=saved.device,
            dtype=saved.dtype or embedding.dtype,
            convert=lambda name, tensor: self.convert(name, tensor, config),
        )

    def from_model(self, model: GPT) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """Returns the settings and the state_dict of the family that compute the same as a `GPT`.

        Raises:
            ValueError: the model has options that the family doesn't have.
        """
        config, ids = model.config, model.config.special_ids
        settings = self.settings(config)
        settings |= {
            "vocab_size": config.vocab_size,
            "tie_word_embeddings": config.tie_embeddings,
            "pad_token_id": None if ids.pad in ids.eos or not ids.eos else ids.pad,
            "bos_token_id": with_usual_ids(settings).get("bos_token_id"),  # no pass reads it; some configs need one
            "eos_token_id": eos_setting(ids) if ids.eos else None,
        }
        state = {name: tensor.detach() for name, tensor in model.state_dict().items()}
        weights: dict[str, Tensor] = {}
        for own_name, names in self.names(config).items():
            for name, part in zip(names, parts_of(own_name, state[own_name], config, len(names)), strict=True):
                weights[self.prefix + name] = self.revert(own_name, part, config)
        weights[self.heads[0]] = state[EMBEDDING if config.tie_embeddings else OUTPUT]
        if config.output_bias:
            weights[self._bias] = state[OUTPUT_BIAS]
        return settings, self.close(weights, settings)

    @property
    def _bias(self) -> str:
        """The name of the bias on the logits, in families that have one."""
        return f"{self.heads[0].removesuffix('.weight')}.bias"

    def _with_prefix(self, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
        tensors = {name: tensor for name, tensor in state.items() if not name.endswith(self.unread or ("\0",))}
        if any(name.startswith(self.prefix) for name in tensors):
            return tensors
        heads = (*self.heads, self._bias)
        return {name if name in heads else self.prefix + name: tensor for name, tensor in tensors.items()}


_ANY = GPTConfig(3, num_layers=1)


def special_ids(settings: Mapping[str, Any], vocab_size: int, unk: int | None) -> SpecialIds:
    """Returns the special ids of a decoder.

    An end-of-text id outside of the vocabulary is dropped. A model without an id for padding pads with its first
    end-of-text id, as transformers does.

    Raises:
        ValueError: an eos_token_id that is neither an id nor a list of ids.
    """
    said = settings.get("eos_token_id")
    listed = [] if said is None else said if isinstance(said, list | tuple) else [said]
    if not all(isinstance(i, int) and not isinstance(i, bool) for i in listed):
        raise ValueError(f"expected eos_token_id to be an id or a list of ids, got {said!r:.60}")
    eos = tuple(i for i in dict.fromkeys(listed) if 0 <= i < vocab_size)
    pad = settings.get("pad_token_id")
    if not isinstance(pad, int) or not 0 <= pad < vocab_size:
        pad = eos[0] if eos else 0
    return SpecialIds(pad=pad, eos=eos, unk=None if unk in (pad, *eos) else unk)


def parts_of(name: str, tensor: Tensor, config: GPTConfig | BERTConfig, count: int) -> tuple[Tensor, ...]:
    """Returns the parts of one of fastformer's tensors that are so many tensors of a family."""
    if count == 1:
        return (tensor,)
    if ".linear" in name:
        return tensor.chunk(count)
    if name.endswith(".router.weight"):
        return tensor[:-1], tensor[-1:]
    if isinstance(config, GPTConfig) and name.endswith((".self_attn.gates.weight", ".self_attn.in_proj.weight")):
        values = config.linear_value_heads or config.linear_key_heads
        if ".gates." in name:
            return tensor.split(values)
        z = values * config.linear_value_dim
        return tensor.split([len(tensor) - z, z])
    kv_heads, head_dim = config.num_kv_heads or config.num_heads, config.size_of_head
    if isinstance(config, GPTConfig):
        kv_heads, head_dim = config.heads_of(config.windows[int(name.split(".")[2])])
    return tensor.split([config.num_heads * head_dim, *[kv_heads * head_dim] * (count - 1)])


class MisfitError(ValueError):
    """A config has an option that the family doesn't have.

    Attributes:
        option: the name of the option.
    """

    def __init__(self, option: str, message: str) -> None:
        super().__init__(message)
        self.option = option


def differing(config: GPTConfig | BERTConfig, expected: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the options of a config that the family doesn't have, each with the value that the family has.

    Args:
        config: the config of the model.
        expected: by option, the one value that the family has, or a tuple of the values that it may have. All values of
            other options are accepted.
    """
    return {
        name: value
        for name, value in expected.items()
        if getattr(config, name, None) not in (value if isinstance(value, tuple) else (value,))
    }


def check_form(config: GPTConfig | BERTConfig, expected: Mapping[str, Any], free: Iterable[str], name: str) -> None:
    """Checks that a family has the options of a config.

    Args:
        config: the config of the model.
        expected: see `differing`.
        free: options that the family's settings contain. In the family the other options have their defaults.
        name: the name of the family.

    Raises:
        MisfitError: the config has an option that the family doesn't have.
    """
    known = {*expected, *free, "vocab_size", "tie_embeddings", "special_ids", "d_model", "num_heads", "num_layers"}
    usual = {
        field.name: field.default
        for field in dataclasses.fields(config)
        if field.name not in known and field.default is not dataclasses.MISSING
    }
    for option, value in differing(config, {**expected, **usual}).items():
        wanted = f"one of {value}" if isinstance(value, tuple) else f"{value!r}"
        raise MisfitError(option, f"expected a {name}, with {option}={wanted}, got {getattr(config, option)!r}")


def kinds_of(has_bias: bool) -> tuple[str, ...]:
    """Returns the kinds of a module's tensors."""
    return BOTH if has_bias else BOTH[:1]


def layer_names(
    config: GPTConfig | BERTConfig,
    place: str,
    modules: Mapping[str, tuple[str, ...]],
    has_bias: Callable[[str], bool] = lambda module: True,
) -> dict[str, tuple[str, ...]]:
    """Maps fastformer's names of the layers' tensors to those of the family.

    Args:
        config: the config of the model.
        place: the family's name of the layers, such as "layers".
        modules: fastformer's names of the modules, each with those of the family.
        has_bias: fastformer's name of a module -> whether it has a bias.
    """
    names: dict[str, tuple[str, ...]] = {}
    stack = "encoder" if isinstance(config, BERTConfig) else "decoder"
    for layer in range(config.num_layers):
        for ours, hf_modules in modules.items():
            if ours == "norm1" and layer == 0 and isinstance(config, BERTConfig) and not config.first_norm:
                continue
            for kind in kinds_of(has_bias(ours)):
                name = f"self_attn.in_proj_{kind}" if ours == "self_attn.in_proj" else f"{ours}.{kind}"
                names[f"{stack}.layers.{layer}.{name}"] = tuple(f"{place}.{layer}.{part}.{kind}" for part in hf_modules)
    return names


def same_dropout(settings: Mapping[str, Any], default: float, *names: str) -> float:
    """Returns a dropout probability that has several names; `default`, if the settings don't contain it.

    Raises:
        ValueError: the probabilities differ.
    """
    rates = {name: settings.get(name, default) for name in names}
    first, *others = rates.values()
    if not isinstance(first, int | float) or any(other != first for other in others):
        raise ValueError(f"expected one probability of dropout, got {rates!r:.120}")
    return float(first)
