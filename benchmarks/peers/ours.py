"""fastformer, through its public function."""

from __future__ import annotations

from typing import ClassVar, cast

import torch
from torch import Tensor

from benchmarks.peers.job import PRECISIONS, DecodingPeer, Missing, Model, PeerJob, Tokens, until_end
from fastformer.generation import generate
from fastformer.generation.config import Precision
from fastformer.generation.engines import choose_engine
from fastformer.models import GPT


class Ours(DecodingPeer):
    """`fastformer.generate` with the engine that it chooses."""

    name = "fastformer"
    precisions: ClassVar[tuple[str, ...]] = PRECISIONS

    def __init__(self, model: Model, precision: str, threads: int, options: dict[str, str]) -> None:
        torch.set_num_threads(threads)
        self.model, self.precision = model, cast(Precision, precision)
        try:
            choose_engine(model, None, precision)
        except ValueError as error:
            if precision != "bf16":
                raise Missing(str(error)) from error
            self.model = model.to(torch.bfloat16)  # engines that call the modules compute in the weights' dtype

    def decode(self, batch: Tokens, job: PeerJob) -> Tensor:
        tokens = generate(
            self.model, batch, num_beams=job.num_beams, max_new_tokens=job.limit(batch), precision=self.precision
        )
        assert isinstance(tokens, Tensor)
        return tokens

    def tokens(self, output: Tensor, batch: Tokens) -> Tokens:
        width = max(map(len, batch)) if isinstance(self.model, GPT) else 0
        return [until_end(row[width:], self.model.config.special_ids.eos) for row in output.tolist()]
