"""The relatives of Llama whose layers have several feed-forward networks: a mixture of experts.

Their files have a matrix for each expert, or one tensor for all experts of a layer, as models in memory do from version
5 of transformers on. Both are read; the first is written.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fastformer.checkpoints.hf.common import flag_of, number_of
from fastformer.checkpoints.hf.decoder import MisfitError, kinds_of, layer_names
from fastformer.checkpoints.hf.llama import (
    FULL,
    MODULES,
    QK_NORMS,
    SLIDING,
    Names,
    Variant,
    all_but_each,
    everywhere,
    uses_window,
)
from fastformer.checkpoints.hf.llama_kin import folded, granite_options, granite_settings
from fastformer.models import GPTConfig

# Settings about experts that change no pass, and those that all of these families have.
_TOTALS = ("num_experts", "num_local_experts")
_READ = ("output_router_logits", "router_aux_loss_coef", "num_experts_per_tok", *_TOTALS)
_ABOUT_EXPERTS = re.compile(r"expert|router|routed|moe|top_?k_|_group$|scoring|sparse|clip_qkv")
_FREE = ("num_experts", "num_experts_per_tok")
# Granite's names on disk, and in memory.
_OF_GRANITE = {
    "input_linear.weight": "experts.gate_up_proj",
    "output_linear.weight": "experts.down_proj",
    "router.layer.weight": "router.weight",
}
_GATED = ("gate_proj", "up_proj", "down_proj")


class Experts(NamedTuple):
    """The names and the settings of a family's experts.

    Attributes:
        place: the family's name of the mixture within a layer.
        router: the name of the router.
        parts: the names of the gate, the map beside it and the map after both.
        total: the setting that is the number of experts.
        usual_count: the number of experts if the settings don't contain it.
        norm_topk_prob: whether the weights of a token's experts are divided by their sum; None: a setting says it.
        d_ff: the setting that is the inner size of an expert; None: that of other layers.
        shared: the names of the shared expert and of its gate, and the setting that is its inner size; (): there is
            none. Without a gate (""), the setting is the number of experts that are as large as it.
        may_be_dense: whether settings may leave some layers without experts.
        unread: settings about experts that repeat others.
        per_token: the setting that is the number of experts that compute a token.
        first_dense: the setting that is the number of layers, the first ones, without experts.
        scale: the setting that is `GPTConfig.expert_scale`.
        choice_bias: the name of what is added to weights where experts are chosen, and the setting that says whether
            anything is, if there is one.
        ones: settings about experts that have to be 1.
        has_loss: whether the settings contain `GPTConfig.router_aux_loss_coef`.
    """

    place: str = "mlp"
    router: str = "gate"
    parts: tuple[str, str, str] = _GATED
    total: str = "num_experts"
    usual_count: int = 64
    norm_topk_prob: bool | None = None
    d_ff: str | None = None
    shared: tuple[str, ...] = ()
    may_be_dense: bool = False
    unread: tuple[str, ...] = ()
    per_token: str = "num_experts_per_tok"
    first_dense: str | None = None
    scale: str | None = None
    choice_bias: tuple[str, ...] = ()
    ones: tuple[str, ...] = ()
    has_loss: bool = True

    @property
    def free(self) -> tuple[str, ...]:
        """The options of `GPTConfig` that the settings contain."""
        named = {
            "norm_topk_prob": self.norm_topk_prob is None,
            "expert_d_ff": self.d_ff is not None,
            "shared_expert_d_ff": bool(self.shared),
            "shared_expert_gate": bool(self.shared),
            "sparse_layers": self.may_be_dense or self.first_dense is not None,
            "expert_scale": self.scale is not None,
            "choice_bias": len(self.choice_bias) > 1,
            "router_aux_loss_coef": self.has_loss,
        }
        return (*_FREE, *(name for name, is_free in named.items() if is_free))

    def options(self, settings: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the options of `GPTConfig` about experts; none if no layer has any."""
        named = (self.d_ff, *self.shared[2:], *(("norm_topk_prob",) if self.norm_topk_prob is None else ()))
        dense = ("decoder_sparse_step", "mlp_only_layers") if self.may_be_dense else (self.first_dense,)
        named = (*named, *dense, self.scale, *self.choice_bias[1:], self.total, self.per_token)
        known = {*_READ, *named, *self.ones, *self.unread}
        for name, value in settings.items():
            if value not in (None, False) and name not in known and _ABOUT_EXPERTS.search(name):
                raise ValueError(f"expected no {name}, which this family's routers don't have, got {value!r:.60}")
        for name in self.ones:
            if settings.get(name) not in (None, 1):
                raise ValueError(f"expected {name} to be 1, got {settings[name]!r:.60}")
        counts = {name: settings[name] for name in {*_TOTALS, self.total} if settings.get(name) is not None}
        if len({*map(repr, counts.values())}) > 1:
            raise ValueError(f"expected one number of experts, got {counts}")
        settings = {**settings, self.total: self.num_experts(settings)}
        depth = number_of(settings, "num_hidden_layers")
        sparse = self._sparse(settings, depth)
        if not any(sparse):
            return {}
        options: dict[str, Any] = {
            "num_experts": number_of(settings, self.total),
            "num_experts_per_tok": number_of(settings, self.per_token),
        }
        if self.has_loss:
            options["router_aux_loss_coef"] = settings.get("router_aux_loss_coef") or 0.0
        if self.norm_topk_prob is None:
            options["norm_topk_prob"] = flag_of(settings, "norm_topk_prob", False)
        if self.d_ff is not None:
            options["expert_d_ff"] = number_of(settings, self.d_ff)
        if self.shared and self.shared[1]:
            options["shared_expert_d_ff"] = number_of(settings, self.shared[2])
        elif self.shared and (shared := number_of(settings, self.shared[2], 0)):
            options |= {"shared_expert_d_ff": shared * options["expert_d_ff"], "shared_expert_gate": False}
        if self.scale is not None:
            options["expert_scale"] = settings.get(self.scale)
        if self.choice_bias[1:]:
            options["choice_bias"] = flag_of(settings, self.choice_bias[1], True)
        return options if all(sparse) else {**options, "sparse_layers": sparse}

    def num_experts(self, settings: Mapping[str, Any]) -> Any:
        """Returns the number of experts in the settings, unchecked."""
        names = (self.total, *_TOTALS)
        return next((settings[name] for name in names if settings.get(name) is not None), self.usual_count)

    def _sparse(self, settings: Mapping[str, Any], depth: int) -> tuple[bool, ...]:
        if self.first_dense is not None:
            first = number_of(settings, self.first_dense, 0)
            return tuple(layer >= first for layer in range(depth))
        if not self.may_be_dense or number_of(settings, self.total, 0) == 0:
            return (not self.may_be_dense,) * depth
        step, dense = settings.get("decoder_sparse_step", 1), settings.get("mlp_only_layers") or []
        if not isinstance(step, int) or isinstance(step, bool) or step < 1:
            raise ValueError(f"expected decoder_sparse_step to be an integer of at least 1, got {step!r}")
        if not isinstance(dense, list | tuple) or not all(type(layer) is int for layer in dense):
            raise ValueError(f"expected mlp_only_layers to be numbers of layers, got {dense!r:.60}")
        return tuple(layer not in dense and (layer + 1) % step == 0 for layer in range(depth))

    def settings(self, config: GPTConfig) -> dict[str, Any]:
        """Returns the settings about experts."""
        if config.num_experts is None:
            raise MisfitError("num_experts", "expected num_experts in a model of this family, got None")
        shared, has_gate = config.shared_expert_d_ff, bool(self.shared and self.shared[1])
        d_ff = config.expert_d_ff or config.d_ff or 1
        if has_gate != (shared is not None and config.shared_expert_gate) or (shared and not self.shared):
            raise MisfitError("shared_expert_d_ff", f"expected other shared experts, got {shared}")
        settings: dict[str, Any] = {
            self.total: config.num_experts,
            self.per_token: config.num_experts_per_tok,
        }
        if self.has_loss:
            settings["router_aux_loss_coef"] = config.router_aux_loss_coef
        if self.norm_topk_prob is None:
            settings["norm_topk_prob"] = config.norm_topk_prob
        if self.d_ff is not None:
            settings[self.d_ff] = d_ff
        if self.shared:
            settings[self.shared[2]] = shared if has_gate else (shared or 0) // d_ff
        if not has_gate and (shared or 0) % d_ff:
            raise MisfitError(
                "shared_expert_d_ff", f"expected a multiple of {d_ff}, the size of an expert, got {shared}"
            )
        if self.scale is not None:
            settings[self.scale] = config.expert_scale
        if self.choice_bias[1:]:
            settings[self.choice_bias[1]] = config.choice_bias
        if self.first_dense is not None:
            settings[self.first_dense] = first = (*config.sparse, True).index(True)
            if not all(config.sparse[first:]):
                raise MisfitError("sparse_layers", f"expected experts in all layers but the first, got {config.sparse}")
        if self.may_be_dense:
            dense = [layer for layer, is_sparse in enumerate(config.sparse) if not is_sparse]
            settings |= {"decoder_sparse_step": 1, "mlp_only_layers": dense}
        return settings

    def names(self, names: dict[str, tuple[str, ...]], config: GPTConfig) -> dict[str, tuple[str, ...]]:
        """Returns the names of a model's tensors, with those of experts in the place of the feed-forward network's."""
        gate, up, down = self.parts
        for layer in (layer for layer, is_sparse in enumerate(config.sparse) if is_sparse):
            own, place = f"decoder.layers.{layer}", f"layers.{layer}.{self.place}"
            experts = [f"{place}.experts.{expert}" for expert in range(config.num_experts or 0)]
            for kind in kinds_of(config.bias):
                for name in ("linear1", "linear2"):
                    del names[f"{own}.{name}.{kind}"]
                pairs = tuple(f"{expert}.{part}.{kind}" for expert in experts for part in (gate, up))
                names[f"{own}.mixture.linear1.{kind}"] = pairs
                names[f"{own}.mixture.linear2.{kind}"] = tuple(f"{expert}.{down}.{kind}" for expert in experts)
            router: tuple[str, ...] = (f"{place}.{self.router}.weight",)
            if config.choice_bias:
                names[f"{own}.mixture.router.choice_bias"] = (f"{place}.{self.choice_bias[0]}",)
            if self.shared and config.shared_expert_d_ff is not None:
                shared, shared_gate, _ = self.shared
                if shared_gate:
                    router = (*router, f"{place}.{shared_gate}.weight")
                for name, parts in (("linear1", _GATED[:2]), ("linear2", _GATED[2:])):
                    hf_names = tuple(f"{place}.{shared}.{part}.weight" for part in parts)
                    names[f"{own}.mixture.shared.{name}.weight"] = hf_names
            names[f"{own}.mixture.router.weight"] = router
        return names

    def opened(self, state: Mapping[str, Tensor], settings: Mapping[str, Any]) -> dict[str, Tensor]:
        """Returns a state with a tensor for each expert, of one that may have one for all: views of them."""
        opened: dict[str, Tensor] = {}
        count = self.num_experts(settings)
        for saved_name, tensor in state.items():
            name = self._named(saved_name)
            match = re.fullmatch(r"(.*)\.(gate_up_proj|down_proj)", name)
            if match is None:
                opened[name] = tensor
                continue
            if tensor.dim() != 3 or len(tensor) != count or not tensor.numel():
                raise ValueError(
                    f"expected {saved_name} to have {count} experts of two dimensions, got {(*tensor.shape,)}"
                )
            gate, up, down = self.parts
            for expert, matrix in enumerate(tensor.unbind()):
                place = f"{match[1]}.{expert}"
                if match[2] == "down_proj":
                    opened[f"{place}.{down}.weight"] = matrix
                else:
                    opened[f"{place}.{gate}.weight"], opened[f"{place}.{up}.weight"] = matrix.chunk(2)
        return opened

    def _named(self, name: str) -> str:
        """Returns the name of a tensor on disk; of one for all experts, that in memory."""
        match = re.fullmatch(r"(.*layers\.\d+)\.(?:mlp|block_sparse_moe)\.(.*)", name)
        return name if match is None else f"{match[1]}.{self.place}.{_OF_GRANITE.get(match[2], match[2])}"


