"""Compares layers and stacks with their torch.nn counterparts; tests the fusion of residual additions."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fastformer.nn as fnn
from fastformer.nn import SequenceLayout
from fastformer.nn.layers import ResidualStream
from fastformer.nn.masks import is_causal_mask
from tests.checks import keep_mask, keep_scale
from tests.nn.comparing import assert_same, banded, compare, padding_mask, randomised

pytestmark = pytest.mark.filterwarnings("ignore:enable_nested_tensor")

N, L, S, E, H, FF = 3, 5, 6, 12, 3, 16
DOUBLE = {"dtype": torch.float64}
SIZES = {"dropout": 0.0, **DOUBLE}
both_orders = pytest.mark.parametrize("norm_first", [False, True], ids=["post-norm", "pre-norm"])
both_layouts = pytest.mark.parametrize("batch_first", [True, False], ids=["batch first", "seqlen first"])
PADDING = padding_mask([5, 3, 2], L)
MEMORY_PADDING = padding_mask([6, 1, 4], S)
# (mask of the sequence, its padding, is_causal)
MASKS = {
    "none": (None, None, False),
    "padding": (None, PADDING, False),
    "causal float": (nn.Transformer.generate_square_subsequent_mask(L, dtype=torch.float64), None, False),
    "causal bool": (banded(L, None, 0), None, False),
    "causal with hint": (nn.Transformer.generate_square_subsequent_mask(L, dtype=torch.float64), None, True),
    "causal and padding": (banded(L, None, 0), PADDING, False),
    "causal with hint and padding": (banded(L, None, 0), PADDING, True),
    "per head and padding": (banded(L, 2, 2).repeat(N * H, 1, 1), PADDING, False),
}


def tensor(seqlen, batch_first):
    return torch.randn(*((N, seqlen) if batch_first else (seqlen, N)), E, **DOUBLE)


def real_positions(padding, batch_first):
    if padding is None:
        return None
    real = ~padding[..., None]
    return real if batch_first else real.transpose(0, 1)


def encoder_kwargs(kind):
    mask, padding, is_causal = MASKS[kind]
    return {"src_key_padding_mask": padding, "is_causal": is_causal}, mask, padding


@both_orders
@both_layouts
@pytest.mark.parametrize("kind", MASKS)
def test_encoder_layer_equals_torch(kind, batch_first, norm_first):
    options, mask, padding = encoder_kwargs(kind)
    args = {"batch_first": batch_first, "norm_first": norm_first, **SIZES}
    ours = fnn.TransformerEncoderLayer(E, H, FF, **args)
    theirs = randomised(nn.TransformerEncoderLayer(E, H, FF, **args))
    compare(
        ours,
        theirs,
        lambda x: ours(x, mask, **options),
        lambda x: theirs(x, mask, **options),
        [tensor(L, batch_first)],
        real_positions(padding, batch_first),
    )


@both_orders
@both_layouts
@pytest.mark.parametrize("kind", MASKS)
def test_encoder_equals_torch(kind, batch_first, norm_first):
    options, mask, padding = encoder_kwargs(kind)
    args = {"batch_first": batch_first, "norm_first": norm_first, **SIZES}
    ours = fnn.TransformerEncoder(fnn.TransformerEncoderLayer(E, H, FF, **args), 3, fnn.AddLayerNorm(E, **DOUBLE))
    theirs = nn.TransformerEncoder(
        nn.TransformerEncoderLayer(E, H, FF, **args), 3, nn.LayerNorm(E, **DOUBLE), enable_nested_tensor=False
    )
    real = real_positions(padding, batch_first)
    run = lambda module: lambda x: module(x, mask, **options)  # noqa: E731
    compare(ours, randomised(theirs), run(ours), run(theirs), [tensor(L, batch_first)], real)
    ours.eval(), theirs.eval()
    with torch.no_grad():
        x = tensor(L, batch_first)
        keep = True if real is None else real
        assert_same(ours(x, mask, **options) * keep, theirs(x, mask, **options) * keep, "evaluation")


def decoder_kwargs(kind):
    mask, padding, is_causal = MASKS[kind]
    return {
        "tgt_mask": mask,
        "tgt_key_padding_mask": padding,
        "tgt_is_causal": is_causal,
        "memory_key_padding_mask": MEMORY_PADDING if padding is not None else None,
        "memory_mask": None if padding is not None else banded(S, 3, 3)[:L],
    }


@both_orders
@both_layouts
@pytest.mark.parametrize("kind", MASKS)
@pytest.mark.parametrize("depth", [0, 2], ids=["layer", "stack"])
def test_decoder_equals_torch(depth, kind, batch_first, norm_first):
    args = {"batch_first": batch_first, "norm_first": norm_first, **SIZES}
    ours: nn.Module = fnn.TransformerDecoderLayer(E, H, FF, **args)
    theirs: nn.Module = nn.TransformerDecoderLayer(E, H, FF, **args)
    if depth:
        ours = fnn.TransformerDecoder(ours, depth, nn.LayerNorm(E, **DOUBLE))
        theirs = nn.TransformerDecoder(theirs, depth, nn.LayerNorm(E, **DOUBLE))
    options = decoder_kwargs(kind)
    compare(
        ours,
        randomised(theirs),
        lambda x, memory: ours(x, memory, **options),
        lambda x, memory: theirs(x, memory, **options),
        [tensor(L, batch_first), tensor(S, batch_first)],
        real_positions(MASKS[kind][1], batch_first),
    )


@both_orders
@both_layouts
@pytest.mark.parametrize("bias", [True, False])
def test_transformer_equals_torch(batch_first, norm_first, bias):
    args = {"batch_first": batch_first, "norm_first": norm_first, "bias": bias, **SIZES}
    ours, theirs = (module.Transformer(E, H, 2, 2, FF, **args) for module in (fnn, nn))
    options = {
        "tgt_mask": ours.generate_square_subsequent_mask(L, dtype=torch.float64),
        "src_key_padding_mask": torch.zeros(N, S, **DOUBLE).masked_fill(MEMORY_PADDING, float("-inf")),
        "memory_key_padding_mask": MEMORY_PADDING,
    }
    run = lambda module: lambda x, y: module(x, y, **options)  # noqa: E731
    compare(ours, randomised(theirs), run(ours), run(theirs), [tensor(S, batch_first), tensor(L, batch_first)])


@both_orders
@pytest.mark.parametrize("kind", ["encoder", "decoder"])
def test_the_norms_have_the_eps_of_the_layer(kind, norm_first):
    name = {"encoder": "TransformerEncoderLayer", "decoder": "TransformerDecoderLayer"}[kind]
    args = {"batch_first": True, "norm_first": norm_first, "layer_norm_eps": 0.3, **SIZES}
    ours, theirs = getattr(fnn, name)(E, H, FF, **args), randomised(getattr(nn, name)(E, H, FF, **args))
    inputs = [tensor(L, True)] if kind == "encoder" else [tensor(L, True), tensor(S, True)]
    compare(ours, theirs, ours, theirs, inputs)


def test_unbatched_equals_torch():
    ours, theirs = (module.Transformer(E, H, 1, 1, FF, **SIZES) for module in (fnn, nn))
    compare(ours, randomised(theirs), ours, theirs, [torch.randn(S, E, **DOUBLE), torch.randn(L, E, **DOUBLE)])


@pytest.mark.parametrize(
    "activation", ["relu", "gelu", F.gelu, nn.ReLU(), nn.GELU(), nn.GELU("tanh"), F.silu, nn.SiLU(), F.mish, nn.Tanh()]
)
def test_activations_equal_torch(activation):
    args = {"batch_first": True, "activation": activation, **SIZES}
    ours, theirs = (module.TransformerEncoderLayer(E, H, FF, **args) for module in (fnn, nn))
    compare(ours, randomised(theirs), ours, theirs, [tensor(L, True)])


@pytest.mark.parametrize("make", [lambda m: m.Transformer(E, H, 2, 3, FF), lambda m: m.TransformerDecoderLayer(E, H)])
def test_same_seed_gives_torchs_weights(make):
    torch.manual_seed(5)
    theirs = make(nn).state_dict()
    torch.manual_seed(5)
    ours = make(fnn).state_dict()
    assert list(ours) == list(theirs)
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


def test_dropout_is_in_the_same_places_as_in_torch(monkeypatch):
    """Each dropout gets a probability of its own; the expected value is computed by hand from the same seed."""
    monkeypatch.setattr("fastformer.ops._dropout.draw_seed", lambda device: torch.tensor([7, 9]))
    seed = torch.tensor([7, 9])
    layer = fnn.TransformerDecoderLayer(E, H, FF, norm_first=True, batch_first=True, **DOUBLE)
    layer.dropout.p, layer.dropout1.p, layer.dropout2.p, layer.dropout3.p = 0.1, 0.2, 0.3, 0.0
    layer.self_attn.dropout, layer.multihead_attn.dropout = 0.5, 0.6
    stack = randomised(fnn.TransformerDecoder(layer, 2, fnn.AddLayerNorm(E, **DOUBLE)))
    for module in stack.layers:
        module.dropout3.p = 0.4
    # A lone layer's last dropout isn't part of a norm, so p = 0.4 shows in the stack alone.
    x, memory = tensor(L, True), tensor(S, True)

    def drop(x, p):
        rows = x.flatten(0, -2)
        return (rows * keep_mask(seed, p, *rows.shape)[0] * keep_scale(p)).view_as(x)

    def attend(module, q, k, mask=None):
        wq, wk, wv = module.in_proj_weight.chunk(3)
        bq, bk, bv = module.in_proj_bias.chunk(3)
        heads = lambda t: t.unflatten(-1, (H, -1)).transpose(1, 2)  # noqa: E731
        q, k, v = heads(F.linear(q, wq, bq)), heads(F.linear(k, wk, bk)), heads(F.linear(k, wv, bv))
        scores = q @ k.mT / (E // H) ** 0.5
        weights = (scores if mask is None else scores.masked_fill(mask, float("-inf"))).softmax(-1)
        kept = keep_mask(seed, module.dropout, weights.shape[-2], weights.shape[-1], N * H).view_as(weights)
        out = (weights * kept * keep_scale(module.dropout)) @ v
        return module.out_proj(out.transpose(1, 2).flatten(-2))

    assert stack.norm is not None
    expected = x
    for module in stack.layers:
        y = module.norm1(expected)
        expected = expected + drop(attend(module.self_attn, y, y, banded(L, None, 0)), 0.2)
        expected = expected + drop(attend(module.multihead_attn, module.norm2(expected), memory), 0.3)
        y = drop(module.linear1(module.norm3(expected)).relu(), 0.1)
        expected = expected + drop(module.linear2(y), 0.4)
    assert_same(stack(x, memory, tgt_is_causal=True), stack.norm(expected), "with dropout")
    stack.eval()
    assert (stack(x, memory, tgt_is_causal=True) - stack.norm(expected)).abs().max() > 0.1
    # Post-norm.
    layer.norm_first = False
    layer.dropout3.p = 0.4
    y = layer.norm1(x + drop(attend(layer.self_attn, x, x, banded(L, None, 0)), 0.2))
    y = layer.norm2(y + drop(attend(layer.multihead_attn, y, memory), 0.3))
    y = layer.norm3(y + drop(layer.linear2(drop(layer.linear1(y).relu(), 0.1)), 0.4))
    assert_same(layer(x, memory, tgt_is_causal=True), y, "post-norm with dropout")


@both_orders
@pytest.mark.parametrize("options", [{"eps": 0.3}, {"bias": False}, {"elementwise_affine": False}], ids=str)
@pytest.mark.parametrize("norm", ["ours", "torch.nn"])
def test_a_final_norm_keeps_its_settings(norm, options, norm_first):
    args = {"batch_first": True, "norm_first": norm_first, **SIZES}
    final = fnn.AddLayerNorm if norm == "ours" else nn.LayerNorm
    ours = fnn.TransformerEncoder(fnn.TransformerEncoderLayer(E, H, FF, **args), 2, final(E, **options, **DOUBLE))
    theirs = nn.TransformerEncoder(
        nn.TransformerEncoderLayer(E, H, FF, **args),
        2,
        nn.LayerNorm(E, **options, **DOUBLE),
        enable_nested_tensor=False,
    )
    compare(ours, randomised(theirs), ours, theirs, [tensor(L, True)])


@both_orders
def test_causal_cross_attention_equals_torch(norm_first):
    """memory_is_causal is about the memory alone, tgt_is_causal about the target."""
    args = {"batch_first": True, "norm_first": norm_first, **SIZES}
    ours = fnn.TransformerDecoderLayer(E, H, FF, **args)
    theirs = randomised(nn.TransformerDecoderLayer(E, H, FF, **args))
    mask = nn.Transformer.generate_square_subsequent_mask(L, dtype=torch.float64)
    for which in ("tgt", "memory"):
        options = {f"{which}_mask": mask, f"{which}_is_causal": True}
        run = lambda module, given=options: lambda x, y: module(x, y, **given)  # noqa: E731
        compare(ours, theirs, run(ours), run(theirs), [tensor(L, True), tensor(L, True)])


def layer_of(kind, norm_first, **options):
    make = fnn.TransformerEncoderLayer if kind == "encoder" else fnn.TransformerDecoderLayer
    return randomised(make(E, H, FF, batch_first=True, norm_first=norm_first, **SIZES, **options))


FINAL_NORMS = {
    "no norm": lambda: None,
    "AddLayerNorm": lambda: fnn.AddLayerNorm(E, **DOUBLE),
    "nn.LayerNorm": lambda: nn.LayerNorm(E, **DOUBLE),
    "nn.RMSNorm": lambda: nn.RMSNorm(E, **DOUBLE),
}


@both_orders
@pytest.mark.parametrize("where", ["a lone layer", *FINAL_NORMS])
@pytest.mark.parametrize("kind", ["encoder", "decoder"])
def test_dropout_of_everything_adds_nothing(kind, where, norm_first):
    """Each dropout of p = 1, in a lone layer and in the last of a stack, is its sub-layer's output set to zero."""
    memory = () if kind == "encoder" else (torch.randn(N, S, E, **DOUBLE),)
    x = torch.randn(N, L, E, **DOUBLE)
    module = layer_of(kind, norm_first)
    if where != "a lone layer":
        stack = fnn.TransformerEncoder if kind == "encoder" else fnn.TransformerDecoder
        module = randomised(stack(module, 2, FINAL_NORMS[where]()))
    sub_layers = ["self_attn.out_proj", *(["multihead_attn.out_proj"] if kind == "decoder" else []), "linear2"]
    whole = module(x, *memory)
    for i, name in enumerate(sub_layers, 1):
        dropped, silent = copy.deepcopy(module), copy.deepcopy(module)
        last = lambda m: m if where == "a lone layer" else m.layers[-1]  # noqa: E731
        getattr(last(dropped), f"dropout{i}").p = 1.0
        for parameter in last(silent).get_submodule(name).parameters():
            nn.init.zeros_(parameter)
        expected = silent(x, *memory)
        assert_same(dropped(x, *memory), expected, f"dropout{i}")
        assert (expected - whole).abs().max() > 1e-3, f"{name} made no difference"
        assert_same(dropped.eval()(x, *memory), whole, f"dropout{i} in evaluation")


