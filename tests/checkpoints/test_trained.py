"""Models that are trained here, in the files of other programs, against these programs: BLEU, perplexity, tokens.

    pip install ctranslate2==4.8.5 gguf xllamacpp && pytest -m slow tests/checkpoints/test_trained.py

Trained weights have what random ones lack: a few large numbers, and one likely token. The texts are number words. Each
training takes about a minute.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

from fastformer.checkpoints.gguf.blocks import Kind
from fastformer.checkpoints.gguf.write import write_gguf
from fastformer.generation import Translator, generate
from fastformer.models import GPT
from fastformer.number_words import english, german, number_pairs
from tests.checkpoints.families import sentencepiece_model
from tests.checkpoints.test_gguf import LLAMA, load
from tests.checkpoints.test_llama_cpp import LlamaCpp, with_floats
from tests.foreign.ctranslate2_folders import convert_model

pytestmark = pytest.mark.slow
UNSEEN, BATCH = 1000, 64
NUMBERS = number_pairs(20_000 + UNSEEN, seed=1)


def trained(model: Any, losses: Iterator[Tensor], steps: int, peak: float) -> None:
    """Trains a model by the mean losses of batches."""
    optimizer = torch.optim.Adam(model.parameters(), peak, betas=(0.9, 0.98))
    warm = max(1, steps // 8)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min((step + 1) / warm, (steps - step) / (steps - warm))
    )
    for _ in range(steps):
        loss = next(losses)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()


def padded(rows: list[list[int]], value: int) -> Tensor:
    return torch.nn.utils.rnn.pad_sequence([torch.tensor(row) for row in rows], batch_first=True, padding_value=value)


@pytest.fixture(scope="module")
def marian() -> tuple[Any, list[str], bytes]:
    """A Marian that translates English number words to German ones, its tokens, and its SentencePiece model."""
    pytest.importorskip("ctranslate2", reason="the ctranslate2 library is not installed")
    sentencepiece = pytest.importorskip("sentencepiece", reason="the sentencepiece library is not installed")
    texts = [(english(number), german(number)) for number in NUMBERS[UNSEEN:]]
    pieces = sentencepiece_model(
        [side for pair in texts[:2000] for side in pair], vocab_size=200, character_coverage=1.0
    )
    processor = sentencepiece.SentencePieceProcessor(model_proto=pieces)
    tokens = ["</s>", "<unk>", *(processor.id_to_piece(i) for i in range(3, len(processor))), "<pad>"]
    ids, pad = {token: i for i, token in enumerate(tokens)}, len(tokens) - 1
    rows = [tuple([*(ids[p] for p in processor.encode(side, out_type=str)), 0] for side in pair) for pair in texts]
    torch.manual_seed(0)
    sizes = {f"{side}_{name}": size for side in ("encoder", "decoder")
             for name, size in (("layers", 2), ("attention_heads", 4), ("ffn_dim", 512))}  # fmt: skip
    model = transformers.MarianMTModel(
        transformers.MarianConfig(
            vocab_size=len(tokens), d_model=128, activation_function="swish", scale_embedding=True, dropout=0.0,
            max_position_embeddings=128, pad_token_id=pad, decoder_start_token_id=pad, eos_token_id=0, **sizes,
        )
    ).train()  # fmt: skip
    with torch.no_grad():
        model.get_input_embeddings().weight[pad] = 0  # CTranslate2's decoder begins with zeros

    def losses() -> Iterator[Tensor]:
        draw = torch.Generator().manual_seed(0)
        while True:
            batch = [rows[i] for i in torch.randint(len(rows), (BATCH,), generator=draw).tolist()]
            source, target = (padded([row[side] for row in batch], value) for side, value in ((0, pad), (1, -100)))
            yield model(input_ids=source, attention_mask=(source != pad).long(), labels=target).loss

    trained(model, losses(), 500, 2e-3)
    return model.eval(), tokens, pieces


# In int8 both programs round the inputs of matrices, each in its own way, and find other texts for 2 in 100.
@pytest.mark.parametrize(("quantization", "most"), [("float32", 0.1), ("int8", 0.25)])
def test_bleu_is_that_of_ctranslate2(
    quantization: str, most: float, marian: Any, tmp_path: Path, record_property: Any
) -> None:
    import ctranslate2

    sacrebleu = pytest.importorskip("sacrebleu", reason="the sacrebleu library is not installed")
    model, tokens, pieces = marian
    convert_model(folder := tmp_path / "marian", "Marian", model, tokens, quantization)
    for side in ("source", "target"):
        (folder / f"{side}.spm").write_bytes(pieces)
    translator = Translator.from_pretrained(folder, device="cpu")
    assert translator.model.precision == (None if quantization == "float32" else "int8")
    threads = torch.get_num_threads()  # CTranslate2 sets PyTorch's as well
    engine = ctranslate2.Translator(str(folder), device="cpu", compute_type=quantization, intra_threads=threads)
    sources, references = ([spell(number) for number in NUMBERS[:UNSEEN]] for spell in (english, german))
    backend: Any = translator.tokenizer
    processor = backend.backend.processor
    split = [[*processor.encode(source, out_type=str), "</s>"] for source in sources]
    for beams in (1, 4):
        found = engine.translate_batch(split, beam_size=beams, max_decoding_length=96, min_decoding_length=0)
        theirs = [processor.decode_pieces(each.hypotheses[0]) for each in found]
        rules: dict[str, Any] = {"beam_rules": "transformers", "length_penalty": 1.0, "early_stopping": True}
        options = {"num_beams": beams, "max_new_tokens": 96, **(rules if beams > 1 else {})}
        ours = translator.translate(sources, **options)
        scores = [sacrebleu.corpus_bleu(texts, [references], tokenize="char").score for texts in (ours, theirs)]
        same = sum(map(str.__eq__, ours, theirs))
        record_property(f"{beams} beams: BLEU here, CTranslate2's, equal texts", (*scores, same))
        assert scores[0] > 50 and abs(scores[0] - scores[1]) <= most


TEXT, CONTEXT, NEW, PROMPTS = 64, 24, 64, 8


@pytest.fixture(scope="module")
def llama() -> tuple[GPT, Any, Tensor]:
    """A small Llama that has read number words, its tokenizer, and rows of tokens that it hasn't read."""
    source, tokenizer = load(LLAMA, dtype=torch.float32)
    config = dataclasses.replace(
        source.config, d_model=128, num_heads=4, num_kv_heads=2, head_dim=None, num_layers=3, d_ff=256, max_len=256,
        rotary_scaling=None,
    )  # fmt: skip
    torch.manual_seed(0)
    model = GPT(config).train()
    ids = torch.tensor(tokenizer.encode(", ".join(map(english, NUMBERS))))
    rows = ids[: len(ids) // (TEXT + 1) * (TEXT + 1)].view(-1, TEXT + 1)
    unseen, rows = rows[:16], rows[16:]

    def losses() -> Iterator[Tensor]:
        draw = torch.Generator().manual_seed(0)
        while True:
            batch = rows[torch.randint(len(rows), (32,), generator=draw)]
            yield model.loss(batch[:, :-1], batch[:, 1:], reduction="mean")

    trained(model, losses(), 300, 2e-3)
    return model.eval(), tokenizer, unseen


class Transformers:
    """A file in transformers, which reads it by the gguf package."""

    def __init__(self, path: Path) -> None:
        pytest.importorskip("gguf", reason="the gguf library is not installed")
        self._model = transformers.LlamaForCausalLM.from_pretrained(path.parent, gguf_file=path.name)

    def log_probs(self, tokens: list[int], first: int, vocab_size: int) -> Tensor:
        """Returns those of the tokens at the places from `first` on."""
        with torch.inference_mode():
            logits: Tensor = self._model(torch.tensor([tokens[:-1]])).logits[0, first - 1 :]
        return logits.log_softmax(-1)


class OfLlamaCpp(LlamaCpp):
    def __init__(self, path: Path) -> None:
        pytest.importorskip("xllamacpp", reason="the xllamacpp library is not installed")
        super().__init__(path)

    def log_probs(self, tokens: list[int], first: int, vocab_size: int) -> Tensor:
        return torch.stack([self.next(tokens[:place], vocab_size) for place in range(first, len(tokens))])


# Programs, in how many rows near ties are decided otherwise, and by how much their log-probabilities differ at most.
PROGRAMS: dict[str, tuple[Callable[[Path], Any], int, float]] = {
    "transformers": (Transformers, 1, 1e-4),
    "llama.cpp": (OfLlamaCpp, PROMPTS, 0.1),  # it rounds the inputs of matrices
    "llama.cpp, with the numbers as floats": (lambda path: OfLlamaCpp(with_floats(path)), 1, 1e-3),
}


@pytest.mark.parametrize("kind", [Kind.Q8_0, Kind.Q4_0])
@pytest.mark.parametrize("program", PROGRAMS)
def test_perplexity_and_greedy_tokens_are_those_of(
    program: str, kind: Kind, llama: Any, tmp_path: Path, record_property: Any
) -> None:
    model, tokenizer, unseen = llama
    write_gguf(path := tmp_path / "x.gguf", model, tokenizer, kind)
    make, most, gap = PROGRAMS[program]
    engine, ours, size = make(path), load(path, dtype=torch.float32)[0], model.config.vocab_size
    assert ours.precision == {Kind.Q8_0: "int8", Kind.Q4_0: "int4"}[kind]
    with torch.inference_mode():
        logs = ours(unseen[:, :-1]).log_softmax(-1).gather(-1, unseen[:, 1:, None])[:, 7:]
    theirs = torch.stack([engine.log_probs(row, 8, size) for row in unseen.tolist()]).gather(-1, unseen[:, 8:, None])
    found, due = (math.exp(-float(each.mean())) for each in (logs, theirs))
    prompts = unseen[:PROMPTS, :CONTEXT]
    tokens = generate(ours, prompts, engine="cpp", precision="fp32", min_new_tokens=NEW, max_new_tokens=NEW)
    different = 0
    for row in tokens:
        scores = engine.log_probs(row.tolist(), CONTEXT, size)
        for place in (scores.argmax(-1) != row[CONTEXT:]).nonzero()[:1]:
            assert scores[place].max() - scores[place, row[CONTEXT + place]] < gap
            different += 1
    record_property("perplexity here, the program's, rows that differ", (found, due, different))
    assert found < 10 and abs(found / due - 1) < 1e-3 and different <= most
