"""The baseline is the paper's model, and the fast model agrees with it; the LSTM follows its formulas."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from fastformer.baseline import LSTMSeq2Seq, Transformer
from fastformer.baseline.lstm import Attention
from fastformer.models import Transformer as FastTransformer
from fastformer.special_ids import SpecialIds

SIZES = {"d_model": 32, "d_ff": 64, "num_heads": 4, "num_encoder_layers": 2, "num_decoder_layers": 2}
NO_DROPOUT = {"dropout": 0.0, "attention_dropout": 0.0, "activation_dropout": 0.0}


def ids(pad: int = 0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    source, target = torch.randint(6, 30, (3, 9)), torch.randint(6, 30, (3, 7))
    source[0, 5:] = pad
    target_out = target.roll(-1, 1)
    target_out[0, 4:] = -100
    return source, target, target_out


@pytest.mark.parametrize(
    ("preset", "norm_first", "interleaved", "special"),
    [("tiny", True, False, {}), ("base-paper", False, True, {"pad": 3, "eos": 4, "start": 5})],
)
def test_equals_the_fast_model(preset, norm_first, interleaved, special) -> None:
    sizes = {"vocab_size": 30, "special_ids": SpecialIds(**special), **SIZES, **NO_DROPOUT}
    fast = FastTransformer.from_preset(preset, dtype=torch.float64, **sizes)
    options = {"norm_first": norm_first, "interleaved": interleaved, **special, **NO_DROPOUT}
    plain = Transformer(30, 32, 64, 4, 2, **options).double()
    assert not plain.load_state_dict(fast.state_dict()).missing_keys
    source, target, target_out = ids(special.get("pad", 0))
    assert (fast(source, target) - plain(source, target)).abs().max() < 1e-10
    for smoothing in (0.0, 0.1):
        losses = [m.loss(source, target, target_out, label_smoothing=smoothing) for m in (fast, plain)]
        assert abs((losses[0] - losses[1]).item()) < 1e-4  # the plain loss is computed in fp32
    gradients = [torch.autograd.grad(m(source, target).square().mean(), list(m.parameters())) for m in (fast, plain)]
    names = [[name for name, _ in m.named_parameters()] for m in (fast, plain)]
    found = [dict(zip(n, g, strict=True)) for n, g in zip(names, gradients, strict=True)]
    assert found[0].keys() == found[1].keys()
    for name in found[0]:
        assert (found[0][name] - found[1][name]).abs().max() < 1e-10, name


def test_the_baselines_greedy_output_equals_the_fast_models() -> None:
    from fastformer.generation import generate

    fast = FastTransformer.from_preset("tiny", vocab_size=30, **{**SIZES, **NO_DROPOUT}).eval()
    plain = Transformer(30, 32, 64, 4, 2, **NO_DROPOUT).eval()
    plain.load_state_dict(fast.state_dict())
    source, _, _ = ids()
    ours, theirs = generate(fast, source, max_new_tokens=12), plain.greedy(source, 12)
    assert torch.equal(ours, theirs)


@pytest.mark.parametrize("kind", ["transformer", "lstm"])
def test_greedy_begins_with_start_and_stops_at_any_eos(kind) -> None:
    script = torch.tensor([[12, 0, 1, 7], [7, 11, 11, 11], [11, 9, 11, 11]])
    special: dict[str, Any] = {"pad": 3, "eos": (7, 9), "start": 5}
    fed: list[list[int]] = []

    def scripted(tokens: torch.Tensor) -> torch.Tensor:
        fed.append(tokens[:, -1].tolist())
        return torch.nn.functional.one_hot(script[:, len(fed) - 1 : len(fed)], 16).float()

    model: Any
    if kind == "lstm":
        model = LSTMSeq2Seq(vocab_size=16, d_model=16, **special)
        model.decode = lambda target, memory, mask, state: (scripted(target), None, state)
        model.output = torch.nn.Identity()
    else:
        model = Transformer(16, 16, 24, 2, 1, **special)
        model.forward = lambda source, target: scripted(target)
    found = model.greedy(torch.full((3, 2), 11), 9)
    assert found.tolist() == [[12, 0, 1, 7], [7, 3, 3, 3], [11, 9, 3, 3]]
    assert fed == [[5, 5, 5], [12, 7, 11], [0, 3, 9], [1, 3, 3]]


def test_impossible_ids_of_an_lstm() -> None:
    for special, said in (
        ({"pad": 12}, r"\bvocab_size 12\b.*\bpad 12"),
        ({"pad": -1}, "pad -1"),
        ({"eos": ()}, r"\beos \(\)"),
        ({"eos": (1, 12)}, r"eos \(1, 12\)"),
        ({"eos": None}, r"eos \(None,\)"),
        ({"start": True}, "start True"),
        ({"unk": -2}, r"\bunk\b.*-2"),
        ({"eos": (1, 0)}, r"\bpad 0\b.*\beos \(1, 0\)"),
        ({"eos": (1, 1)}, r"\beos \(1, 1\)"),
        ({"unk": 1}, r"\bunk 1\b"),
    ):
        with pytest.raises(ValueError, match=said):
            LSTMSeq2Seq(vocab_size=12, d_model=8, **special)
    assert LSTMSeq2Seq(vocab_size=12, d_model=8, eos=3).config.eos == (3,)
    with pytest.raises(ValueError, match=r"\bPAD \(id 3\)"):
        LSTMSeq2Seq(vocab_size=12, d_model=8, pad=3).encode(torch.tensor([[3, 4]]))


@pytest.mark.parametrize("score", ["dot", "general", "concat"])
def test_score_functions(score) -> None:
    attention = Attention(6, score).double()
    query, keys = torch.randn(1, 2, 6, dtype=torch.float64), torch.randn(1, 3, 6, dtype=torch.float64)
    mask = torch.tensor([[[True, True, False]]])
    expected = torch.full((2, 3), -torch.inf, dtype=torch.float64)
    for i in range(2):
        for j in range(2):
            q, k = query[0, i], keys[0, j]
            if score == "dot":
                expected[i, j] = q @ k
            elif score == "general":
                expected[i, j] = q @ attention.weight.weight @ k
            else:
                both = torch.cat((attention.query.weight, attention.key.weight), 1) @ torch.cat((q, k))
                expected[i, j] = attention.vector.weight[0] @ both.tanh()
    context, weights = attention(query, keys, mask)
    assert (weights[0] - expected.softmax(-1)).abs().max() < 1e-12
    assert (context[0] - expected.softmax(-1) @ keys[0]).abs().max() < 1e-12


@pytest.mark.parametrize("score", ["dot", "general", "concat"])
def test_lstm_ignores_padding_and_learns(score) -> None:
    torch.manual_seed(0)
    model = LSTMSeq2Seq(vocab_size=12, d_model=32, score=score)
    source = torch.randint(3, 12, (64, 5))
    source[:, 4] = 1
    shorter = torch.nn.functional.pad(source, (0, 3))
    target_in = torch.nn.functional.pad(source[:, :-1], (1, 0))
    with torch.no_grad():
        assert (model(source, target_in)[0] - model(shorter, target_in)[0]).abs().max() < 1e-5
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    for _ in range(80):
        loss = model.loss(source, target_in, source, reduction="mean")
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    assert float(loss) < 0.3
    copied = model.greedy(source, 8)
    assert (copied[:, :5] == source).all(1).float().mean() > 0.8


def test_lstm_smoothing_and_errors() -> None:
    model = LSTMSeq2Seq(vocab_size=12, d_model=8)
    source = torch.randint(3, 12, (2, 4))
    with pytest.raises(ValueError, match="padded batch"):
        model.loss(source.flatten(), source.flatten(), source.flatten())
    logits = model(source, source)[0].flatten(0, 1).log_softmax(-1)
    target = source.flatten()
    others = (logits.sum(1) - logits.gather(1, target[:, None])[:, 0]) / 11
    expected = -(0.9 * logits.gather(1, target[:, None])[:, 0] + 0.1 * others).sum()
    found = model.loss(source, source, source, label_smoothing=0.1, smooth_others=True)
    assert abs(float(found) - float(expected)) < 1e-4
    with pytest.raises(ValueError, match=r"\bscore\b"):
        LSTMSeq2Seq(vocab_size=12, score="cosine")