def test_the_constructors_dropouts_arrive():
    layer = fnn.TransformerDecoderLayer(E, H, FF, 0.3, attention_dropout=0.1, activation_dropout=0.2)
    assert (layer.self_attn.dropout, layer.multihead_attn.dropout, layer.dropout.p) == (0.1, 0.1, 0.2)
    assert layer.dropout1.p == layer.dropout2.p == layer.dropout3.p == 0.3
    encoder = fnn.TransformerEncoderLayer(E, H, FF, 0.3, bias=True, attention_bias=False)
    assert encoder.self_attn.in_proj_bias is None and encoder.self_attn.out_proj.bias is None
    assert encoder.linear1.bias is not None and encoder.self_attn.dropout == encoder.dropout.p == 0.3


def test_every_addition_joins_a_norm(monkeypatch):
    """In a pre-norm stack with a final norm, no sum is written by anything but add_layer_norm."""
    stack = fnn.TransformerEncoder(
        fnn.TransformerEncoderLayer(E, H, FF, norm_first=True, batch_first=True, **SIZES),
        3,
        fnn.AddLayerNorm(E, **DOUBLE),
    )

    def never(self):
        raise AssertionError("an addition of its own")

    monkeypatch.setattr(ResidualStream, "value", never)
    stack(tensor(L, True))


