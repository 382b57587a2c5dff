"""The step that a CUDA graph is captured of, and the tensors that it reads and writes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from fastformer.cache.block_pool import Ints
from fastformer.cache.fixed_shape import FixedShapeCache
from fastformer.generation.engines.device_search import DeviceSearch
from fastformer.generation.native_search import SearchRules
from fastformer.graphs import Graph
from fastformer.nn import KVCache


class Shape(NamedTuple):
    """What a graph is captured for; its replays may differ in nothing else.

    Attributes:
        num_groups: with as many batch slots as the rules have beams.
        width, source_width: the longest row and the longest source.
        backend: that the ops are made to take.
        rules: of the searches, without min_tokens; None: a step whose candidates the host chooses from its hidden
            states, each row being a group of its own.
        num_candidates: of a batch slot.
        log_probs: whether values are log-probabilities.
        is_edited: whether some ids are forbidden, now or in steps to come.
    """

    num_groups: int
    width: int
    source_width: int
    backend: str | None
    rules: SearchRules | None = None
    num_candidates: int = 0
    log_probs: bool = False
    is_edited: bool = False


class CapturedStep:
    """The step of a shape: its tensors, and its graph once it is captured.

    Args:
        shape: see the class.
        cache: of the rows.
        spare: see `FixedShapeCache`.
        vocab_size: of the model.
        num_steps: between two looks, at most.

    Attributes:
        cache, search: what a step reads and writes; search is None where the shape has no rules.
        tokens: (slots,) int32, the input of a step.
        hidden: (slots, d_model), the output of a step without a search; None before the first one.
        graph: None before it is captured.
        is_warm: a step was taken.
    """

    def __init__(self, shape: Shape, cache: KVCache, spare: Ints, vocab_size: int, num_steps: int) -> None:
        self.shape = shape
        self.graph: Graph | None = None
        self.is_warm = False
        device, rules, groups = cache.k.device, shape.rules, shape.num_groups
        self.search: DeviceSearch | None = None
        self.hidden: Tensor | None = None
        if rules is not None:
            self.search = DeviceSearch(rules, groups, shape.num_candidates, vocab_size, num_steps, device)
            self.tokens = self.search.tokens
        else:
            self.tokens = torch.zeros(groups, dtype=torch.int32, device=device)
            self._staged = torch.zeros(groups, dtype=torch.int32, device="cpu", pin_memory=device.type == "cuda")
        beams = 1 if self.search is None else self.search.num_beams
        self.cache = FixedShapeCache(cache, groups, beams, shape.width, shape.source_width, spare)

    def give(self, tokens: Sequence[int]) -> None:
        """Without a search, the next tokens of the rows."""
        self._staged.numpy()[: len(tokens)] = tokens
        self.tokens.copy_(self._staged, non_blocking=True)


def power_of_two(number: int) -> int:
    """The least that is no smaller."""
    return 1 << (number - 1).bit_length()


def bucket(count: int) -> int:
    """A power of two, or from 16 on the middle between two of them."""
    whole = power_of_two(count)
    return whole * 3 // 4 if whole >= 32 and count <= whole * 3 // 4 else whole


def rounded(count: int) -> int:
    """Up to a number of four binary digits and zeros: at most an eighth more."""
    step = 1 << max(0, count.bit_length() - 4)
    return -(-count // step) * step


def why_not_captured(model: object) -> str | None:
    """Why replays would leave out what calls of a model do now; None where they would not."""
    if isinstance(model, nn.Module):
        for name, module in model.named_modules():
            if module._forward_hooks or module._forward_pre_hooks:
                return f"its {name or 'model'} has a forward hook, which a replay would not call"
    if torch._C._len_torch_dispatch_stack():
        return "a TorchDispatchMode is on, which a replay would not show its operations"
    return None
