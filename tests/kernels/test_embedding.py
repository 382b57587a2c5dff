"""Tests the Triton embedding: column blocks, runs of equal ids across chunks, strides, edge cases."""

from __future__ import annotations

from functools import partial

import pytest
import torch

pytest.importorskip("triton")

from fastformer.kernels import embedding as kernels  # noqa: E402
from fastformer.ops import draw_seed, embedding  # noqa: E402
from tests.checks import assert_op_accurate, keep_mask, saved_for_backward  # noqa: E402
from tests.kernels.test_add_layer_norm import among_nans  # noqa: E402
from tests.ops.test_embedding import compare, make_inputs, plain  # noqa: E402

pytestmark = pytest.mark.usefixtures("on_triton")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_of_several_tiles(dtype: torch.dtype, device: str) -> None:
    """Each tile of columns has its own dropout."""
    compare(make_inputs((2, 2), 5, 2500, device, dtype, table=dtype), scale=50.0, padding_idx=0, dropout_p=0.2)


# Runs of equal ids, in chunks of 4: alone, up to a chunk's end, from its start, over one and over many, to the end.
RUNS = {
    "one": [1],
    "all": [13],
    "within": [2, 1, 1, 3, 1],
    "aligned": [4, 4, 4],
    "across": [3, 2, 6, 1, 4, 3],
    "many chunks": [1, 37, 2, 13, 3],
    "from a start": [4, 9, 3, 8],
    "more chunks than are added at once": [3, 83, 2],
}


@pytest.mark.parametrize("dropout_p", [0.0, 0.3])
@pytest.mark.parametrize("runs", RUNS.values(), ids=RUNS)
def test_runs(runs: list[int], dropout_p: float, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "CHUNK", 4)
    ids = torch.arange(len(runs)).repeat_interleave(torch.tensor(runs))
    ids = ids[torch.randperm(len(ids))].to(device)
    weight = torch.randn(len(runs) + 1, 16, device=device)
    inputs = {"ids": ids, "weight": weight, "position_table": None, "positions": None}
    compare(inputs, scale=3.0, dropout_p=dropout_p)


@pytest.mark.parametrize("positions", [False, True])
def test_positions_across_chunks(positions: bool, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each position occurs once per sequence, so runs are as long as the batch is large."""
    monkeypatch.setattr(kernels, "CHUNK", 4)
    inputs = make_inputs((11, 3), 5, 8, device, table=torch.float32, positions=positions)
    compare(inputs, padding_idx=1)


@pytest.mark.parametrize("positions", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_atomics(dtype: torch.dtype, positions: bool, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """They give the same gradients without a sort; under deterministic algorithms, the sort is used."""
    inputs = make_inputs((5, 9), 7, 40, device, dtype, table=dtype, positions=positions)
    seed = draw_seed(device)
    keep = keep_mask(seed, 0.2, 45, 40)[0].view(5, 9, 40)
    options = {"scale": 3.0, "padding_idx": 2, "dropout_p": 0.2}
    run = partial(embedding, **options, dropout_seed=seed, atomics=True)
    with monkeypatch.context() as patch:
        patch.setattr(kernels, "_sorted", None)
        assert_op_accurate(run, partial(plain, **options, keep=keep), inputs)
    monkeypatch.setattr(kernels, "_sum_by_atomics", None)
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: True)
    assert_op_accurate(run, partial(plain, **options, keep=keep), inputs)


def test_nothing_beyond_the_rows(device: str, guarded: None) -> None:
    """NaN between the rows and the padding id's row are not read; memory around the outputs is not written."""
    weight, table, dout = (torch.randn(rows, 17, device=device) for rows in (5, 6, 12))
    weight[2] = float("nan")
    ids = torch.tensor([[0, 4, 4, 2, 0, 1], [4, 4, 3, 2, 2, 4]], device=device)
    dropout = (0.3, draw_seed(device))
    expected = kernels.embedding_fwd(ids, weight, table, None, 2.0, 2, *dropout, False)
    actual = kernels.embedding_fwd(ids, among_nans(weight), among_nans(table), None, 2.0, 2, *dropout, False)
    assert torch.equal(actual, expected) and actual.isfinite().all()
    gradients = kernels.embedding_bwd(dout, ids, None, 5, 6, 2.0, 2, *dropout, torch.float32, False)
    poisoned = kernels.embedding_bwd(among_nans(dout), ids, None, 5, 6, 2.0, 2, *dropout, torch.float32, False)
    assert all(torch.equal(a, b) and a.isfinite().all() for a, b in zip(poisoned, gradients, strict=True))


def test_saved_for_backward(device: str) -> None:
    """No saved tensor is as large as the output."""
    inputs = make_inputs((3, 7), 5, 16, device, table=torch.float32)
    inputs["weight"].requires_grad_()
    with saved_for_backward() as saved:
        embedding(**inputs, dropout_p=0.1)
    assert sorted(t.numel() for t in saved) == [2, 21]
