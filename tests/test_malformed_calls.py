"""A malformed call of a public function or class raises a ValueError that says "expected ..., got ..."."""

# The errors in this file are intended.
# mypy: disable-error-code="arg-type,dict-item,list-item"

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

import fastformer
from fastformer import nn as fnn
from fastformer import ops
from fastformer.baseline import LSTMSeq2Seq
from fastformer.data import BPETokenizer, ByteTokenizer, Example, Examples, collate, plan_epoch, train_bpe
from fastformer.generation import Translator
from fastformer.models import GPT, GPTConfig, Transformer, TransformerConfig
from fastformer.nn import KVCache, SequenceLayout
from fastformer.number_words import english, number_pairs
from fastformer.training import TrainConfig, start
from tests.covering import each

torch.manual_seed(0)
SIZES = {"d_model": 16, "d_ff": 16, "num_heads": 2, "num_encoder_layers": 1, "num_decoder_layers": 1, "max_len": 32}
MODEL = Transformer(TransformerConfig(259, **SIZES)).eval()
LM = GPT(GPTConfig(259, d_model=16, num_heads=2, num_layers=1, max_len=32)).eval()
LSTM = LSTMSeq2Seq(vocab_size=259, d_model=16, max_len=32).eval()
BYTES = ByteTokenizer()
IDS = torch.randint(3, 200, (2, 5))
Q, K = torch.randn(2, 5, 4, 8), torch.randn(2, 6, 2, 8)
ROWS, CU = torch.randn(5, 2, 8), torch.tensor([0, 3, 5], dtype=torch.int32)
LENGTHS = torch.tensor([[3, 2]])
NAN = math.nan


def packed() -> SequenceLayout:
    return SequenceLayout.packed(torch.tensor([3, 2]), 3)


def varlen(cu_q: Any = CU, cu_k: Any = CU, max_q: Any = 3, max_k: Any = 3, **options: Any) -> object:
    return ops.varlen_attention(ROWS, ROWS, ROWS, cu_q, cu_k, max_q, max_k, **options)