def test_layers_with_hooks_or_a_custom_forward_get_plain_tensors():
    args = {"norm_first": True, "batch_first": True, **SIZES}
    stack = randomised(fnn.TransformerEncoder(fnn.TransformerEncoderLayer(E, H, FF, **args), 2))
    x = tensor(L, True)
    expected = stack(x)
    seen = []
    handle = stack.layers[1].register_forward_hook(lambda module, args, out: seen.append((args[0], out)))
    assert_same(stack(x), expected, "with a hook")
    assert isinstance(seen[0][0], torch.Tensor) and isinstance(seen[0][1], torch.Tensor)
    handle.remove()

    class Doubled(fnn.TransformerEncoderLayer):
        # A user's subclass has torch.nn's signature, without what ours adds.
        def forward(self, src, src_mask=None, src_key_padding_mask=None, is_causal=False):  # type: ignore[override]
            return 2 * super().forward(src, src_mask, src_key_padding_mask, is_causal)

    doubled = fnn.TransformerEncoder(Doubled(E, H, FF, **args), 2)
    doubled.load_state_dict(stack.state_dict())
    assert_same(doubled(x), 2 * stack.layers[1](2 * stack.layers[0](x)), "a subclass")
    theirs = fnn.TransformerEncoder(nn.TransformerEncoderLayer(E, H, FF, **args), 2, nn.LayerNorm(E, **DOUBLE))
    assert theirs.norm is not None
    theirs.load_state_dict({**stack.state_dict(), **{f"norm.{k}": v for k, v in theirs.norm.state_dict().items()}})
    assert_same(theirs(x, MASKS["causal bool"][0]), theirs.norm(stack(x, is_causal=True)), "torch.nn's layers")


