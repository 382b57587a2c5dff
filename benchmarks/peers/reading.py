"""The floor of decoding at batch 1: a step takes at least as long as reading all weights of the decoder.

torch.sum adds the bytes, as int64 and as fp64: two passes that load a full vector register and add it in each
instruction, independently of the engine; the faster one counts.
"""

from __future__ import annotations

import timeit

import torch

from benchmarks.peers.job import JobResult, Model, Peer, PeerJob
from fastformer.models import GPT

DRAM = 256 * 2**20  # bytes: more than any cache
_BITS = {"int4": 4.5, "int8": 8, "bf16": 16, "fp32": 32}  # int4: with the scales of groups of 32


class MemoryReader(Peer):
    """A peer that reads memory; a job's only batch is [[number of bytes]]."""

    name = "read"
    precisions = ("fp32",)
    order = PeerJob

    def __init__(self, model: Model, precision: str, threads: int, options: dict[str, str]) -> None:
        torch.set_num_threads(threads)

    def turn(self, job: PeerJob) -> JobResult:
        """Returns the seconds of one pass: the best of several, since this is a floor."""
        ((count,),) = job.batches[0]
        views = [torch.ones(count // 8, dtype=dtype) for dtype in (torch.int64, torch.float64)]
        return JobResult(min(min(timeit.repeat(view.sum, number=1, repeat=6)) for view in views), None)


def bytes_per_step(model: Model, precision: str) -> int:
    """Returns the bytes of weights that a decode step reads: its matrices and the output projection, once each.

    The keys and values of cross-attention are computed once a source: their matrices don't count. Of experts those of
    one token count.
    """
    count = model.output_weight.numel()
    for layer in model.decoder.layers:
        count += sum(p.numel() for p in layer.parameters() if p.dim() == 2)
        if (mixture := layer._modules.get("mixture")) is not None:
            all_experts = mixture.linear1.weight.numel() + mixture.linear2.weight.numel()
            count -= all_experts * (mixture.num_experts - mixture.num_experts_per_tok) // mixture.num_experts
        if not isinstance(model, GPT):
            cross = layer.multihead_attn
            count -= cross.in_proj_weight[cross.embed_dim :].numel()
    return int(count * _BITS[precision] / 8)
