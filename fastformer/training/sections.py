"""The settings of a training run, in sections: their names, types and defaults.

To add a setting, add a field to the section in which a reader would look for it, and its line to the docstring. The
flag, its help, the check of its type and bounds, and the key in the YAML file are made from these two.
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
# The settings class of each architecture, and its presets.
ARCHITECTURES: dict[Architecture, tuple[type[Any], dict[str, dict[str, Any]]]] = {
    "transformer": (TransformerConfig, Transformer.presets),
    "gpt": (GPTConfig, GPT.presets),
    "lstm": (LSTMConfig, {"tiny": {}}),
}
# The settings of a model that its tokenizer determines. The LSTM has its special ids as fields of its own.
SPECIAL_IDS = {"special_ids", *(f.name for f in fields(SpecialIds))}
OF_TOKENIZER = {"vocab_size", "source_vocab_size", *SPECIAL_IDS}

# Settings that suit a built-in task and replace the defaults; the user's settings override both.
TASKS: dict[str, dict[str, Any]] = {
    # Exact match 0.99 on numbers of up to nine digits, within a minute on two cores. Every answer is a function of its
    # source, so no regularisation is needed.
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
        preset: the sizes to begin with: "tiny", "base", "base-paper" or "big" for a transformer, "tiny", "small",
            "gpt2", "llama-small" or "qwen3-small" for a gpt.
        settings: settings that override the preset's.
    """

    model: Architecture = "transformer"
    preset: str = "tiny"
    settings: dict[str, Any] = field(default_factory=dict)