def test_a_replaced_linear_is_called():
    layer = randomised(fnn.TransformerEncoderLayer(E, H, FF, batch_first=True, **SIZES))
    x = tensor(L, True)
    expected = layer(x)

    class Adapted(nn.Linear):
        def forward(self, x):
            return super().forward(x) + 1.0

    adapted = copy.deepcopy(layer)
    adapted.linear1.__class__ = Adapted
    shifted = copy.deepcopy(layer)
    with torch.no_grad():
        shifted.linear1.bias.add_(1.0)
    assert_same(adapted(x), shifted(x), "with an adapter")
    assert (adapted(x) - expected).abs().max() > 1e-3
    hooked = copy.deepcopy(layer)
    hooked.linear1.register_forward_hook(lambda module, args, out: out + 1.0)
    assert_same(hooked(x), shifted(x), "with a hook")


def _counting(function, runs):
    def counted(*args):
        runs.append(None)
        return function(*args)

    return counted


@both_orders
def test_checkpointing_changes_nothing_but_runs_layers_again(norm_first, monkeypatch):
    torch.manual_seed(0)
    layer = fnn.TransformerDecoderLayer(E, H, FF, 0.2, norm_first=norm_first, batch_first=True, **DOUBLE)
    stack = randomised(fnn.TransformerDecoder(layer, 2, fnn.AddLayerNorm(E, **DOUBLE)))
    x, memory = tensor(L, True).requires_grad_(), tensor(S, True)
    dy = torch.randn_like(x)
    results: list[tuple[torch.Tensor, ...]] = []
    runs: list[None] = []
    for each in stack.layers:
        monkeypatch.setattr(each, "_feed_forward", _counting(each._feed_forward, runs))
    for checkpointing in (False, True):
        stack.gradient_checkpointing = checkpointing
        torch.manual_seed(11)
        runs.clear()
        out = stack(x, memory, tgt_is_causal=True)
        results.append((out, *torch.autograd.grad(out, [x, *stack.parameters()], dy)))
        assert len(runs) == (4 if checkpointing else 2)
        runs.clear()
        stack.eval()(x, memory), stack.train()
        assert len(runs) == 2, "in evaluation there is no backward pass to save memory for"
    for a, b in zip(*results, strict=True):
        assert torch.equal(a, b)


