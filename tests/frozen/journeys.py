"""Programs that use the library as users do; each gives a few numbers and texts that must not change.

Weights come from names (`models.fill`), ids and inputs from integers, so that nothing but the library's own
computation is in the results. A tensor becomes its shape, its norm and its product with fixed weights.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fastformer
import fastformer.nn as ours
from fastformer import functional, ops
from fastformer.cli import main
from fastformer.data import load_tokenizer, train_bpe
from fastformer.generation import Ensemble, score, split_sentences
from fastformer.integrations import from_huggingface
from fastformer.training import TrainConfig, start
from tests.frozen import models as tiny
from tests.frozen.models import VOCAB, fill

HERE = Path(__file__).parent
RUN, PAIRS, WORDS = HERE / "run", HERE / "pairs.tsv", HERE / "words.json"
UPDATES = 600  # of the frozen run
ENGINES = ("cpp", "kv_cache")
# Three sources of 7, 4 and 5 tokens, and prompts.
SOURCE = torch.tensor([[5, 9, 14, 30, 22, 7, 1], [8, 3, 25, 1, 0, 0, 0], [33, 12, 6, 19, 1, 0, 0]])
TARGET = torch.tensor([[4, 17, 29, 8, 36, 1], [21, 5, 1, 0, 0, 0], [10, 38, 13, 9, 1, 0]])
LENGTHS = (7, 4, 5)
# Sentences that the frozen run has learned, and translates with wide margins.
TEXTS, TRANSLATIONS = zip(*(line.split("\t") for line in PAIRS.read_text().splitlines()[:7]), strict=True)

JOURNEYS: dict[str, Callable[[Path], Any]] = {}


def journey(function: Callable[[Path], Any]) -> Callable[[Path], Any]:
    """Registers a journey: a function that gets an empty folder, and returns a result that JSON can represent."""
    JOURNEYS[function.__name__] = function
    return function


def numbers(*shape: int, seed: int = 0) -> Tensor:
    """Returns uniform numbers in [-1, 1)."""
    return 2 * torch.rand(shape, generator=torch.Generator().manual_seed(seed)) - 1


def digest(tensor: Tensor) -> dict[str, Any]:
    """Returns the recorded digest of a tensor: any change beyond rounding changes the product."""
    values = tensor.detach().double().flatten()
    weights = numbers(values.numel(), seed=1).double()
    found = {"shape": list(tensor.shape), "norm": float(values.norm()), "product": float(values @ weights)}
    return {"tensor": {key: float(f"{v:.7g}") if isinstance(v, float) else v for key, v in found.items()}}


def rounded(value: float) -> dict[str, float]:
    """Returns a number that is compared up to rounding, like a tensor."""
    return {"number": float(f"{value:.6g}")}


def forward_and_backward(module: nn.Module, out: Tensor, *inputs: Tensor) -> dict[str, Any]:
    """Returns the digest of an output and of all gradients: of the inputs, and of the parameters as one vector."""
    module.zero_grad()
    out.backward(numbers(*out.shape, seed=2))
    gradients = [p.grad.flatten() for _, p in sorted(module.named_parameters()) if p.grad is not None]
    found = {"out": digest(out), "parameters": digest(torch.cat(gradients))}
    return found | {f"input {i}": digest(one.grad) for i, one in enumerate(inputs) if one.grad is not None}


def padding() -> Tensor:
    """Returns a mask (3, 7), True at padding, as in torch.nn."""
    return torch.arange(7) >= torch.tensor(LENGTHS)[:, None]


def x(seqlen: int = 7, seed: int = 0) -> Tensor:
    return numbers(3, seqlen, 16, seed=seed).requires_grad_()


# Modules


@journey
def encoder(_: Path) -> Any:
    found = {}
    for norm_first in (False, True):
        module = fill(tiny.encoder(norm_first=norm_first, activation="gelu"))
        source = x()
        found[f"norm_first={norm_first}"] = forward_and_backward(module, module(source), source)
        source = x()
        out = module(source, src_key_padding_mask=padding())
        found[f"norm_first={norm_first}, padded"] = forward_and_backward(module, out, source)
        with torch.no_grad():
            found[f"norm_first={norm_first}, evaluation"] = digest(module.eval()(x(), src_key_padding_mask=padding()))
    return found


@journey
def decoder(_: Path) -> Any:
    module = fill(tiny.decoder())
    causal = nn.Transformer.generate_square_subsequent_mask(6)
    target, memory = x(6, seed=3), x()
    out = module(target, memory, tgt_mask=causal, tgt_is_causal=True)
    found = {"dense": forward_and_backward(module, out, target, memory)}
    target, memory = x(6, seed=3), x()
    behind = torch.arange(6) >= torch.tensor((6, 3, 5))[:, None]
    masks = {"tgt_key_padding_mask": behind, "memory_key_padding_mask": padding()}
    out = module(target, memory, tgt_mask=causal, tgt_is_causal=True, **masks)
    return found | {"padded": forward_and_backward(module, out, target, memory)}


@journey
def transformer_of_torch_nn(_: Path) -> Any:
    theirs = fill(nn.Transformer(16, 2, 1, 1, 24, dropout=0.0, batch_first=True))
    module = ours.Transformer(16, 2, 1, 1, 24, dropout=0.0, batch_first=True)
    module.load_state_dict(theirs.state_dict())
    source, target = x(), x(6, seed=3)
    found = {"ours": forward_and_backward(module, module(source, target), source, target)}
    source, target = x(), x(6, seed=3)
    fastformer.accelerate(theirs)
    return found | {"accelerated": forward_and_backward(theirs, theirs(source, target), source, target)}


@journey
def attention_module(_: Path) -> Any:
    module = fill(ours.MultiheadAttention(16, 2, kdim=8, vdim=12, add_bias_kv=True, batch_first=True))
    query, key, value = x(), numbers(3, 5, 8, seed=4), numbers(3, 5, 12, seed=5)
    hidden = torch.tensor([[False] * 5, [False, False, True, True, True], [True] * 5])
    out, weights = module(query, key, value, key_padding_mask=hidden, average_attn_weights=False)
    return forward_and_backward(module, out, query) | {"weights": digest(weights)}


@journey
def sdpa(_: Path) -> Any:
    q, k, v = (numbers(2, 4, 6, 8, seed=seed) for seed in (6, 7, 8))
    keep = numbers(2, 1, 6, 6, seed=9) > -0.3
    masks: dict[str, dict[str, Any]] = {
        "none": {},
        "causal": {"is_causal": True},
        "boolean": {"attn_mask": keep},
        "floating": {"attn_mask": numbers(2, 4, 6, 6, seed=10)},
        "window": {"attn_mask": functional.Window(left=2, right=0)},
        "blocks": {"attn_mask": functional.BlockDiagonal([4, 2])},
        "lower right": {"attn_mask": functional.causal_lower_right()},
        "grouped": {"enable_gqa": True},
    }
    found = {}
    for name, options in masks.items():
        shared = 2 if name == "grouped" else 4
        batch = 1 if name == "blocks" else 2
        inputs = [one.clone().requires_grad_() for one in (q[:batch], k[:batch, :shared], v[:batch, :shared])]
        out = functional.scaled_dot_product_attention(*inputs, **options)
        out.backward(numbers(*out.shape, seed=2))
        found[name] = {"out": digest(out)} | {n: digest(t.grad) for n, t in zip("qkv", inputs, strict=True)}
    with fastformer.activate():
        found["activated"] = digest(F.scaled_dot_product_attention(q, k, v, is_causal=True))
    return found


@journey
def loss_without_logits(_: Path) -> Any:
    hidden, weight, bias = (one.requires_grad_() for one in (numbers(9, 16), numbers(VOCAB, 16), numbers(VOCAB)))
    target = torch.tensor([3, 8, -100, 39, 0, 17, 21, -100, 5])
    options = {"label_smoothing": 0.1, "z_loss": 1e-3}
    loss = ops.linear_cross_entropy(hidden, weight, target, bias, **options)
    loss.backward()
    return {
        "loss": rounded(loss.item()),
        **{n: digest(t.grad) for n, t in (("x", hidden), ("weight", weight), ("bias", bias))},
    }


@journey
def other_ops(_: Path) -> Any:
    rows, weight, bias = numbers(3, 7, 16), 1 + 0.1 * numbers(16, seed=3), numbers(16, seed=4)
    out, total = ops.add_layer_norm(rows, numbers(3, 7, 16, seed=5), weight, bias)
    found = {"add_layer_norm": digest(out), "sum": digest(total)}
    found["feed_forward"] = digest(
        ops.feed_forward(rows, numbers(24, 16), bias[:1].expand(24), numbers(16, 24), bias, activation="gelu")
    )
    best = ops.linear_topk(rows[0], numbers(VOCAB, 16, seed=6), 3)
    found["linear_topk"] = {"ids": best.indices.tolist(), "values": digest(best.values)}
    found["positions"] = digest(ops.sinusoidal_positions(12, 16))
    return found


@journey
def dropout_by_seed(_: Path) -> Any:
    module = fill(ours.TransformerEncoderLayer(16, 2, 24, dropout=0.3, batch_first=True))
    torch.manual_seed(3)
    source = x()
    found = {"encoder": forward_and_backward(module, module(source), source)}
    torch.manual_seed(5)
    model = fill(tiny.transformer(dropout=0.2))
    found["loss"] = rounded(model.loss(SOURCE, F.pad(TARGET[:, :-1], (1, 0)), TARGET).item())
    return found


@journey
def initialisation_by_seed(_: Path) -> Any:
    found = {}
    for name in ("models.Transformer", "models.GPT", "baseline.LSTMSeq2Seq", "nn.TransformerEncoderLayer"):
        torch.manual_seed(0)
        model = tiny.STATE_DICTS[name]()
        found[name] = digest(torch.cat([parameter.flatten() for parameter in model.parameters()]))
    return found


# Models of transformers


def step_of(model: nn.Module, labels: Tensor) -> dict[str, Any]:
    """Returns the loss of a model of transformers, and the digests of its logits and gradients."""
    result = model(SOURCE, attention_mask=(SOURCE != 0).long(), labels=labels)
    return {"loss": rounded(result.loss.item()), **forward_and_backward(model, result.logits)}


@journey
def bert(_: Path) -> Any:
    return step_of(fastformer.accelerate(fill(tiny.bert())), torch.tensor([0, 1, 1]))


@journey
def gpt2(_: Path) -> Any:
    model = fastformer.accelerate(fill(tiny.gpt2(), 2.0))
    found = step_of(model, SOURCE.masked_fill(SOURCE == 0, -100))
    tokens = model.eval().generate(SOURCE[:1, :4], max_new_tokens=6, do_sample=False)
    return found | {"tokens": tokens.tolist()}


@journey
def fused_loss(_: Path) -> Any:
    found = {}
    for name, model in (("llama", fill(tiny.llama())), ("bart", fill(tiny.bart()))):
        fastformer.accelerate(model.train(), fused_loss=True)
        labels = SOURCE.masked_fill(SOURCE == 0, -100)
        result = model(SOURCE, attention_mask=(SOURCE != 0).long(), labels=labels)
        result.loss.backward()
        gradients = torch.cat([p.grad.flatten() for _, p in sorted(model.named_parameters()) if p.grad is not None])
        found[name] = {"loss": rounded(result.loss.item()), "parameters": digest(gradients)}
    return found


@journey
def t5(_: Path) -> Any:
    model = fastformer.accelerate(fill(tiny.t5(), 2.0))
    found = step_of(model, TARGET.masked_fill(TARGET == 0, -100))
    mask = (SOURCE != 0).long()
    tokens = model.eval().generate(SOURCE, attention_mask=mask, max_new_tokens=6, do_sample=False)
    return found | {"tokens": tokens.tolist(), "converted": in_the_engine(from_huggingface(model))}


@journey
def marian(_: Path) -> Any:
    model = from_huggingface(fill(tiny.marian(), 2.0).eval())
    return {"out": digest(model(SOURCE, TARGET)), "tokens": in_the_engine(model)}


def in_the_engine(model: nn.Module) -> list[list[int]]:
    return fastformer.generate(model, SOURCE, max_new_tokens=6, num_beams=3, beam_rules="transformers").tolist()


# Decoding


SEARCHES: dict[str, dict[str, Any]] = {
    "greedy": {},
    "beams": {"num_beams": 3, "num_return_sequences": 2},
    "beams of transformers": {"num_beams": 3, "beam_rules": "transformers", "length_penalty": 0.8},
    "diverse beams": {"num_beams": 4, "num_beam_groups": 2, "diversity_penalty": 0.5},
    "samples": {"do_sample": True, "seed": 7, "top_k": 10, "temperature": 0.8, "num_return_sequences": 2},
    "nucleus": {"do_sample": True, "seed": 8, "top_p": 0.9},
    "penalties": {"repetition_penalty": 1.3, "no_repeat_ngram_size": 2, "suppress_tokens": [5], "min_new_tokens": 4},
    "shortlist": {"shortlist": [4, 7, 8, 11, 20, 33], "bad_words_ids": [[7, 8]]},
}


def decoded(model: nn.Module, engines: tuple[str, ...], scale: float) -> Any:
    fill(model, scale).eval()
    found = {}
    for name, options in SEARCHES.items():
        results = {}
        for engine in engines:
            settings = {"max_new_tokens": 7, "engine": engine, "return_dict_in_generate": True, **options}
            out = fastformer.generate(model, SOURCE, **settings)
            results[engine] = {"tokens": out.sequences.tolist(), "scores": digest(out.scores)}
        found[name] = results[engines[0]]
        for engine in engines[1:]:
            assert results[engine]["tokens"] == found[name]["tokens"], f"{engine} says something else: {name}"
    return found


@journey
def decoding_of_a_transformer(_: Path) -> Any:
    model = tiny.transformer()
    found = decoded(model, (*ENGINES, "recompute"), 2.0)
    out = model.generate(SOURCE, decoder_input_ids=[[4, 17], [21], [10]], max_new_tokens=5, use_cache=False)
    return found | {"beginnings": out.tolist()}


@journey
def decoding_of_a_gpt(_: Path) -> Any:
    model = tiny.gpt()
    found = decoded(model, ENGINES, 4.0)
    found["sliding"] = {"tokens": model.generate(SOURCE[:1, :5], window="slide", max_new_tokens=80).tolist()}
    found["scores"] = [[rounded(one) for one in row] for row in score(model, [[4, 17, 29], [8, 36]])]
    return found


@journey
def decoding_of_an_lstm(_: Path) -> Any:
    return decoded(tiny.lstm(), ("recurrent",), 3.0)


@journey
def decoding_of_an_ensemble(_: Path) -> Any:
    models = fill(tiny.transformer(), 2.0), fill(tiny.transformer(num_heads=2), 2.2)
    out = fastformer.generate(Ensemble(models, [2, 1]).eval(), SOURCE, max_new_tokens=7, num_beams=2)
    return {"tokens": out.tolist()}


# A trained model: the run folder that an earlier commit wrote


@journey
def translator(_: Path) -> Any:
    reader = fastformer.Translator.from_pretrained(RUN)
    found: dict[str, Any] = {precision: reader.translate(TEXTS, precision=precision) for precision in PRECISIONS}
    found["prefix"] = reader.translate(TEXTS[:2], target_prefix=["zwei", "vier"])
    several = reader.translate(TEXTS[:2], num_beams=4, num_return_sequences=3, return_scores=True)
    found["alternatives"] = [[[one.text, rounded(one.score)] for one in answers] for answers in several]
    found["token scores"] = [
        [[token, rounded(score)] for token, score in one.tokens]
        for one in reader.translate(TEXTS[:2], return_token_scores=True)
    ]
    found["penalty"] = reader.translate("one one one", repetition_penalty=3.0)
    found["shortlist"] = reader.translate(TEXTS[0], shortlist=reader.encode_target("eins drei sechs"))
    found["split"] = reader.translate("one two. Three four.", split=True)
    found["score"] = [rounded(one.score) for one in reader.score(TEXTS, TRANSLATIONS)]
    found["align"] = reader.align(TEXTS, TRANSLATIONS)
    found["stream"] = list(reader.stream(TEXTS[2]))
    found["several streams"] = list(reader.stream(iter(TEXTS)))
    return found


PRECISIONS = ("fp32", "bf16", "int8")


@journey
def many_tasks(_: Path) -> Any:
    async def ask() -> list[str]:
        async with fastformer.AsyncTranslator(fastformer.Translator.from_pretrained(RUN)) as front:
            return list(await asyncio.gather(*(front.translate(text, num_beams=2) for text in TEXTS)))

    return asyncio.run(ask())


@journey
def commands(folder: Path) -> Any:
    """Runs `fastformer average` and `fastformer quantize`."""
    run = folder / "run"
    shutil.copytree(RUN, run)
    found: dict[str, Any] = {"average": main(["average", str(run)])}
    found["quantize"] = main(["quantize", str(run), str(folder / "small")])
    config = json.loads((folder / "small" / "config.json").read_text())
    found["config"] = {key: config[key] for key in sorted(config) if "quant" in key or key == "architecture"}
    reader = fastformer.Translator.from_pretrained(folder / "small")
    found["texts"] = reader.translate(TEXTS)
    assert found["texts"] == fastformer.Translator.from_pretrained(run).translate(TEXTS), "the average says otherwise"
    return found


def settings(folder: Path, **changes: Any) -> TrainConfig:
    """Returns the settings of the frozen run, whose data are copied to `folder`."""
    for file in (PAIRS, WORDS):
        shutil.copy(file, folder)
    config = TrainConfig(
        train_tsv=str(folder / PAIRS.name),
        val_tsv=str(folder / PAIRS.name),
        tokenizer=str(folder / WORDS.name),
        settings={"d_model": 16, "d_ff": 16, "num_heads": 2, "num_encoder_layers": 1, "num_decoder_layers": 1},
        max_tokens=256,
        steps=UPDATES,
        warmup=20,
        schedule="constant",
        lr=1e-2,
        log_every=1,
        val_examples=0,
        val_every=0,
        save_every=UPDATES,
        keep_last=1,
        max_len=16,
        samples=0,
        device="cpu",
    )
    return dataclasses.replace(config, **changes)


def losses(run: Path) -> list[dict[str, float]]:
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [rounded(line["loss"]) for line in lines if line["kind"] == "train"]


@journey
def training(folder: Path) -> Any:
    start(settings(folder, steps=3, ema=0.9, accumulate=2), folder / "run").train()
    return losses(folder / "run")


@journey
def resuming(folder: Path) -> Any:
    """Trains the frozen run for three more updates, from the checkpoint that an earlier commit wrote."""
    run = folder / "run"
    shutil.copytree(RUN, run)
    before = len(losses(run))
    trainer = start(settings(folder, steps=UPDATES + 3), run, resume=True)
    at = trainer.step
    trainer.train()
    return {"from": at, "losses": losses(run)[before:]}


@journey
def tuning(folder: Path) -> Any:
    """Trains a new run that starts from the frozen one's model."""
    config = settings(folder, steps=2, init_from=str(RUN), settings={}, tokenizer="bpe")
    start(config, folder / "new").train()
    return losses(folder / "new")


@journey
def tokenizers(folder: Path) -> Any:
    lines = [line.replace("\t", " ") for line in PAIRS.read_text().splitlines()]
    bpe = train_bpe(lines, 60, user_tokens=["<2de>"])
    bpe.save(folder)
    again = load_tokenizer(folder)
    texts = ["<2de> one ½ fünf", "seven  EIGHT", "日本"]
    ids = [bpe.encode(text) for text in texts]
    assert [again.encode(text) for text in texts] == ids
    sentences = [one.text for one in split_sentences("One is 1.5. Mr. Two isn't! Three?")]
    return {"ids": ids, "texts": [bpe.decode(row) for row in ids], "sentences": sentences}
