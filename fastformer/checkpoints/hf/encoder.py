"""Encoder-only families: each is an `EncoderForm`, which converts a checkpoint to a `BERT` and back.

An `EncoderForm` has the tables of a `decoder.Form`: the settings as options of `BERTConfig` and back, and the names of
the tensors. A head that classifies texts is converted; other heads, such as that of masked words, are dropped.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fastformer.checkpoints.hf.common import (
    Checkpoint,
    check_empty,
    check_floating,
    eos_setting,
    load_foreign,
    some,
    taken,
)
from fastformer.checkpoints.hf.decoder import BOTH, EMBEDDING, as_saved, parts_of, special_ids
from fastformer.models import BERT, BERTConfig
from fastformer.models.pretrained import check_depth, config_from_dict
from fastformer.special_ids import SpecialIds

logger = logging.getLogger("fastformer")

POSITIONS = "embedding.position.table"
CLASSIFIER = "ForSequenceClassification"  # the end of the class names of models with this head
_HEAD_OPTIONS = ("head", "head_dropout")
_OLD_KINDS = {"LayerNorm.gamma": "LayerNorm.weight", "LayerNorm.beta": "LayerNorm.bias"}
_BUFFERS = ("embeddings.position_ids", "embeddings.token_type_ids")  # old files contain these


class EncoderForm(NamedTuple):
    """An encoder-only family.

    Attributes:
        name: the name in messages.
        prefix: the prefix of all names but the heads'. Files of a model without a head lack it.
        classes: the beginning of the names of transformers' classes, such as "Bert".
        pad: the pad_token_id if the settings don't contain it.
        options: settings -> options of `BERTConfig`, without vocab_size, pooler, num_labels and special_ids. Raises a
            ValueError for a setting that a `BERT` doesn't support.
        settings: a config -> the settings, without those of the vocabulary. Raises a ValueError for an option that the
            family doesn't have.
        names: a config -> for each of fastformer's tensors, the family's names of the tensors that are concatenated to
            it (dimension 0). The family's names lack the prefix; the head is not included.
        head: a config -> fastformer's names of the head's tensors, and those of the family.
        pooler: the name of the pooler's linear layer, without the prefix; None: the family has none.
        unused_positions: the id of PAD -> how many rows at the start of the table of positions belong to no token.
        open: (state, settings) -> the state whose tensors have the names of the family.
        pad_ends: whether the id of PAD may be an eos.
    """

    name: str
    prefix: str
    classes: str
    pad: int
    options: Callable[[Mapping[str, Any]], dict[str, Any]]
    settings: Callable[[BERTConfig], dict[str, Any]]
    names: Callable[[BERTConfig], dict[str, tuple[str, ...]]]
    head: Callable[[BERTConfig], dict[str, str]]
    pooler: str | None = "pooler.dense"
    unused_positions: Callable[[int], int] = lambda pad: 0
    open: Callable[[Mapping[str, Tensor], Mapping[str, Any]], dict[str, Tensor]] = as_saved
    pad_ends: bool = False

    def to_model(self, saved: Checkpoint) -> BERT:
        """Builds the model, as `ToModel` describes. The first of `architectures` decides if the head classifies."""
        settings, state = saved.settings, saved.state
        check_floating(settings, {name: tensor for name, tensor in state.items() if not name.endswith(_BUFFERS)})
        left = self._with_prefix(self.open(state, settings))
        hf_name = self.prefix + self.names(_ANY)[EMBEDDING][0]
        embedding = left.get(hf_name)
        if embedding is None or embedding.dim() != 2:
            raise ValueError(f"expected the tensors of a {self.name}, got no matrix called {hf_name}")
        # Before the options, which have lists with an entry for each layer.
        check_depth("num_hidden_layers", settings.get("num_hidden_layers"), len(left), "the settings")
        options = self.options(settings)
        check_depth("layers", options["num_layers"], len(left), "the settings")
        if saved.layer_norm_eps is not None:
            options["layer_norm_eps"] = saved.layer_norm_eps
        ids = self._special_ids(settings, len(embedding), saved.unk)
        options |= {"vocab_size": len(embedding), "special_ids": ids}
        options["num_labels"] = self._num_labels(settings, options, left)
        if not options["num_labels"]:
            options = {name: value for name, value in options.items() if name not in _HEAD_OPTIONS}
        pooler = [name for name in left if self.pooler and name.startswith(f"{self.prefix}{self.pooler}.")]
        # A head of another kind doesn't read the pooler; transformers omits it in this case.
        options["pooler"] = bool(pooler) and (not options["num_labels"] or options["head"] == "bert")
        for name in () if options["pooler"] else pooler:
            del left[name]
        config: BERTConfig = config_from_dict(BERTConfig, options)
        weights = {own_name: taken(left, parts, self.name) for own_name, parts in self._all_names(config).items()}
        check_empty((name for name in left if name.startswith(self.prefix)), self.name)
        if left:
            logger.warning("the encoder of a %s does not use these tensors: %s", self.name, some(left))
        unused = self.unused_positions(ids.pad)
        model: BERT = load_foreign(
            config,
            weights,
            device=saved.device,
            dtype=saved.dtype or embedding.dtype,
            convert=lambda name, tensor: tensor[unused:] if name == POSITIONS else tensor,
        )
        return model

    def from_model(self, model: BERT) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """Returns the settings and the state_dict of the family that compute the same as a `BERT`.

        Raises:
            ValueError: the model has options that the family doesn't have.
        """
        config, ids = model.config, model.config.special_ids
        settings = self.settings(config)
        unused = self.unused_positions(ids.pad)
        if POSITIONS in self.names(config):
            settings["max_position_embeddings"] = config.max_len + unused
        settings |= {
            "vocab_size": config.vocab_size,
            "pad_token_id": ids.pad,
            "bos_token_id": None if ids.start == ids.pad else ids.start,
            "eos_token_id": None if not ids.eos else eos_setting(ids) if self.pad_ends else ids.eos[0],
            "architectures": [f"{self.classes}{CLASSIFIER if config.num_labels else 'Model'}"],
        }
        if config.num_labels:
            settings["num_labels"] = config.num_labels
        state = {name: tensor.detach() for name, tensor in model.state_dict().items()}
        weights: dict[str, Tensor] = {}
        for own_name, names in self._all_names(config).items():
            tensor = state[own_name]
            if own_name == POSITIONS:
                tensor = torch.nn.functional.pad(tensor, (0, 0, unused, 0))
            for name, part in zip(names, parts_of(own_name, tensor, config, len(names)), strict=True):
                weights[name if config.num_labels else name.removeprefix(self.prefix)] = part
        return settings, weights

    def _all_names(self, config: BERTConfig) -> dict[str, tuple[str, ...]]:
        """Maps fastformer's names of all tensors to those of the family, prefix included."""
        names = {
            own_name: tuple(self.prefix + part for part in parts) for own_name, parts in self.names(config).items()
        }
        if config.pooler and self.pooler is not None:
            names |= {f"pooler.{kind}": (f"{self.prefix}{self.pooler}.{kind}",) for kind in BOTH}
        if config.num_labels:
            names |= {own_name: (hf_name,) for own_name, hf_name in self.head(config).items()}
        return names

    def _num_labels(self, settings: Mapping[str, Any], options: Mapping[str, Any], state: Mapping[str, Tensor]) -> int:
        """Returns the number of labels of the head that classifies texts; 0: the model has no such head."""
        listed = settings.get("architectures")
        architecture = listed[0] if isinstance(listed, list | tuple) and listed else None
        if architecture is not None and not str(architecture).endswith(CLASSIFIER):
            return 0
        last = self.head(config_from_dict(BERTConfig, {**options, "num_labels": 0}))["head.out.weight"]
        matrix = state.get(last)
        if matrix is None or matrix.dim() != 2:
            if architecture is not None:
                raise ValueError(f"expected the tensors of a {architecture}, got no matrix called {last}")
            return 0
        return len(matrix)

    def _special_ids(self, settings: Mapping[str, Any], vocab_size: int, unk: int | None) -> SpecialIds:
        pad = settings.get("pad_token_id", self.pad)
        if not isinstance(pad, int) or isinstance(pad, bool) or not 0 <= pad < vocab_size:
            raise ValueError(f"expected a pad_token_id from 0 to {vocab_size - 1}, got {pad!r}")

        def known(*names: str) -> int | None:
            token_id = next((settings[name] for name in names if settings.get(name) is not None), None)
            is_id = isinstance(token_id, int) and not isinstance(token_id, bool) and 0 <= token_id < vocab_size
            return token_id if is_id and token_id != pad else None

        eos, start = known("eos_token_id", "sep_token_id"), known("bos_token_id", "cls_token_id")
        ends: tuple[int, ...] = () if eos is None else (eos,)
        if self.pad_ends:
            ends = special_ids(settings, vocab_size, None).eos
        return SpecialIds(
            pad=pad,
            eos=ends,
            unk=None if unk in (pad, *ends) else unk,
            start=pad if start is None else start,
        )

    def _with_prefix(self, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
        tensors: dict[str, Tensor] = {}
        for name, tensor in state.items():
            if not name.endswith(_BUFFERS):
                for old, new in _OLD_KINDS.items():
                    name = name.replace(old, new)
                tensors[name] = tensor
        if any(name.startswith(self.prefix) for name in tensors):
            return tensors
        return {self.prefix + name: tensor for name, tensor in tensors.items()}


_ANY = BERTConfig(3, num_layers=1)
