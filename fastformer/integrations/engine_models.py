"""Finds the models of transformers that an engine can run: the C++ engine on a CPU, captured steps on a GPU.

On a CPU their weights are packed for the engine. On a GPU they are copied into a model of this library, whose steps the
engine "graph" captures.

A model must be of a class in the table of `checkpoints.hf`, and must still be the model that its config makes
(`as_made`).
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, NamedTuple, TypeVar, cast
from weakref import ref

import torch
import transformers
from torch import nn

from fastformer.checkpoints.hf import FAMILIES, bart, why_unsupported
from fastformer.checkpoints.hf.rope import beyond_original, original_length
from fastformer.encoding.engine import PackedEncoder
from fastformer.encoding.source_engine import encoder_of
from fastformer.engine.as_made import PRECISIONS
from fastformer.engine.checks import examine_again, why_not_now
from fastformer.engine.frozen import (
    ModelGuards,
    UnfitError,
    forget_setting,
    notes_of,
    packed,
    packed_before,
    refusal,
    repack,
    setting_of,
    settings_to_change,
)
from fastformer.generation.engines import graph, rounded_for_steps
from fastformer.generation.engines.cpp import CppEngine, pack
from fastformer.generation.engines.cpp_support import why_no_cpp_engine, why_not_in
from fastformer.generation.engines.graph import GraphEngine
from fastformer.generation.model_protocols import device_of
from fastformer.integrations.as_made import guards_of, tables_of, why_not_as_made
from fastformer.integrations.conversion import convert, from_huggingface, settings_of
from fastformer.integrations.replace import forget_restored_forwards, original_class
from fastformer.models import GPT, Transformer
from fastformer.models.quantization import QUANTIZED

# The max_len of a model whose positions have no limit: the engine counts tokens in 32 bits.
NO_END = 2**20
Weights = TypeVar("Weights")


@dataclass(frozen=True)
class Setting:
    """The options of `accelerate` for a model on the engine.

    Attributes:
        precision: the engine's precision; None: the model's, or autocast's if it is on.
    """

    precision: str | None = None


class PackedWeights(NamedTuple):
    """A model's weights as the engine reads them.

    Attributes:
        weights: a `PackedModel` of the extension; None on a GPU.
        shape: the converted model, with its weights on a GPU; on a CPU on "meta", so without those that were packed.
        encoder: the engine's encoder, which reads the same weights; None: the model has no encoder.
    """

    weights: object
    shape: Transformer | GPT
    encoder: PackedEncoder | None


class FoundModel(Generic[Weights]):
    """The findings about one model, and its packed weights.

    Args:
        model: a model that is as its config makes it.
        guards: hold as long as that is so.

    Attributes:
        guards: see above.
        device: the device of the parameters.
        precision: the precision of the parameters.
        trains: whether a module inside of the model is in training mode, apart from linear maps and embeddings, whose
            results don't depend on the mode.
        is_evaluating: whether the model and all modules inside of it are in evaluation mode.
    """

    def __init__(self, model: nn.Module, guards: ModelGuards) -> None:
        first = next(model.parameters())
        self.guards, self.device, self.precision = guards, first.device, PRECISIONS[first.dtype]
        # The forward of the model looks at its own mode.
        training = [module for module in model.modules() if module.training]
        self.is_evaluating = not training
        self.trains = any(not (module is model or isinstance(module, nn.Linear | nn.Embedding)) for module in training)
        # The conversion makes these tables from the config, so it would miss a change of a table in place.
        self._tables = [(table, table.clone()) for table in tables_of(model)]

    def acting_precision(self, setting: Setting) -> str:
        """Returns the precision of a call.

        Raises:
            UnfitError: the engine lacks the dtype of autocast, or captures steps, which can't contain autocast's casts.
        """
        if has_graphs(self.device):
            if torch.is_autocast_enabled(self.device.type):
                raise UnfitError("autocast is on, and a graph can't contain its copies of the weights")
            return setting.precision or self.precision
        if setting.precision is not None or not torch.is_autocast_enabled("cpu"):
            return setting.precision or self.precision
        if (dtype := torch.get_autocast_dtype("cpu")) != torch.bfloat16:
            raise UnfitError(f"the engine has no autocast to {dtype}")
        return "bf16"

    def weights(self, model: nn.Module, precision: str) -> Weights:
        """Returns the packed weights in a precision, with the model's current values.

        Raises:
            UnfitError: the weights or the config don't convert, or the engine lacks an option of the model.
        """
        owner = ref(model)

        def make() -> Weights:
            alive = owner()
            assert alive is not None
            # Tensors of inference mode have no version counter, by which the engine notices that it has to pack again.
            with torch.inference_mode(False), torch.no_grad(), torch.autocast("cpu", enabled=False):
                if not all(torch.equal(table, before) for table, before in self._tables):
                    raise UnfitError("the values of one of its buffers contradict its config")
                try:
                    converted = self.convert(alive)
                except ValueError as error:
                    raise UnfitError(str(error)) from error
                return self.pack(alive, converted, precision)

        return packed(model, self.place(precision), make, find=lambda _: self.guards.tensors)

    def weights_before(self, model: nn.Module, precision: str) -> Weights | None:
        """Returns the packed weights if they exist and still have the model's current values; else None."""
        found = packed_before(model, self.place(precision), find=lambda _: self.guards.tensors)
        return cast(Weights | None, found)

    @classmethod
    def place(cls, precision: str) -> str:
        """Returns the name under which `engine.frozen` stores the packed weights of a precision."""
        return f"{cls.name} {precision}"

    # The part of the packed weights' name that isn't the precision.
    name = "engine"

    def convert(self, model: nn.Module) -> Any:
        """Returns a model of this library that computes the same as transformers' model.

        Raises:
            ValueError: this library has no equivalent of the model.
        """
        return from_huggingface(model).eval()

    def pack(self, model: nn.Module, converted: Any, precision: str) -> Weights:
        """Packs the weights of a model that was converted.

        Raises:
            UnfitError: see `weights`.
        """
        raise NotImplementedError


