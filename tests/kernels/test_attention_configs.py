"""Tests the choice of tiles for attention kernels, and what reaches a launch."""

from __future__ import annotations

from itertools import product

import pytest
import torch

pytest.importorskip("triton")

from fastformer.kernels import _attention_configs as configs  # noqa: E402
from fastformer.kernels import attention as kernels  # noqa: E402
from fastformer.kernels._attention_configs import Config, ConfigKey, Row, call_of  # noqa: E402

PLAIN, MASKED, DROPOUT, BOTH = (Config(size, size, 4, 1) for size in (16, 32, 64, 128))


def problem_of(
    dropout_p: float = 0.0, head_dim: int = 64, seqlen: int = 300, left: int | None = None, right: int | None = None,
    softcap: float = 0.0,
):  # fmt: skip
    q = torch.zeros(1, seqlen, 2, head_dim)
    seed = torch.tensor([1, 2]) if dropout_p else None
    return kernels.describe_dense(q, q, None, 0.1, left, right, dropout_p, seed, softcap)


@pytest.mark.parametrize(
    "row, chosen",
    [
        (Row(PLAIN), (PLAIN, PLAIN, PLAIN, PLAIN)),
        (Row(PLAIN, MASKED), (PLAIN, MASKED, PLAIN, PLAIN)),
        (Row(PLAIN, dropout=DROPOUT), (PLAIN, PLAIN, DROPOUT, DROPOUT)),
        (Row(PLAIN, MASKED, DROPOUT, BOTH), (PLAIN, MASKED, DROPOUT, BOTH)),
    ],
)
def test_a_mask_and_dropout_choose_separately(row, chosen, monkeypatch) -> None:
    monkeypatch.setattr(configs, "FORWARD", {(90, 64): row})
    for (dropout, masked), config in zip(product((False, True), repeat=2), chosen, strict=True):
        call = call_of(90, problem_of(0.1 if dropout else 0.0), torch.bfloat16, "bool" if masked else "bool_keys")
        assert (call.masked, call.dropout) == (masked, dropout)
        assert configs.forward_config.__wrapped__(call) == config


def test_every_call_has_a_tile() -> None:
    """This includes every architecture, head_dim, dtype and option; fp32 never uses a 16-bit tile."""
    choosers = (configs.forward_config, configs.backward_config, configs.choose_dq_config)
    yes_or_no = (False, True)
    for call in map(
        ConfigKey._make,
        product(
            (80, 86, 89, 90, 100, 103, 120, 121), yes_or_no, (16, 32, 64, 128, 256), yes_or_no, yes_or_no, yes_or_no,
            ("short", "long"), yes_or_no, yes_or_no,
        ),
    ):  # fmt: skip
        if not call.is_fp32 or call.block_d <= configs.LARGEST_FP32_HEAD_DIM:
            for choose in choosers:
                config = choose(call)
                assert config.block_m >= 16 and config.block_n >= 16 and (call.is_fp32 or not config.exact)
