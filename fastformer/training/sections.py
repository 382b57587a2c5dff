"""The settings of a training run in sections: what there is, of what type, and its default.

To add a setting, add a field to the section where a reader would look for it, and its line to the docstring: the flag,
its help, the check of its type and bounds and the key of the YAML file follow from these two.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Annotated, Any, Literal

from fastformer.baseline.lstm import LSTMConfig
from fastformer.data.bpe import MAX_TOKEN_LENGTH, Normalization
from fastformer.data.filters import Filters
from fastformer.models import GPT, GPTConfig, Transformer, TransformerConfig
from fastformer.settings import Amount, BleuTokenize, Count, Positive, Probability, Range, Seed
from fastformer.special_ids import SpecialIds

Architecture = Literal["transformer", "gpt", "lstm"]
# The settings of each architecture, and its presets.
ARCHITECTURES: dict[Architecture, tuple[type[Any], dict[str, dict[str, Any]]]] = {
    "transformer": (TransformerConfig, Transformer.presets),
    "gpt": (GPTConfig, GPT.presets),
    "lstm": (LSTMConfig, {"tiny": {}}),
}
# The settings of a model that its tokenizer decides on. The LSTM has its special ids as fields of its own.
SPECIAL_IDS = {"special_ids", *(f.name for f in fields(SpecialIds))}
OF_TOKENIZER = {"vocab_size", "source_vocab_size", *SPECIAL_IDS}

# Settings that suit a built-in task, in place of the defaults; the user's settings override both.
TASKS: dict[str, dict[str, Any]] = {
    # Exact match 0.99 on numbers of up to nine digits, within a minute on two cores. Every answer is a function of its
    # source, so there is nothing to regularise.
    "numbers": {
        "vocab_size": 200,
        "max_len": 64,
        "batching": "bucketed",
        "max_tokens": 2048,
        "steps": 900,
        "lr": 3e-3,
        "warmup": 100,
        "log_every": 100,
        "model": {"dropout": 0.0, "attention_dropout": 0.0, "activation_dropout": 0.0},
    },
}


@dataclass
class Model:
    """The model.

    Attributes:
        model: the architecture: "transformer", "gpt" or "lstm" (the classic baseline).
        preset: which sizes it begins from: "tiny", "base", "base-paper" or "big" for a transformer, "tiny", "small",
            "gpt2", "llama-small" or "qwen3-small" for a gpt.
        settings: what is set over the preset.
    """

    model: Architecture = "transformer"
    preset: str = "tiny"
    settings: dict[str, Any] = field(default_factory=dict)


@dataclass
class Data:
    """The data: `task`, or train_source with train_target, or train_tsv, or (for a gpt) train_text, or train_data.

    Several corpora are named with commas between them, or as a list in YAML: `--train_tsv news.tsv,talks.tsv`.

    Attributes:
        task: "numbers", the built-in task, with settings that suit it unless others are given; leave it out to train
            on files.
        train_source: a UTF-8 file, one sentence a line, aligned line by line with train_target; compressed or not, a
            pipe, or a column of a table: FILE.jsonl:COLUMN, .parquet, .csv or .tsv; or several files with commas
            between them, and as many in train_target.
        train_target: its translations.
        val_source: likewise for validation; without it a hundredth of each corpus is held out, at most 500 lines.
        val_target: the translations of val_source.
        train_tsv: a file of source<TAB>target lines instead, or several.
        val_tsv: likewise for validation.
        train_text: plain text, for a gpt: a file, a folder of *.txt files, each of which is a document, or a column of
            a table, each row of which is one; or several.
        val_text: likewise for validation; without it the last tenth of each corpus is held out.
        train_data: a folder of shards that `fastformer prepare` made of files like these, with its tokenizer and its
            validation data: for text that doesn't fit in memory.
        shards_at_once: shards of train_data whose examples are shuffled together; memory grows with it.
        held_out: which pairs are held out where no validation data are given: "random" ones, which the seed and the
            number of lines decide on, or the "last" ones of each corpus.
        data_weights: how often an epoch has each example of a corpus, one number for each, such as 2,0.5; a fraction
            draws other examples in each epoch. Left out: once.
        skip_bad_lines: leave out lines that are empty, too long or no UTF-8, and count them, instead of stopping.
        seqlen: window of a language model.
        max_len: longer examples are left out, and counted.
    """

    task: Literal["numbers"] | None = None
    train_source: str | None = None
    train_target: str | None = None
    val_source: str | None = None
    val_target: str | None = None
    train_tsv: str | None = None
    val_tsv: str | None = None
    train_text: str | None = None
    val_text: str | None = None
    train_data: str | None = field(default=None, kw_only=True)  # so that the older ones keep their places
    shards_at_once: Positive = field(default=4, kw_only=True)
    held_out: Literal["random", "last"] = "random"
    data_weights: str | None = None
    skip_bad_lines: bool = False
    seqlen: Positive = 128
    max_len: Positive = 256


@dataclass
class Tokens:
    """The tokenizer. It is saved with the model, so that text is read in the same way when the model is used.

    Attributes:
        tokenizer: "bpe" (trained on the training text), "bytes", or the path of a tokenizer: a tokenizer.json, a
            SentencePiece .model, a folder with one of them, a run.
        vocab_size: of a BPE, both languages together; 256 bytes, which spell what no token does, come on top.
        shared_vocab: one vocabulary and one table of embeddings for source and target; false: each side has its own
            (of vocab_size each, or with tokenizer the paths of two, source first, with a comma between them).
        normalization: the form that a BPE brings text to: "nfkc" (Unicode's, which also changes how a text looks: "10²"
            becomes "102", "½" becomes "1⁄2", a no-break space becomes a space), "nfc" (which doesn't), or "none"; with
            "_lower", or as "lower" alone, in lower case. Translations come in that form, too.
        spaces: "collapse": a BPE takes runs of spaces for one and drops those at the ends, in training and use; "keep":
            spaces are text; "auto": collapse for translators, keep for a gpt.
        max_token_length: the most characters of a BPE's token, its space included.
        user_tokens: tokens that you define, with commas between them, such as <2de>,<2fr>: a text that spells one is
            neither split nor normalised there.
        drop_user_tokens: leave them out of what the model writes, as special tokens are.
    """

    tokenizer: str = "bpe"
    vocab_size: Positive = 8000
    shared_vocab: bool = True
    normalization: Normalization = "nfkc"
    spaces: Literal["auto", "collapse", "keep"] = "auto"
    max_token_length: Annotated[int, Range(2)] = MAX_TOKEN_LENGTH
    user_tokens: str | None = None
    drop_user_tokens: bool = False


@dataclass
class Optimisation:
    """Batches and optimisation.

    Attributes:
        batching: "packed" (no padding), "bucketed" or "random" (padded).
        max_tokens: of a batch, on the longer side.
        accumulate: batches per update; gradients are weighted by tokens.
        steps: updates.
        epochs: passes over the training data instead of a number of updates; 0 = as steps says.
        max_minutes: ends the training earlier; 0 = no limit.
        schedule: "noam" (the paper), "t2t" (tensor2tensor), "linear", "cosine", "constant"; all with warmup.
        lr: the peak; for noam and t2t the factor in front of the formula (the paper 1, tensor2tensor 2).
        warmup: updates until the peak.
        beta1: decay of AdamW's mean of gradients.
        beta2: decay of AdamW's mean of squared gradients.
        eps: added to AdamW's denominator.
        weight_decay: of AdamW.
        clip: the largest gradient norm; 0 = off.
        label_smoothing: in training; validation reports the plain NLL.
        smooth_others: spread it over the other classes, as tensor2tensor does.
        init_from: a run folder whose model and tokenizer the training begins with (fine-tuning): its best model, or its
            average, with a new optimizer, rates from the beginning, and no update done.
    """

    batching: Literal["packed", "bucketed", "random"] = "packed"
    max_tokens: Positive = 4096
    accumulate: Positive = 1
    steps: Positive = 1000
    epochs: Amount = 0.0
    max_minutes: Amount = 0.0
    schedule: Literal["noam", "t2t", "linear", "cosine", "constant"] = "linear"
    lr: Amount = 2e-3
    warmup: Count = 200
    beta1: Probability = 0.9
    beta2: Probability = 0.98
    eps: Amount = 1e-9
    weight_decay: Amount = 0.0
    clip: Amount = 1.0
    label_smoothing: Probability = 0.0
    smooth_others: bool = False
    init_from: str | None = None


@dataclass
class Validation:
    """Validating and saving.

    Attributes:
        ema: decay of a running average of the weights, which validation and the result then use; 0 = off.
        average_last: the result averages the weights of the last checkpoints; 1 = off.
        val_every: updates between validations; 0 = at the end only.
        save_every: updates between checkpoints; 0 = at the end only.
        log_every: updates between lines of the log.
        keep_last: checkpoints that stay, besides the best model.
        patience: stop after so many validations without a better one; 0 = never.
        val_examples: decoded for exact match and BLEU; 0 = none.
        bleu_tokenize: how BLEU cuts text into words: "13a", for languages with spaces; "zh", "ja-mecab", "ko-mecab",
            "char" or "flores200" for others. "flores101", "flores200" and "spBLEU-1K" need their model in sacreBLEU's
            folder.
        samples: translations in the log.
        report: write report.html, as `fastformer report` does, when the training ends.
        best_by: what "the best model" means: "nll", "bleu", "chrf", "exact_match", or "auto", which fits the task.
    """

    ema: Probability = 0.0
    average_last: Positive = 1
    val_every: Count = 500
    save_every: Count = 500
    log_every: Positive = 50
    keep_last: Positive = 3
    patience: Count = 0
    val_examples: Count = 200
    bleu_tokenize: BleuTokenize = "13a"
    samples: Count = 3
    report: bool = field(default=False, kw_only=True)
    best_by: Literal["auto", "nll", "bleu", "chrf", "exact_match"] = "auto"


@dataclass
class Machine:
    """The machine.

    Attributes:
        precision: "fp32", or autocast in "bf16" or "fp16".
        checkpointing: recompute the layers in backward instead of keeping what is inside.
        cuda_graphs: launch an update at once, as a CUDA graph, instead of by thousands of calls, which a GPU waits for
            when models or batches are small. Packed batches are rounded up to a few sizes, by at most a sixteenth.
        seed: of the weights, the data order and dropout.
        device: "auto", "cpu", "cuda".
        sharding: what several processes, which torchrun starts, do with the weights: "ddp": each has all of them;
            "fsdp": each keeps a part of weights, gradients and averages, and borrows the rest layer by layer.
        dropout_seeds: what dropout is drawn from: "batch": the seed, the update and the batch, so that any number of
            processes drops the same; "run": one generator from beginning to end, as one process can; "auto": as
            run, until torchrun starts the run or goes on with it, and as batch from there on.
        rank_timeout: seconds that a process waits for the others before it gives up.
    """

    precision: Literal["fp32", "bf16", "fp16"] = "fp32"
    checkpointing: bool = False
    cuda_graphs: bool = False
    seed: Seed = 0
    device: str = "auto"
    sharding: Literal["ddp", "fsdp"] = "ddp"
    dropout_seeds: Literal["auto", "run", "batch"] = "auto"
    rank_timeout: Positive = 600


# The settings that name data, by kind, and what validates which.
SOURCES = {
    "task": ("task",),
    "pairs": ("train_source", "train_target", "val_source", "val_target"),
    "tsv": ("train_tsv", "val_tsv"),
    "text": ("train_text", "val_text"),
    "shards": ("train_data",),
}
VALIDATED_BY = {
    "train_source": "val_source and val_target",
    "train_tsv": "val_tsv",
    "train_text": "val_text",
    "train_data": "that of its folder",
}

# The settings that take several values, with commas between them.
SEVERAL = {*SOURCES["pairs"], *SOURCES["tsv"], *SOURCES["text"], "data_weights", "tokenizer", "user_tokens"}

WORDS = ("bpe", "bytes")  # what the tokenizer may be, besides paths

# In the order in which `fastformer train --help` shows them.
SECTIONS = (Model, Data, Filters, Tokens, Optimisation, Validation, Machine)