@both_orders
def test_packed_equals_padded(norm_first):
    model = randomised(fnn.Transformer(E, H, 2, 2, FF, norm_first=norm_first, batch_first=True, **SIZES))
    source = SequenceLayout.packed(torch.tensor([6, 1, 4]), 6)
    target = SequenceLayout.packed(torch.tensor([2, 5, 3]), 5)
    x, y = torch.randn(11, E, **DOUBLE), torch.randn(10, E, **DOUBLE)
    dy = torch.randn(10, E, **DOUBLE)
    results = []
    for packed in (True, False):
        a, b = x.clone().requires_grad_(), y.clone().requires_grad_()
        if packed:
            out = model(a, b, tgt_is_causal=True, layout=target, memory_layout=source)
        else:
            layouts = {
                "layout": SequenceLayout.padded(target.seqlens, 5),
                "memory_layout": SequenceLayout.padded(source.seqlens, 6),
            }
            out = target.pack(model(source.unpack(a), target.unpack(b), tgt_is_causal=True, **layouts))
        names = ["source", "target", *dict(model.named_parameters())]
        grads = torch.autograd.grad(out, [a, b, *model.parameters()], dy)
        results.append({"output": out, **dict(zip(names, grads, strict=True))})
    for name, value in results[0].items():
        assert_same(value, results[1][name], name)


