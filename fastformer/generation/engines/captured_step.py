"""A decode step that is captured as a CUDA graph, and the tensors that it reads and writes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from fastformer.cache.block_pool import Ints
from fastformer.cache.fixed_shape import FixedShapeCache
from fastformer.generation.engines.device_search import DeviceSearch
from fastformer.generation.native_search import SearchRules
from fastformer.generation.search import Sample
from fastformer.graphs import CaptureError, Graph
from fastformer.nn import KVCache
from fastformer.ops import _dispatch

_LEAST_WIDTH = 64  # the least width of a table of tokens


class Shape(NamedTuple):
    """The properties of a step that its graph fixes: all replays of the graph have the same ones.

    Attributes:
        num_groups: the number of groups; each has as many batch slots as the rules have beams.
        width, source_width: the lengths of the longest row and the longest source.
        backend: the backend that the ops are forced to use.
        rules: the rules of the searches, without min_tokens; None: the step has no search, and each row is a group of
            its own. It ends with sampled candidates or with hidden states, from which the host chooses.
        num_candidates: the number of candidates for each batch slot.
        log_probs: whether values are log-probabilities.
        is_edited: whether some ids are forbidden, in this step or in later ones.
        sampling: the temperature, top_k and top_p by which all rows are sampled; None: no row is.
    """

    num_groups: int
    width: int
    source_width: int
    backend: str | None
    rules: SearchRules | None = None
    num_candidates: int = 0
    log_probs: bool = False
    is_edited: bool = False
    sampling: tuple[float, int, float] | None = None

    @classmethod
    def of(cls, cache: KVCache, num_groups: int, length: int, *needs: Any) -> Shape:
        """Returns the shape of a step of some groups of a cache, with rows up to a length.

        Args:
            cache: the cache of the rows.
            num_groups, length: the numbers, which are rounded up.
            needs: the fields from rules on; none if the host chooses the candidates.
        """
        source_width = 0
        if cache.has_memory:
            source_width = min(cache.max_source_seqlen, power_of_two(max(1, cache.longest_source)))
        width = min(cache.max_seqlen, max(_LEAST_WIDTH, power_of_two(length)))
        return cls(bucket(num_groups), width, source_width, _dispatch.forced_backend.get(), *needs)


class CapturedStep:
    """The step of one shape: its tensors, and its graph after the capture.

    Args:
        shape: see `Shape`.
        cache: the cache of the rows.
        spare: see `FixedShapeCache`.
        vocab_size: the size of the model's vocabulary.
        num_steps: the most steps before the host looks at the results.

    Attributes:
        cache, search: the state that a step reads and writes; search is None if the shape has no rules.
        tokens: (slots,) int32, the input of a step.
        uniform: (slots,) fp64, the numbers at which the rows are sampled.
        out: the output of a step without a search, values and ids of candidates, or hidden states (slots, d_model)
            alone; None before the first step.
        graph: the captured graph; None before the capture.
        is_warm: whether a step was taken.
    """

    def __init__(self, shape: Shape, cache: KVCache, spare: Ints, vocab_size: int, num_steps: int) -> None:
        self.shape = shape
        self.graph: Graph | None = None
        self.is_warm = False
        device, rules, groups = cache.k.device, shape.rules, shape.num_groups
        self.search: DeviceSearch | None = None
        self.out: tuple[Tensor, ...] | None = None
        if rules is not None:
            self.search = DeviceSearch(rules, groups, shape.num_candidates, vocab_size, num_steps, device)
            self.tokens = self.search.tokens
        else:
            self.tokens = torch.zeros(groups, dtype=torch.int32, device=device)
            self.uniform = torch.zeros(groups, dtype=torch.float64, device=device)
            self._staged, self._staged_uniform = (
                torch.zeros(groups, dtype=to.dtype, device="cpu", pin_memory=device.type == "cuda")
                for to in (self.tokens, self.uniform)
            )
        beams = 1 if self.search is None else self.search.num_beams
        self.cache = FixedShapeCache(cache, groups, beams, shape.width, shape.source_width, spare)

    def give(self, tokens: Sequence[int], samples: Sequence[Sample] = ()) -> None:
        """Sets the next tokens of the rows and how they are sampled, for a step without a search."""
        self._staged.numpy()[: len(tokens)] = tokens
        self.tokens.copy_(self._staged, non_blocking=True)
        if samples:
            self._staged_uniform.numpy()[: len(samples)] = [one.uniform for one in samples]
            self.uniform.copy_(self._staged_uniform, non_blocking=True)


def power_of_two(number: int) -> int:
    """Returns the smallest power of two that is at least `number`."""
    return 1 << (number - 1).bit_length()


def bucket(count: int) -> int:
    """Rounds a count up to a power of two or, from 16 on, to the middle between two powers of two."""
    whole = power_of_two(count)
    return whole * 3 // 4 if whole >= 32 and count <= whole * 3 // 4 else whole


def rounded(count: int) -> int:
    """Rounds a count up to a number of four binary digits followed by zeros, which is at most an eighth more."""
    step = 1 << max(0, count.bit_length() - 4)
    return -(-count // step) * step


def check_capturable(model: object) -> None:
    """Raises CaptureError if replays would omit something that a call of the model does now."""
    if isinstance(model, nn.Module):
        for name, module in model.named_modules():
            if module._forward_hooks or module._forward_pre_hooks:
                raise CaptureError(f"its {name or 'model'} has a forward hook, which a replay would not call")
    if torch._C._len_torch_dispatch_stack():
        raise CaptureError("a TorchDispatchMode is on, which a replay would not show its operations")