class EngineModel(FoundModel[PackedWeights]):
    """A model that the engine can decode, with its packed weights.

    Args:
        model, guards: see `FoundModel`.

    Attributes:
        original_length: the length of a sequence beyond which "longrope" turns all of its tokens by other angles; None:
            no length.
    """

    def __init__(self, model: nn.Module, guards: ModelGuards) -> None:
        super().__init__(model, guards)
        try:
            self.original_length = original_length(settings_of(model))
        except ValueError:  # which the conversion reports
            self.original_length = None
        self._beyond = None if self.original_length is None else _BeyondOriginal(model, guards)

    def engine(self, model: nn.Module, precision: str) -> ForeignEngine | ForeignGraphEngine:
        """Returns the engine of the model's device over its current weights.

        Raises:
            UnfitError: see `weights`; or a GPU has no room for a copy of the weights at this moment.
        """
        found = self.weights_before(model, precision) if has_graphs(self.device) else None
        if has_graphs(self.device) and found is None:
            size, free = sum({id(one): one.nbytes for one in self.guards.tensors}.values()), free_bytes(self.device)
            size *= 2 if precision in QUANTIZED else 1  # for a moment, before and after rounding
            if size > free // 2:  # the rest is for keys and values
                raise UnfitError(f"a copy that takes {size >> 20} MiB is more than half of {free >> 20} MiB free")
        found = found or self.weights(model, precision)
        return ForeignEngine(found, precision) if found.weights is not None else ForeignGraphEngine(found.shape)

    def of_length(self, length: int) -> EngineModel:
        """Returns the weights for prompts whose longest one has this length.

        transformers rotates all tokens of a batch by the angles of the longest sequence.
        """
        return self if self._beyond is None or length <= cast(int, self.original_length) else self._beyond

    def pack(self, model: nn.Module, converted: Any, precision: str) -> PackedWeights:
        """See `FoundModel`."""
        on_gpu = has_graphs(self.device)
        if on_gpu:
            converted = rounded_for_steps(converted, precision)
        reason = why_not_now() or (
            GraphEngine.why_unsupported(converted, precision) if on_gpu else why_not_in(precision, converted)
        )
        if reason is not None:
            raise UnfitError(reason)
        if isinstance(converted, GPT) and converted.config.window_size == 0:
            raise UnfitError("transformers' cache keeps all tokens for layers with a sliding_window of 1")
        if on_gpu:
            return PackedWeights(None, converted, None)
        if not isinstance(converted, GPT) and converted.config.positions == "relative":
            converted.config.max_len = NO_END  # their positions have no limit
        weights = pack(converted, precision)
        encoder = None if isinstance(converted, GPT) else encoder_of(weights)
        return PackedWeights(weights, converted.to("meta"), encoder)


class _BeyondOriginal(EngineModel):
    """A model with "longrope" whose sequences are longer than originally from the prompt on: a second packed copy."""

    name = "engine beyond the original length"

    def __init__(self, model: nn.Module, guards: ModelGuards) -> None:
        FoundModel.__init__(self, model, guards)

    def convert(self, model: nn.Module) -> Any:
        """See `FoundModel`."""
        return convert(model, beyond_original).eval()


class ForeignEngine(CppEngine):
    """The C++ engine over the packed weights of transformers' model, without a reference to the model.

    Args:
        packed: the weights. After they have changed, the caller makes another engine.
        precision: the precision of the weights.

    Attributes:
        shape: the model from which they were packed, without its weights.
    """

    def __init__(self, packed: PackedWeights, precision: str) -> None:
        self._weights, self.shape = packed.weights, packed.shape
        super().__init__(self.shape, precision)

    def prepacked(self, *, may_be_old: bool = False) -> object:
        """See `CppEngine`."""
        return self._weights


