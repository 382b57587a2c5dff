"""Recognises modules that compute each position of their input by itself, so that other positions may be omitted."""

from __future__ import annotations

from typing import cast

from torch import nn

from fastformer.checkpoints.hf import FAMILIES
from fastformer.integrations.replace import is_accelerated, original_class
from fastformer.nn.linear import LINEARS

# Modules of torch.nn that work on one token (the last dimension) or on one number, with any settings.
_BY_TOKEN = frozenset(
    {
        *(nn.Sequential, nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict),
        *(*LINEARS, nn.Identity, nn.Embedding, nn.Dropout, nn.AlphaDropout),
        *(nn.CELU, nn.ELU, nn.GELU, nn.Hardshrink, nn.Hardsigmoid, nn.Hardswish, nn.Hardtanh, nn.LeakyReLU),
        *(nn.LogSigmoid, nn.Mish, nn.RReLU, nn.ReLU, nn.ReLU6, nn.SELU, nn.SiLU, nn.Sigmoid, nn.Softplus),
        *(nn.Softshrink, nn.Softsign, nn.Tanh, nn.Tanhshrink, nn.Threshold),
    }
)
# The modules of transformers whose classes are known.
_SOURCES = frozenset(
    {"transformers.activations", "transformers.pytorch_utils", *(each.source(kind) for kind, each in FAMILIES.items())}
)
# Parts of heads and poolers that read one position at a time, or the first one, by the endings of their names.
_PARTS = (
    *("Pooler", "LMHead", "ClassificationHead", "DiscriminatorPredictions", "GeneratorPredictions", "PredictionHead"),
    *("BertOnlyNSPHead", "BertOnlyMLMHead", "BertPreTrainingHeads", "BertPredictionHeadTransform"),
)


def is_positionwise(module: nn.Module) -> bool:
    """Returns whether a module inside of a stack computes each position by itself; its children aren't examined.

    Attentions of known classes count as positionwise: they get the layout of a packed batch.
    """
    kind = original_class(module) if type(module).__module__.startswith("fastformer.") else type(module)
    if kind in (nn.Softmax, nn.Softmin, nn.LogSoftmax, nn.GLU):
        return bool(module.dim == -1)
    if kind in (nn.LayerNorm, nn.RMSNorm):
        return len(cast(nn.LayerNorm, module).normalized_shape) == 1
    if kind is nn.PReLU:  # with several parameters, each position may have its own
        return bool(module.num_parameters == 1)
    if kind.__module__.startswith("torch."):
        return kind in _BY_TOKEN
    return kind.__module__ in _SOURCES or kind.__module__.startswith("peft.tuners.lora.")


def is_positionwise_part(part: nn.Module) -> bool:
    """Returns whether a part of a head reads one position at a time, or the first; its children aren't examined."""
    kind = original_class(part) if is_accelerated(part) else type(part)
    if kind.__module__ == "peft.utils.other":  # its modules hold copies of a part, and call one of them
        return True
    if kind is nn.CrossEntropyLoss:  # of a head whose owner examines the labels of each call
        return True
    is_part = kind.__module__ in _SOURCES and kind.__name__.endswith(_PARTS)
    return is_part or (not kind.__module__.startswith("transformers.models.") and is_positionwise(part))