def in_memory(weights: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Returns a state as a model of transformers has it, of one that has a tensor for each expert.

    Args:
        weights: the tensors by their names on disk.
        expected: those of the model, in whose form they are returned.
    """
    if weights.keys() == expected.keys():
        return dict(weights)
    found: dict[str, Tensor] = {}
    parts: dict[str, dict[tuple[int, str], Tensor]] = {}
    for name, tensor in weights.items():
        name = re.sub(r"\.block_sparse_moe\.(gate\.|experts\.\d+\.w)", r".mlp.\1", name)  # Mixtral's
        name = name.replace(".mlp.moe_statics.", ".mlp.gate.moe_statics.")  # ERNIE's
        if (match := re.fullmatch(r"(.*\.experts)\.(\d+)\.(\w+)\.weight", name)) is None:
            found[name] = tensor
        else:
            parts.setdefault(match[1], {})[int(match[2]), match[3]] = tensor
    for place, tensors in parts.items():
        count = max(expert for expert, _ in tensors) + 1
        gate, up, down = ("w1", "w3", "w2") if (0, "w1") in tensors else _GATED
        pairs = [torch.cat([tensors[i, gate], tensors[i, up]]) for i in range(count)]
        found[f"{place}.gate_up_proj"] = torch.stack(pairs)
        found[f"{place}.down_proj"] = torch.stack([tensors[i, down] for i in range(count)])
    return found


def _every_other(settings: Mapping[str, Any], depth: int) -> list[str]:
    """Gives every other one of the first max_window_layers a window, as Qwen2-MoE does."""
    last, is_used = number_of(settings, "max_window_layers", 0), uses_window(settings)
    return [SLIDING if is_used and layer % 2 == 0 and layer < last else FULL for layer in range(depth)]


def _if_used(settings: Mapping[str, Any], depth: int) -> list[str]:
    """Gives all layers a window if the settings use it."""
    return [SLIDING if uses_window(settings) else FULL] * depth


def _granite_moe() -> Variant:
    """Returns Granite-MoE: Granite's factors around Mixtral's experts, whose weights are a softmax of the chosen."""
    experts = Experts("block_sparse_moe", "router", total="num_local_experts", usual_count=8, norm_topk_prob=True)
    return _variant(
        "granitemoe",
        "Granite-MoE",
        experts,
        usual={"num_experts_per_tok": 2, "router_aux_loss_coef": 0.001},
        biases=("attention_bias", "attention_bias", False),
    )._replace(
        more=lambda settings: {**granite_options(settings), **experts.options(settings)},
        more_settings=lambda config: {**granite_settings(config), **experts.settings(config)},
        free=(*experts.free, "embedding_scale", "attention_scale"),
        open=lambda state, settings: folded(experts.opened(state, settings), settings),
    )


# gpt-oss' numbers in its SwiGLU: those of `clamped_swiglu`.
_SWIGLU = {"swiglu_alpha": 1.702, "swiglu_limit": 7.0}


def _gpt_oss() -> Variant:
    """Returns gpt-oss: attention with sinks, and experts whose rows of gates and of the maps beside them alternate."""
    total = "num_local_experts"
    experts = Experts(router="router", total=total, usual_count=128, norm_topk_prob=True, unread=("experts_per_token",))

    def options(settings: Mapping[str, Any]) -> dict[str, Any]:
        for name, usual in _SWIGLU.items():
            if (value := settings.get(name, usual)) != usual:
                raise ValueError(f"expected a {name} of {usual}, got {value!r:.60}")
        return experts.options(settings)

    return Variant(
        "gpt_oss",
        "gpt-oss",
        usual={
            "num_key_value_heads": 8, "head_dim": 64, "sliding_window": 128, "rms_norm_eps": 1e-5,
            "num_experts_per_tok": 4, "router_aux_loss_coef": 0.001, "attention_bias": True,
        },
        fixed={"norm": "rms", "norm_bias": False, "attention_sinks": True, "router_bias": True},
        biases=("attention_bias", "attention_bias", True),
        layer_types=lambda settings, depth: [FULL if layer % 2 else SLIDING for layer in range(depth)],
        base=150_000.0,
        rope={
            "rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False,
            "original_max_position_embeddings": 4096,
        },
        grows=False,
        activations={"silu": "clamped_swiglu"},
        activation_settings=(),
        more=options,
        more_settings=lambda config: {**_SWIGLU, **experts.settings(config)},
        free=experts.free,
        rename=lambda names, config: _with_sinks(experts.names(names, config), config),
        open=lambda state, settings: _opened_gpt_oss(state, number_of({total: experts.num_experts(settings)}, total)),
        close=_closed_gpt_oss,
    )  # fmt: skip


def _with_sinks(names: dict[str, tuple[str, ...]], config: GPTConfig) -> dict[str, tuple[str, ...]]:
    for layer in range(config.num_layers):
        own, place = f"decoder.layers.{layer}", f"layers.{layer}"
        names[f"{own}.self_attn.sinks"] = (f"{place}.self_attn.sinks",)
        names[f"{own}.mixture.router.bias"] = (f"{place}.mlp.router.bias",)
    return names


def _opened_gpt_oss(state: Mapping[str, Tensor], count: int) -> dict[str, Tensor]:
    """Returns a state with a tensor for each of `count` experts, of one that has (count, [inputs,] outputs) of all.

    A matrix of weights has all experts' maps one below the other, as `mxfp4` returns it.
    """
    opened: dict[str, Tensor] = {}
    for name, tensor in state.items():
        match = re.fullmatch(r"(.*\.experts)\.(gate_up_proj|down_proj)(_bias)?", name)
        if match is None:
            opened[name] = tensor
            continue
        kind = "bias" if match[3] else "weight"
        is_joined, rows = not match[3] and tensor.dim() == 2, len(tensor)
        if (count < 1 or rows % count) if is_joined else (rows != count or tensor.dim() != (2 if match[3] else 3)):
            raise ValueError(f"expected {name} of {count} experts, got shape {(*tensor.shape,)}")
        for expert in range(count):
            if is_joined:
                each = tensor[expert * rows // count : (expert + 1) * rows // count]
            else:
                each = tensor[expert].movedim(-1, 0)
            parts = {"down_proj": each}
            if match[2] == "gate_up_proj":
                half = len(each) // 2
                pair = (each[:half], each[half:]) if is_joined else (each[::2], each[1::2])
                parts = dict(zip(_GATED, pair, strict=False))
            opened |= {f"{match[1]}.{expert}.{part}.{kind}": part_of for part, part_of in parts.items()}
    return opened


def _closed_gpt_oss(state: Mapping[str, Tensor], settings: Mapping[str, Any]) -> dict[str, Tensor]:
    """Does the inverse of `_opened_gpt_oss`."""
    closed: dict[str, Tensor] = {}
    parts: dict[tuple[str, str, str], list[Tensor]] = {}  # in the order of the experts
    for name, tensor in state.items():
        if (match := re.fullmatch(r"(.*\.experts)\.\d+\.(\w+)\.(weight|bias)", name)) is None:
            closed[name] = tensor
        else:
            parts.setdefault((match[1], match[2], "_bias" if match[3] == "bias" else ""), []).append(tensor)
    for (place, part, end), tensors in parts.items():
        whole = torch.stack(tensors)
        if part == "gate_proj":
            whole = torch.stack([whole, torch.stack(parts[place, "up_proj", end])], 2).flatten(1, 2)
        if part != "up_proj":
            name = "down_proj" if part == "down_proj" else "gate_up_proj"
            closed[f"{place}.{name}{end}"] = whole if end else whole.transpose(1, 2).contiguous()
    return closed


# ---- Experts that are chosen by other numbers than their weights, as in DeepSeek-V3 ----

_SIGMOIDS: dict[str, Any] = {"router_activation": "sigmoid", "choice_bias": True, "norm_topk_eps": 1e-20}


GLM_EXPERTS = Experts(
    total="n_routed_experts",
    usual_count=128,
    d_ff="moe_intermediate_size",
    shared=("shared_experts", "", "n_shared_experts"),
    first_dense="first_k_dense_replace",
    scale="routed_scaling_factor",
    choice_bias=("gate.e_score_correction_bias",),
    ones=("n_group", "topk_group"),
    has_loss=False,
)


def _glm(settings: Mapping[str, Any]) -> dict[str, Any]:
    norms = "head" if flag_of(settings, "use_qk_norm", False) else None
    return {"qk_norm": norms, **GLM_EXPERTS.options(settings)}


def _glm_settings(config: GPTConfig) -> dict[str, Any]:
    if config.qk_norm not in (None, "head"):
        raise MisfitError("qk_norm", f"expected a GLM-4.5, with a qk_norm of 'head' or none, got {config.qk_norm!r}")
    return {"use_qk_norm": config.qk_norm is not None, **GLM_EXPERTS.settings(config)}


def _rename_glm(names: Names, config: GPTConfig) -> Names:
    if config.qk_norm is not None:
        names |= layer_names(config, "layers", QK_NORMS, lambda module: False)
    return GLM_EXPERTS.names(names, config)


def _opened_glm(state: Mapping[str, Tensor], settings: Mapping[str, Any]) -> dict[str, Tensor]:
    """Returns a state with a tensor for each expert, without the layer that predicts further tokens."""
    further = f"model.layers.{settings.get('num_hidden_layers')}."
    return GLM_EXPERTS.opened({name: x for name, x in state.items() if not name.startswith(further)}, settings)


TRINITY_EXPERTS = Experts(
    router="router.gate",
    usual_count=64,
    norm_topk_prob=True,
    d_ff="moe_intermediate_size",
    shared=("shared_experts", "", "num_shared_experts"),
    first_dense="num_dense_layers",
    scale="route_scale",
    choice_bias=("expert_bias",),
    unread=("score_func", "route_norm"),
    ones=("n_group", "topk_group", "num_expert_groups", "num_limited_groups"),
    has_loss=False,
)
_trinity_types = all_but_each(4, "global_attn_every_n_layers")


def _trinity(settings: Mapping[str, Any]) -> dict[str, Any]:
    if flag_of(settings, "attention_bias", False):
        raise ValueError("expected attention_bias to be False, got True")  # gates have none
    types = settings.get("layer_types") or _trinity_types(settings, number_of(settings, "num_hidden_layers"))
    rotates = tuple(kind == SLIDING for kind in types)
    options: dict[str, Any] = {} if all(rotates) else {"rotary_layers": rotates}
    if flag_of(settings, "mup_enabled", False):
        options["embedding_scale"] = settings["hidden_size"] ** 0.5
    return {**options, **TRINITY_EXPERTS.options(settings)}


def _trinity_settings(config: GPTConfig) -> dict[str, Any]:
    if (rotates := config.rotary_layers or (True,) * config.num_layers) != config.windows:
        raise MisfitError("rotary_layers", f"expected a Trinity, whose layers rotate with a window, got {rotates}")
    if config.embedding_scale not in (None, width := config.d_model**0.5):
        raise MisfitError(
            "embedding_scale", f"expected a Trinity, with no embedding_scale or {width}, got {config.embedding_scale}"
        )
    return {"mup_enabled": config.embedding_scale is not None, **TRINITY_EXPERTS.settings(config)}


def _rename_trinity(names: Names, config: GPTConfig) -> Names:
    for layer in range(config.num_layers):
        names[f"decoder.layers.{layer}.self_attn.gate_proj.weight"] = (f"layers.{layer}.self_attn.gate_proj.weight",)
    return TRINITY_EXPERTS.names(names, config)


def _variant(kind: str, name: str, experts: Experts, **options: Any) -> Variant:
    return Variant(
        kind,
        name,
        more=experts.options,
        more_settings=experts.settings,
        free=experts.free,
        rename=experts.names,
        open=experts.opened,
        **options,
    )


_QWEN = {
    "num_experts_per_tok": 8, "moe_intermediate_size": 768, "num_key_value_heads": 4, "sliding_window": 4096,
    "max_window_layers": 28, "router_aux_loss_coef": 0.001,
}  # fmt: skip
SHARED = ("shared_expert", "shared_expert_gate", "shared_expert_intermediate_size")
VARIANTS = (
    _granite_moe(),
    _gpt_oss(),
    Variant(
        "glm4_moe",
        "GLM-4.5",
        usual={
            "num_key_value_heads": 8, "rms_norm_eps": 1e-5, "moe_intermediate_size": 1408, "num_experts_per_tok": 8,
            "n_shared_experts": 1, "first_k_dense_replace": 1, "routed_scaling_factor": 1.0, "norm_topk_prob": True,
        },
        fixed={"norm": "rms", **_SIGMOIDS},
        biases=("attention_bias", False, False),
        partial=True,
        fraction=0.5,
        more=_glm,
        more_settings=_glm_settings,
        free=(*GLM_EXPERTS.free, "qk_norm"),
        rename=_rename_glm,
        open=_opened_glm,
    ),
    Variant(
        "afmoe",
        "Trinity",
        modules={
            **MODULES, **QK_NORMS, "post_norm1": ("post_attention_layernorm",), "norm2": ("pre_mlp_layernorm",),
            "post_norm2": ("post_mlp_layernorm",),
        },
        usual={
            "head_dim": 128, "rms_norm_eps": 1e-5, "moe_intermediate_size": 1408, "num_experts_per_tok": 6,
            "num_dense_layers": 1, "num_shared_experts": 2, "route_scale": 1.0, "sliding_window": 1024,
        },
        fixed={"norm": "rms", "norm_placement": "both", "qk_norm": "head", "attention_gate": True, **_SIGMOIDS},
        layer_types=_trinity_types,
        more=_trinity,
        more_settings=_trinity_settings,
        free=(*TRINITY_EXPERTS.free, "rotary_layers", "embedding_scale"),
        rename=_rename_trinity,
        open=TRINITY_EXPERTS.opened,
    ),
    _variant(
        "mixtral",
        "Mixtral",
        Experts("block_sparse_moe", "gate", ("w1", "w3", "w2"), "num_local_experts", 8, True),
        usual={
            "num_key_value_heads": 8, "rms_norm_eps": 1e-5, "num_experts_per_tok": 2,
            "router_aux_loss_coef": 0.001,
        },
        layer_types=everywhere,
        has_layer_types=False,
        base=1e6,
    ),
    _variant(
        "olmoe",
        "OLMoE",
        Experts(),
        usual={"rms_norm_eps": 1e-5, "num_experts_per_tok": 8, "router_aux_loss_coef": 0.01},
        modules={**MODULES, **QK_NORMS},
        fixed={"norm": "rms", "qk_norm": "all"},
        biases=("attention_bias", "attention_bias", False),
        own_heads=False,
    ),
    _variant(
        "qwen2_moe",
        "Qwen2-MoE",
        Experts(usual_count=60, d_ff="moe_intermediate_size", shared=SHARED, may_be_dense=True),
        usual={
            **_QWEN, "num_key_value_heads": 16, "num_experts_per_tok": 4,
            "moe_intermediate_size": 1408, "shared_expert_intermediate_size": 5632, "qkv_bias": True,
        },
        biases=("qkv_bias", False, False),
        layer_types=_every_other,
    ),
    _variant(
        "qwen3_moe",
        "Qwen3-MoE",
        Experts(usual_count=128, d_ff="moe_intermediate_size", may_be_dense=True),
        usual=_QWEN,
        modules={**MODULES, **QK_NORMS},
        fixed={"norm": "rms", "qk_norm": "head"},
        biases=("attention_bias", "attention_bias", False),
        layer_types=_if_used,
        has_layer_types=False,
    ),
)  # fmt: skip
FORMS = {variant.kind: variant.form for variant in VARIANTS}
