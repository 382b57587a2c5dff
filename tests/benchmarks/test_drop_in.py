"""The benchmark of models that somebody else wrote."""

from __future__ import annotations

import json

import pytest
import torch
from torch import nn

import fastformer
from benchmarks import drop_in


def job(learns: bool) -> drop_in.Job:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(16, 2, 32, 0.0, batch_first=True)
    model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    x, keep = torch.randn(3, 6, 16), torch.arange(6) < torch.tensor([[6], [2], [4]])
    call = lambda m: m(x, src_key_padding_mask=~keep)  # noqa: E731
    if learns:
        return drop_in.training(model, lambda m: call(m)[keep][:, :4].sum(1).square().mean(), keep)
    return drop_in.forward(model, call, keep, ())


@pytest.mark.parametrize("learns", [False, True])
def test_a_case_is_checked_and_timed(learns, monkeypatch):
    made = job(learns)
    assert made.padding == pytest.approx(1 / 3)
    timings = drop_in.run_case(made, torch.float32, 3, compiled=False)
    assert list(timings) == ["as it is", "accelerated"] and all(t.p50 > 0 for t in timings.values())
    assert all(p.grad is None for p in made.model.parameters())

    def wrong(model: nn.Module) -> None:
        with torch.no_grad():
            next(model.parameters()).mul_(3)

    monkeypatch.setattr(fastformer, "accelerate", wrong)
    with pytest.raises(ValueError, match="accelerated gives something else: a relative error"):
        drop_in.run_case(job(learns), torch.float32, 3, compiled=False)


def test_lines_are_written(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(drop_in, "CASES", {"tiny": [({"seqlen": 6}, lambda dtype: job(False))] * 2})
    out = tmp_path / "lines.jsonl"
    assert drop_in.main(["--case", "tiny", "--quick", "--rounds", "3", "--out", str(out)]) == 0
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert [row["provider"] for row in rows] == ["as it is", "accelerated"]
    assert rows[0]["speedup"] == 1.0 and rows[1]["padding"] == 0.333
    assert "33 % padding" in capsys.readouterr().out