def test_causal_masks_are_recognised_once_and_correctly():
    mask = nn.Transformer.generate_square_subsequent_mask(L)
    assert is_causal_mask(mask) and is_causal_mask(banded(L, None, 0))
    assert not is_causal_mask(banded(L, 2, 0)) and not is_causal_mask(mask + 1) and not is_causal_mask(None)
    assert not is_causal_mask(mask[:3]) and not is_causal_mask(mask[None])
    assert not is_causal_mask(mask.clone().requires_grad_())
    mask[0, 0] = -1.0  # changed in place after it was seen
    assert not is_causal_mask(mask)
    with torch.inference_mode():
        fresh = nn.Transformer.generate_square_subsequent_mask(L)
        assert is_causal_mask(fresh)
        fresh[0, 0] = -1.0
        assert not is_causal_mask(fresh)


@both_orders
@pytest.mark.parametrize("options", [{"num_kv_heads": 1}, {"norm": "rms"}, {"activation": "swiglu"}], ids=str)
def test_further_options_have_gradients_everywhere(options, norm_first):
    layer = fnn.TransformerDecoderLayer(E, H, FF, norm_first=norm_first, batch_first=True, **SIZES, **options)
    out = layer(tensor(L, True), tensor(S, True), tgt_is_causal=True)
    grads = torch.autograd.grad(out, list(layer.parameters()), torch.randn_like(out))
    assert all(grad.isfinite().all() and grad.abs().max() > 0 for grad in grads)
    if options.get("norm") == "rms":
        assert layer.norm1.bias is None
        x = tensor(L, True)
        assert_same(layer.norm1(x), F.rms_norm(x, (E,), layer.norm1.weight, 1e-5), "RMSNorm")
    if options.get("activation") == "swiglu":
        x = tensor(L, True)
        gate, up = layer.linear1(x).chunk(2, -1)
        assert_same(layer._feed_forward(x), layer.linear2(F.silu(gate) * up), "SwiGLU")


def test_errors():
    with pytest.raises(ValueError, match=r"\bactivation\b"):
        fnn.TransformerEncoderLayer(E, H, activation="tanh")
    with pytest.raises(ValueError, match=r"\bnorm\b"):
        fnn.TransformerEncoderLayer(E, H, norm="batch")
    model = fnn.Transformer(E, H, 1, 1, FF)
    with pytest.raises(ValueError, match=r"\bd_model\b"):
        model(torch.randn(S, N, E), torch.randn(L, N, 11))
    with pytest.raises(ValueError, match=r"\bbatch\b"):
        model(torch.randn(S, 3, E), torch.randn(L, 2, E))