def int32(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def plan(lengths: Any = LENGTHS, max_tokens: Any = 9, batching: Any = "packed", seed: Any = 0) -> object:
    return plan_epoch(lengths, max_tokens=max_tokens, batching=batching, seed=seed, epoch=0)


def cross_entropy(target: Any, **options: Any) -> object:
    return ops.linear_cross_entropy(torch.randn(2, 4), torch.randn(9, 4), target, **options)


CALLS: list[tuple[str, Callable[[], object], tuple[str, ...]]] = [
    # Models and devices.
    ("a name for a config", lambda: Transformer("base"), ("TransformerConfig", "str")),
    ("another model's config", lambda: GPT(TransformerConfig(9)), ("GPTConfig", "TransformerConfig")),
    ("no preset", lambda: Transformer.from_preset(None, vocab_size=9), ("preset", "None")),
    ("a list for a preset", lambda: GPT.from_preset(["tiny"], vocab_size=9), ("preset", "['tiny']")),
    ("a dtype as text", lambda: MODEL.from_preset("tiny", vocab_size=9, dtype="fp16"), ("torch.dtype", "'fp16'")),
    ("an integer dtype", lambda: MODEL.from_preset("tiny", vocab_size=9, dtype=torch.int64), ("floating", "int64")),
    ("no such device", lambda: MODEL.from_preset("tiny", vocab_size=9, device="gpu"), ("device", "'gpu'")),
    ("a saved model in no dtype", lambda: GPT.from_pretrained("x", dtype=torch.int8), ("floating", "int8")),
    ("a size beyond 64 bits", lambda: GPTConfig(10**30), ("vocab_size", "64 bits")),
    # Ids and layouts.
    ("ids as a list", lambda: MODEL(IDS, IDS.tolist()), ("target ids", "list")),
    ("a source as a list", lambda: MODEL(IDS.tolist(), IDS), ("source", "list")),
    ("text", lambda: LM("text"), ("token ids", "str")),
    ("boolean ids", lambda: LM(IDS.bool()), ("int64 or int32", "bool")),
    ("a layout by name", lambda: MODEL(IDS, IDS, source_layout="packed"), ("SequenceLayout", "str")),
    ("lengths for a layout", lambda: LM(IDS, layout=torch.tensor([5, 4])), ("SequenceLayout", "Tensor")),
    ("a narrower layout", lambda: LM(IDS, layout=SequenceLayout.padded(int32(4, 4), 4)), ("(2, 4)", "(2, 5)")),
    ("a layout of more rows", lambda: LM(IDS, layout=SequenceLayout.padded(int32(5, 5, 5), 5)), ("(3, 5)", "(2, 5)")),
    ("lengths as a list", lambda: SequenceLayout.padded([3, 2], 3), ("tensor", "list")),
    ("a length above the width", lambda: SequenceLayout.padded(int32(3, 4), 3), ("max_seqlen 3", "to 4")),
    ("a length below 0", lambda: SequenceLayout.packed(int32(3, -1), 3), ("from 0", "got -1")),
    ("a longest that is none", lambda: SequenceLayout.packed(int32(3, 2), 2), ("max_seqlen 2", "3")),
    ("half a slot", lambda: SequenceLayout.padded(int32(3), 3.5), ("integer", "3.5")),
    ("too small a total", lambda: SequenceLayout.packed(int32(3, 2), 3, total=4), ("sum", "5", "got 4")),
    ("a layout of lists", lambda: SequenceLayout.from_ids([[3]]), ("tensor", "list")),
    ("packed ids with a gap", lambda: LM(IDS.flatten(), layout=packed()), ("5 packed token ids", "10")),
    ("a cache of text", lambda: KVCache("1", 2, 3, 4, 5), ("num_layers", "1, 2, 3, 4, 5")),
    ("a cache of half a slot", lambda: MODEL.new_cache(2, 1.5), ("max_seqlen", "1.5")),
    # The LSTM.
    ("float ids for the LSTM", lambda: LSTM(IDS.float(), IDS), ("int64 or int32", "float32")),
    ("foreign ids for the LSTM", lambda: LSTM(IDS + 300, IDS), ("from 0 to 258", "source")),
    ("fewer targets for the LSTM", lambda: LSTM(IDS, IDS[:1]), ("1 and 2", "targets")),
    ("an empty source for the LSTM", lambda: LSTM(IDS * 0, IDS), ("token",)),
    # Decoding.
    ("a mask of fractions", lambda: MODEL.generate(IDS, attention_mask=torch.rand(2, 5)), ("attention_mask", "0")),
    ("a mask of text", lambda: MODEL.generate(IDS, attention_mask="x"), ("attention_mask", "'x'")),
    ("prompts on meta", lambda: MODEL.generate(IDS.to("meta")), ("meta",)),
    ("no such engine", lambda: LSTM.generate(IDS, engine="kv_cache"), ("LSTMSeq2Seq", "cache")),
    ("no tokenizer", lambda: Translator(MODEL, None), ("encode", "NoneType")),
    ("a language model", lambda: Translator(LM, BYTES), ("source", "GPT")),
    ("rows as text", lambda: Translator(MODEL, BYTES, max_batch_size="8"), ("max_batch_size", "'8'")),
    ("bytes as text", lambda: Translator(MODEL, BYTES, max_batch_bytes="1G"), ("max_batch_bytes", "'1G'")),
    ("no text to encode", lambda: Translator(MODEL, BYTES).encode(None), ("str", "NoneType")),
    ("nothing to decode with", lambda: fastformer.generate(None, IDS), ("Transformer or GPT", "NoneType")),
    # Ops.
    ("more keys than there are", lambda: ops.attention(Q, K, K, seqlens_k=int32(3, 7)), ("from 0 to 6", "3 to 7")),
    ("fewer keys than none", lambda: ops.attention(Q, K, K, seqlens_k=int32(3, -1)), ("from 0 to 6", "-1 to 3")),
    ("causal as a word", lambda: ops.attention(Q, K, K, is_causal="no"), ("is_causal", "'no'")),
    ("keys without memory", lambda: ops.attention(Q, K.to("meta"), K.to("meta")), ("one device", "meta")),
    ("a source without memory", lambda: MODEL(IDS.to("meta"), IDS), ("one device", "meta")),
    ("a window of one side", lambda: ops.attention(Q, K, K, window_size=3), ("(left, right)", "3")),
    ("a scale of NaN", lambda: ops.attention(Q, K, K, softmax_scale=NAN), ("softmax_scale", "finite", "nan")),
    ("an infinite scale", lambda: varlen(softmax_scale=math.inf), ("softmax_scale", "finite", "inf")),
    ("a scale as text", lambda: ops.attention(Q, K, K, softmax_scale="1"), ("softmax_scale", "'1'")),
    ("a rate of NaN", lambda: ops.attention(Q, K, K, dropout_p=NAN), ("dropout_p", "nan")),
    ("a rate as text", lambda: ops.attention(Q, K, K, dropout_p="0.1"), ("dropout_p", "'0.1'")),
    ("sequences that begin late", lambda: varlen(CU, int32(1, 3, 5)), ("cu_seqlens_k", "[1, 3, 5]")),
    ("sequences past the rows", lambda: varlen(CU, int32(0, 3, 9)), ("at most 5", "[0, 3, 9]")),
    ("too short a longest query", lambda: varlen(max_q=2), ("max_seqlen_q", "3", "got 2")),
    ("a longest below 0", lambda: varlen(max_q=-3), ("max_seqlen_q", "-3")),
    ("a longest as text", lambda: varlen(max_k="3"), ("max_seqlen_k", "'3'")),
    ("an epsilon of NaN", lambda: ops.add_layer_norm(torch.randn(2, 4), eps=NAN), ("eps", "nan")),
    ("an epsilon below 0", lambda: ops.add_layer_norm(torch.randn(2, 4), eps=-1), ("eps", "at least 0", "-1")),
    ("a factor of NaN", lambda: ops.embedding(IDS, torch.randn(300, 4), scale=NAN), ("scale", "nan")),
    ("smoothing as text", lambda: cross_entropy(IDS[:, 0], label_smoothing="0.1"), ("label_smoothing", "'0.1'")),
    ("no index to ignore", lambda: cross_entropy(IDS[:, 0], ignore_index=None), ("ignore_index", "None")),
    ("logs as text", lambda: ops.linear_topk(ROWS[0], ROWS[0], 1, log_probs="no"), ("log_probs", "'no'")),
    ("a base of 0", lambda: ops.rotary_tables(5, 8, base=0), ("base", "0")),
    ("no number of positions", lambda: ops.sinusoidal_positions(None, 8), ("num_positions", "None")),
    ("a timescale of 0", lambda: ops.sinusoidal_positions(5, 8, max_timescale=0), ("max_timescale", "0")),
    ("half a position", lambda: ops.rotary_tables(5.5, 8), ("num_positions", "5.5")),
    # Modules.
    ("attention that drops too much", lambda: fnn.MultiheadAttention(16, 2, 1.5), ("dropout", "1.5")),
    ("a norm that drops NaN", lambda: fnn.AddLayerNorm(16, dropout=NAN), ("dropout", "nan")),
    ("a module's window", lambda: fnn.MultiheadAttention(16, 2, window_size=(1,)), ("(left, right)", "(1,)")),
    ("yes or no", lambda: fnn.TransformerEncoderLayer(16, 2, norm_first="no"), ("norm_first", "'no'")),
    ("fewer layers than none", lambda: fnn.Transformer(16, 2, -1, 1), ("num_layers", "-1")),
    ("a stack of nothing", lambda: fnn.TransformerEncoder(None, 2), ("a layer", "NoneType")),
    ("a reduction", lambda: fnn.LinearCrossEntropy(16, 9, reduction="x"), ("reduction", "'x'")),
    ("too much smoothing", lambda: fnn.LinearCrossEntropy(16, 9, label_smoothing=3), ("label_smoothing", "3")),
    # Data.
    ("a text for texts", lambda: train_bpe("one text", 300), ("list of texts", "str")),
    ("texts that are numbers", lambda: train_bpe([3], 300), ("str", "int")),
    ("a vocabulary as text", lambda: train_bpe(["abc"], "300"), ("vocab_size", "'300'")),
    ("a vocabulary beyond all", lambda: train_bpe(["abc"], 10**11), ("vocab_size", "100000000000")),
    ("no text", lambda: BYTES.encode(None), ("str", "NoneType")),
    ("a batch that is a text", lambda: BYTES.encode_batch("abc"), ("list of texts", "str")),
    ("a backend by name", lambda: BPETokenizer("x"), ("train_bpe",)),
    ("lengths as a list", lambda: plan([[3, 2]]), ("lengths (examples, 2)", "[[3, 2]]")),
    ("three sides", lambda: plan(torch.tensor([[3, 2, 1]])), ("lengths (examples, 2)", "(1, 3)")),
    ("lengths with fractions", lambda: plan(LENGTHS.float()), ("lengths", "float32")),
    ("a length below 0", lambda: plan(-LENGTHS), ("at least 0", "-3")),
    ("a budget of NaN", lambda: plan(max_tokens=NAN), ("max_tokens", "nan")),
    ("a seed as text", lambda: plan(seed="0"), ("seed", "'0'")),
    ("no examples", lambda: collate([], packed=True), ("example",)),
    ("pairs for examples", lambda: collate([([3], [4])], packed=True), ("Example", "tuple")),
    ("both kinds", lambda: collate([Example([3], [4]), Example([], [4, 5])], packed=True), ("in none",)),
    ("nothing to predict", lambda: collate([Example([3], [])], packed=False), ("predict",)),
    ("ids beyond 32 bits", lambda: Examples([Example([2**40], [4])]), ("32 bits", "1099511627776")),
    ("fewer numbers than none", lambda: number_pairs(-1, seed=0), ("count", "-1")),
    ("no seed", lambda: number_pairs(5, seed=None), ("seed", "None")),
    ("a number as text", lambda: english("5"), ("number from 0", "'5'")),
    # Training.
    ("no settings", lambda: TrainConfig.from_dict(None), ("mapping", "NoneType")),
    ("a number as a setting", lambda: TrainConfig.from_dict({3: 1}), ("unknown setting 3",)),
    ("a mapping for settings", lambda: start({}, "run"), ("TrainConfig", "dict")),
]


@each("call, phrases", [case[1:] for case in CALLS])
def test_a_malformed_call_says_what_was_expected_and_what_came(call, phrases, tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError) as refused:
        call()
    for word in phrases:
        assert word in str(refused.value), str(refused.value)
    assert not list(tmp_path.iterdir())


def test_a_refused_example_leaves_the_others() -> None:
    examples = Examples([Example([3, 4], [5])])
    before = examples.fingerprint()
    for source, target in (([6], [2**40]), ([2**40], [6]), ([6, 7.5], [6]), ([6], ["a"])):
        with pytest.raises(ValueError, match=r"\b32 bits\b"):
            examples.append(source, target)
        assert len(examples) == 1 and examples.fingerprint() == before
    examples.append([6], [7])
    assert examples[1] == Example([6], [7])