@dataclass
class Data:
    """The data: `task`, or train_source with train_target, or train_tsv, or (for a gpt) train_text, or train_data.

    Separate several corpora with commas, or give a list in YAML: `--train_tsv news.tsv,talks.tsv`.

    Attributes:
        task: "numbers", the built-in task, with settings that suit it unless you give others; omit it to train on
            files.
        train_source: a UTF-8 file, one sentence a line, aligned line by line with train_target. It may be compressed, a
            pipe, or a column of a table: FILE.jsonl:COLUMN, .parquet, .csv or .tsv. Or several files, separated by
            commas, and as many in train_target.
        train_target: the translations of train_source.
        val_source: like train_source, for validation; without it a hundredth of each corpus is held out, at most 500
            lines.
        val_target: the translations of val_source.
        train_tsv: a file of source<TAB>target lines instead, or several.
        val_tsv: like train_tsv, for validation.
        train_text: plain text, for a gpt: a file, a folder of *.txt files, each of which is a document, or a column of
            a table, each row of which is a document; or several of these.
        val_text: like train_text, for validation; without it the last tenth of each corpus is held out.
        train_data: a folder of shards that `fastformer prepare` made of such files, with its tokenizer and its
            validation
            data: for text that doesn't fit in memory.
        shards_at_once: the number of shards of train_data whose examples are shuffled together; memory grows with it.
        held_out: the pairs that are held out if you give no validation data: "random" ones, which depend on the seed
            and the number of lines, or the "last" ones of each corpus.
        data_weights: how often an epoch has each example of a corpus, one number for each corpus, such as 2,0.5; a
            fraction draws other examples in each epoch. By default once.
        skip_bad_lines: skip and count lines that are empty, too long or not UTF-8, instead of stopping.
        seqlen: the window of a language model.
        max_len: longer examples are skipped and counted.
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
    train_data: str | None = field(default=None, kw_only=True)  # so that the older fields keep their positions
    shards_at_once: Positive = field(default=4, kw_only=True)
    held_out: Literal["random", "last"] = "random"
    data_weights: str | None = None
    skip_bad_lines: bool = False
    seqlen: Positive = 128
    max_len: Positive = 256


@dataclass
class Tokens:
    """The tokenizer. It is saved with the model, so that text is always tokenized as in training.

    Attributes:
        tokenizer: "bpe" (trained on the training text), "bytes", or the path of a tokenizer: a tokenizer.json, a
            SentencePiece .model, a folder with one of them, or a run folder.
        vocab_size: the size of a BPE, for both languages together; 256 tokens for single bytes, which spell anything
            that no other token spells, are added.
        shared_vocab: one vocabulary and one table of embeddings for source and target; false: each side has its own
            (vocab_size applies to each, or tokenizer has the paths of two, source first, separated by a comma).
        normalization: the form to which a BPE normalises text: "nfkc" (Unicode's, which also changes the look of text:
            "10²" becomes "102", "½" becomes "1⁄2", a no-break space becomes a space), "nfc" (which doesn't), or "none";
            with "_lower", or as "lower" alone, in lower case. Translations have that form, too.
        spaces: "collapse": a BPE replaces runs of spaces by one space and drops those at the ends, in training and use;
            "keep": spaces are text; "auto": collapse for translators, keep for a gpt.
        max_token_length: the most characters of a BPE's token, its space included.
        user_tokens: tokens that you define, separated by commas, such as <2de>,<2fr>: where a text spells one, it is
            neither split nor normalised.
        drop_user_tokens: omit these tokens from generated text, like special tokens.
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
        max_tokens: the most tokens of a batch, on the longer side.
        accumulate: batches per update; gradients are weighted by tokens.
        steps: the number of updates.
        epochs: passes over the training data instead of a number of updates; 0 = use steps.
        max_minutes: ends the training earlier; 0 = no limit.
        schedule: "noam" (the paper), "t2t" (tensor2tensor), "linear", "cosine", "constant"; all with warmup.
        lr: the peak; for noam and t2t the factor of the formula (the paper 1, tensor2tensor 2).
        warmup: the number of updates until the peak.
        beta1: the decay of AdamW's mean of gradients.
        beta2: the decay of AdamW's mean of squared gradients.
        eps: added to AdamW's denominator.
        weight_decay: the weight decay of AdamW.
        clip: the largest gradient norm; 0 = off.
        label_smoothing: for training only; validation reports the plain NLL.
        smooth_others: spread the smoothing over the other classes, as tensor2tensor does.
        init_from: a run folder from whose model and tokenizer the training begins (fine-tuning): its best model, or its
            average, with a new optimizer, a new schedule, and zero updates done.
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
        ema: the decay of a running average of the weights, which validation and the result then use; 0 = off.
        average_last: the result averages the weights of the last checkpoints; 1 = off.
        val_every: updates between validations; 0 = only at the end.
        save_every: updates between checkpoints; 0 = only at the end.
        log_every: updates between lines of the log.
        keep_last: the number of checkpoints to keep, besides the best model.
        patience: stop after this many validations without an improvement; 0 = never.
        val_examples: the number of examples that are decoded for exact match and BLEU; 0 = none.
        bleu_tokenize: the tokenization for BLEU: "13a", for languages with spaces; "zh", "ja-mecab", "ko-mecab",
            "char" or "flores200" for others. "flores101", "flores200" and "spBLEU-1K" need their model in sacreBLEU's
            folder.
        samples: the number of translations in the log.
        report: write report.html, as `fastformer report` does, when the training ends.
        best_by: the score that determines "the best model": "nll", "bleu", "chrf", "exact_match", or "auto", which
            depends on the task.
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
        checkpointing: recompute the layers in the backward pass instead of storing their activations.
        cuda_graphs: launch an update at once, as a CUDA graph, instead of in thousands of calls, for which a GPU waits
            if models or batches are small. Packed batches are rounded up to a few sizes, by at most a sixteenth.
            "auto": on a GPU, if the run can; otherwise the log says why not.
        seed: the seed of the weights, the data order and dropout.
        device: "auto", "cpu", "cuda".
        sharding: the way in which several processes, which torchrun starts, share the weights: "ddp": each has all of
            them; "fsdp": each holds a part of weights, gradients and averages, and gathers the rest layer by layer.
        dropout_seeds: the source of dropout's random numbers: "batch": the seed, the update and the batch, so that any
            number of processes drops the same; "run": one generator for the whole run, which needs a single process;
            "auto": run, and batch from the first time that torchrun starts or resumes the run.
        rank_timeout: the seconds that a process waits for the others before it gives up.
    """

    precision: Literal["fp32", "bf16", "fp16"] = "fp32"
    checkpointing: bool = False
    cuda_graphs: bool | Literal["auto"] = "auto"
    seed: Seed = 0
    device: str = "auto"
    sharding: Literal["ddp", "fsdp"] = "ddp"
    dropout_seeds: Literal["auto", "run", "batch"] = "auto"
    rank_timeout: Positive = 600


# The settings that name data, by kind, and the settings that name the validation data for each.
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

# The settings that accept several values, separated by commas.
SEVERAL = {*SOURCES["pairs"], *SOURCES["tsv"], *SOURCES["text"], "data_weights", "tokenizer", "user_tokens"}

WORDS = ("bpe", "bytes")  # the values of tokenizer that aren't paths

# In the order in which `fastformer train --help` shows them.
SECTIONS = (Model, Data, Filters, Tokens, Optimisation, Validation, Machine)