class ForeignGraphEngine(GraphEngine):
    """The engine "graph" over a converted model of transformers.

    Attributes:
        shape: the converted model.
    """

    @property
    def shape(self) -> Transformer | GPT:
        """See above."""
        assert isinstance(self.model, Transformer | GPT)
        return self.model


Found = TypeVar("Found", bound=FoundModel[Any])


class FoundModels(Generic[Found]):
    """A lookup of the findings about models, which are valid as long as their guards hold.

    Args:
        name: the name of the findings, and of the `Setting`, in each model's `Notes`.
        kind: (model, guards) -> the findings.
        find: (model) -> why the engine's results would differ from those of the model's modules, or None.
    """

    def __init__(self, name: str, kind: Callable[[Any, Any], Found], find: Callable[[Any], str | None]) -> None:
        self._name, self._kind, self._find = name, kind, find

    def decide(self, model: nn.Module, precision: str | None, *, wanted: bool) -> None:
        """Gives a model its setting, or drops its setting and its packed weights.

        Args:
            model: a model that the engine may run.
            precision: a known precision of `accelerate`; None leaves that of an earlier call.
            wanted: whether the model runs on the engine at all.
        """
        if not wanted:
            self.forget(model)
        elif precision is not None or self.setting(model) is None:
            settings_to_change(model)[self._name] = Setting(precision)

    def setting(self, model: nn.Module) -> Setting | None:
        """Returns the setting of a model; None: it has none, and doesn't run on the engine."""
        return cast("Setting | None", setting_of(model, self._name))

    def described(self, model: nn.Module) -> tuple[str, str | None]:
        """Returns the precision of a model on the engine, and why it doesn't run there; None if it does."""
        if (setting := self.setting(model)) is None:
            return "", "you asked for it"
        plan = self.of(model)
        if isinstance(plan, str):
            return "", plan
        precision = setting.precision or plan.precision
        return precision, refusal(model, plan.place(precision))

    def of(self, model: nn.Module) -> Found | str:
        """Returns the findings about a model in its current state, or the reason why the engine can't run it."""
        findings = notes_of(model).findings
        plan: tuple[Found | str, ModelGuards] | None = findings.get(self._name)
        if plan is None or not plan[1].hold(model):
            forget_restored_forwards(model.modules())
            examine_again()
            reason = self._find(model)
            guards = guards_of(model)
            plan = findings[self._name] = (self._kind(model, guards) if reason is None else reason, guards)
        return plan[0]

    def is_evaluating(self, model: nn.Module) -> bool:
        """Returns True if known findings say that a model and all modules inside of it are in evaluation."""
        plan: tuple[Found | str, ModelGuards] | None = notes_of(model).findings.get(self._name)
        return plan is not None and not isinstance(plan[0], str) and plan[0].is_evaluating and plan[1].hold(model)

    def forget(self, model: nn.Module) -> None:
        """Drops the setting of a model, if it has one, and then the findings about it and its packed weights."""
        if forget_setting(model, self._name) is not None:
            repack(model)


def _why_not(model: Any) -> str | None:
    """Returns why the engine's decoding would differ from that of a model's modules; None if it would not."""
    device = device_of(model)
    if not has_graphs(device) and (missing := why_no_cpp_engine()) is not None:
        return f"there is no C++ engine: {missing}"
    kind, model_type = original_class(model), getattr(getattr(model, "config", None), "model_type", None)
    if not is_convertible(kind) or model_type != model_type_of(kind):
        return why_not_converted(model)
    return why_not_as_made(model, device=device if has_graphs(device) else "cpu")


def has_graphs(device: torch.device) -> bool:
    """Returns whether `generate` of models on a device runs on captured steps."""
    return device.type in graph.DEVICES


def free_bytes(device: torch.device) -> int:
    """Returns the free memory of a device with graphs."""
    return torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else sys.maxsize


def why_not_converted(model: Any) -> str:
    """Returns the reason why a model of transformers of an unknown class doesn't run on the engine."""
    reason = why_unsupported(model.config.to_dict())
    lacks = "" if reason is None else f": {reason}"
    return f"{original_class(model).__name__} is not a class that from_huggingface converts{lacks}"


ENGINE_MODELS = FoundModels("engine", EngineModel, _why_not)


def counts_words(model: Any) -> bool:
    """Returns whether a model's positions count the ids that are not PAD, regardless of the mask."""
    form = bart.FORMS.get(model.config.model_type)
    return form is not None and form.behind_pad


def is_convertible(kind: type) -> bool:
    """Returns whether a class of transformers is in the table of `checkpoints.hf`."""
    family = FAMILIES.get(model_type_of(kind) or "")
    return family is not None and family.generates and kind is getattr(transformers, family.model_class, None)


def model_type_of(kind: type) -> str | None:
    """Returns the model_type of a class of transformers."""
    return getattr(getattr(kind, "config_class", None), "model_type", None)
