"""Selects the cases in the published tables and pictures: fastformer beside each rival.

To show another case, add a line; to show another rival, add its name to the cases that have it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from benchmarks.cases.models.bench_small_work import SIZES, THREADS
from benchmarks.measure import record
from benchmarks.measure.console import is_quiet
from benchmarks.publish.latest import Row, case_of, matches, platform_of, was_timed

Fields = Mapping[str, Any]


class Panel(NamedTuple):
    """The number formats of both sides of a comparison."""

    name: str
    ours: Fields
    rival: Fields


FP32 = Panel("fp32", {"dtype": ("float32", "fp32")}, {"dtype": ("float32", "fp32")})
INT8 = Panel("int8", {"dtype": "int8"}, {"dtype": "int8"})
BF16 = Panel("bf16", {"dtype": ("bfloat16", "bf16")}, {"dtype": ("bfloat16", "bf16")})


class Comparison(NamedTuple):
    """Two rows of one run, compared by their ratio."""

    label: str
    panel: str
    against: str
    ours: Row
    rival: Row

    @property
    def ratio(self) -> float:
        """How many times faster fastformer is: from turns of the same rounds if recorded, else from medians."""
        if (row := self._of_rounds) is not None:
            return float(row["speedup" if row is self.ours else "ours"])
        ours, rival = record.seconds(self.ours), record.seconds(self.rival)
        assert ours and rival
        return rival / ours

    @property
    def is_unsteady(self) -> bool:
        """Whether it was disturbed, or its passes disagree; False if it wasn't watched."""
        return (row := self._of_rounds) is not None and is_quiet(row) is False

    @property
    def _of_rounds(self) -> Row | None:
        """Returns the row whose ratio is from turns of the same rounds; None if neither has one."""
        if self.ours["provider"] == "fastformer":
            return self.rival if self.rival.get("ours") else None
        is_baseline = self.ours.get("baseline") == self.rival["provider"]
        return self.ours if self.ours.get("ours") and is_baseline else None


@dataclass(frozen=True)
class TableCase:
    """One line of a table, or one group of bars.

    Attributes:
        label: the name of the work.
        where: the fields of its rows; fields of the shape can be given directly (`benchmarks.publish.latest.matches`).
        against: the providers that fastformer has to be compared with: a table says if one was not measured. Others
            that were measured with them are shown, too.
        ours: the provider of fastformer.
        panels: the number formats.
    """

    label: str
    where: Fields
    against: tuple[str, ...]
    ours: str = "fastformer"
    panels: tuple[Panel, ...] = (FP32, BF16)

    def rows(self, rows: Iterable[Row]) -> list[Row]:
        """Returns the rows of the case, on a CPU."""
        return [row for row in rows if matches(row, self.where) and was_timed(row) and platform_of(row) == "cpu"]

    def rivals(self, rows: Iterable[Row]) -> list[str]:
        """Returns the required rivals, and then all others that were measured."""
        measured = dict.fromkeys(row["provider"] for row in self.rows(rows))
        others = (name for name in measured if name not in (*self.against, self.ours) and not is_ours(name))
        return [*self.against, *others]

    def comparisons(self, rows: Iterable[Row]) -> Iterator[Comparison]:
        """Yields the comparisons that were measured."""
        rows = self.rows(rows)
        for panel in self.panels:
            for against in self.rivals(rows):
                comparison = self._compare(rows, panel, against)
                if comparison is not None:
                    yield comparison

    def _compare(self, rows: list[Row], panel: Panel, against: str) -> Comparison | None:
        """Compares two providers in the latest run; with the most threads that both have.

        Raises:
            ValueError: the fields match several cases of that run.
        """
        pairs = [
            Comparison(self.label, panel.name, against, ours, rival)
            for ours in rows
            if matches(ours, {"provider": self.ours, **panel.ours})
            for rival in rows
            if matches(rival, {"provider": against, **panel.rival}) and case_of(ours) == case_of(rival)
        ]

        def rank(pair: Comparison) -> tuple[str, int]:
            return pair.ours.get("time") or "", pair.ours.get("threads") or 0

        pairs.sort(key=rank, reverse=True)
        same = [pair for pair in pairs if rank(pair) == rank(pairs[0])]
        if len(same) > 1:
            shapes = [pair.ours.get("shape") for pair in same]
            raise ValueError(f"{self.label!r} against {against}: expected fields of one case, they fit {shapes}")
        return same[0] if same else None


def is_ours(provider: str) -> bool:
    """Returns whether a provider is a form of fastformer, or not a program ("read" only reads the weights)."""
    return provider == "read" or any(part.split()[0] in ("fastformer", "accelerated") for part in provider.split(","))


def _op(label: str, op: str, mode: str, against: str = "eager, torch.compile", **shape: Any) -> TableCase:
    return TableCase(label, {"op": op, "mode": mode, **shape}, tuple(against.split(", ")))


OPS = (
    _op("causal attention (2, 8, 2048, 64), forward", "attention", "fwd", "eager, sdpa, torch.compile",
        batch=2, seqlen=2048, causal=True, dropout_p=0.0),
    _op("causal attention (2, 8, 2048, 64), training", "attention", "fwdbwd", "eager, sdpa, torch.compile",
        batch=2, seqlen=2048, causal=True, dropout_p=0.0),
    _op("causal attention (4, 8, 512, 64), dropout, training", "attention", "fwdbwd", "eager, sdpa, torch.compile",
        batch=4, seqlen=512, causal=True, dropout_p=0.1),
    _op("add_layer_norm (4096, 512), training", "add_layer_norm", "fwdbwd", rows=4096, dim=512, dropout_p=0.0),
    _op("add_layer_norm (4096, 512), dropout, training", "add_layer_norm", "fwdbwd", rows=4096, dim=512, dropout_p=0.1),
    _op("feed_forward (2048, 512, 2048), training", "feed_forward", "fwdbwd", activation="relu", dropout_p=0.0),
    _op("feed_forward (2048, 512, 2048), dropout, training", "feed_forward", "fwdbwd",
        activation="relu", dropout_p=0.1),
    _op("linear_cross_entropy (4096, 512, 32000), training", "linear_cross_entropy", "fwdbwd", vocab_size=32000),
    _op("embedding (64, 32, 512), dropout, training", "embedding", "fwdbwd", dropout_p=0.1),
    _op("linear_topk of 64 rows (512, 32000), k 8", "linear_topk", "fwd", rows=64, vocab_size=32000, k=8),
    _op("rotary (4, 512, 8, 64), training", "rotary", "fwdbwd"),
)  # fmt: skip


MODULES = tuple(
    TableCase(
        f"{name}, {what}, half of it padding", {**where, "padding": "half"}, ("baseline", "torch.nn", "torch.compile")
    )
    for name, what, where in (
        ("MultiheadAttention", "evaluation", {"op": "multihead_attention", "mode": "fwd"}),
        ("TransformerEncoder", "evaluation", {"op": "encoder", "mode": "fwd"}),
        ("TransformerDecoder", "evaluation", {"op": "decoder", "mode": "fwd"}),
        ("TransformerDecoder", "training with dropout", {"op": "decoder_training", "dropout_p": 0.1}),
    )
)


def _small_work(size: tuple[int, int, int, int], threads: int, ours: str, *, learns: bool) -> TableCase:
    dim, layers, batch, seqlen = size
    name = "fastformer.nn" if ours == "fastformer" else ours
    what = f"{'training' if learns else 'evaluation'}, {threads} thread{'s' * (threads > 1)}, {name}"
    where = {
        "op": "small_work_training" if learns else "small_work",
        "dim": dim, "layers": layers, "batch": batch, "seqlen": seqlen, "threads": threads,
    }  # fmt: skip
    return TableCase(f"{size_of(size)}, {what}", where, ("torch.nn",), ours, (FP32,))


def size_of(size: tuple[int, int, int, int]) -> str:
    """Formats a size of small work for readers."""
    dim, layers, batch, seqlen = size
    return f"d {dim}, {layers} layers, {batch} x {seqlen}"


# By size: the cases of each column of the table, with one and with two threads.
SMALL_WORK = {
    size: {
        (learns, ours): [_small_work(size, threads, ours, learns=learns) for threads in THREADS]
        for learns in (False, True)
        for ours in ("accelerated", "fastformer")
    }
    for size in SIZES
}

MODELS = tuple(
    TableCase(f"training step of base, 64 sentences of {what}", {"op": "training_step", "lengths": lengths},
         ("baseline", "torch.compile"))
    for what, lengths in (("32 tokens", "equal"), ("mixed length", "multi30k"))
)  # fmt: skip


def _model(label: str, model: str, seqlen: str, against: str = "as it is", *panels: Panel, **fields: Any) -> TableCase:
    where = {"op": "drop_in", "model": model, "seqlen": seqlen, **fields}
    return TableCase(label, where, tuple(against.split(", ")), "accelerated", panels or (FP32,))


DROP_IN = (
    _model("BERT-base, 8 sequences of 32 to 128 tokens", "bert_base", "32 to 128", "as it is, openvino", FP32, BF16),
    _model("BERT-base, 8 sequences of 512 tokens", "bert_base", "512", "as it is, openvino", FP32, BF16),
    _model("GPT-2 small, training step, 4 sequences of 256 tokens", "gpt2_small", "256", mode="training"),
    _model("GPT-2 small, training step, 16 to 256 tokens", "gpt2_small", "16 to 256", mode="training"),
    _model("Marian's base shape, training step, 16 pairs of 8 to 64 tokens", "marian_base", "8 to 64", mode="training"),
    *(
        replace(_model(label, model, seqlen, mode="training"), ours="accelerated, fused loss")
        for label, model, seqlen in (
            ("GPT-2 small, 4 sequences of 256 tokens, with the fused loss", "gpt2_small", "256"),
            ("GPT-2 small, 16 to 256 tokens, with the fused loss", "gpt2_small", "16 to 256"),
            ("Marian's base shape, training step, with the fused loss", "marian_base", "8 to 64"),
        )
    ),
    *(
        _model(f"torch.nn's encoder, 6 layers, {what}8 of {seqlen} tokens", "torch_nn_encoder", seqlen, mode=mode)
        for seqlen in ("128", "1 to 128", "512", "1 to 512")
        for what, mode in (("", "forward"), ("training step, ", "training"))
    ),
)

ENCODERS_INT8 = tuple(
    _model(f"BERT-base, 8 sequences of {seqlen} tokens", "bert_base", seqlen, "onnxruntime, openvino", INT8)
    for seqlen in ("32 to 128", "512")
)

# `python -m benchmarks.peers --case encoders`.
TODAYS_ENCODERS = (
    *(
        TableCase(
            f"all-MiniLM-L6-v2, 128 sentences, {order}",
            {"op": "drop_in", "model": "minilm_real", "order": order},
            (
                "sentence-transformers",
                "sentence-transformers, onnxruntime",
                "sentence-transformers, openvino",
                "onnxruntime",
                "openvino",
            ),
            "fastformer.Encoder",
            (INT8, FP32),
        )
        for order in ("one by one", "mixed")
    ),
    _model("a cross-encoder of MiniLM's shape, 100 pairs of 40 to 160 tokens", "minilm_pairs", "40 to 160",
           "as it is, onnxruntime, openvino", INT8, FP32),
    _model("Qwen3-Embedding-0.6B's shape, 256 tokens", "qwen3_embedding", "256", "as it is, onnxruntime, openvino",
           INT8, FP32),
)  # fmt: skip

# One of the rivals, the converted model, is fastformer's, without transformers.
GENERATE = tuple(
    TableCase(
        f"Marian's base shape, {search}, {precision}",
        {"op": "accelerated_generate", "batch": 1, "num_beams": num_beams},
        against,
        ours,
        (FP32,),
    )
    for num_beams, search in ((1, "greedy"), (4, "4 beams"))
    for precision, ours, against in (
        ("fp32", "accelerated", ("transformers", "converted")),
        ("int8 against fp32", "accelerated, int8", ("transformers",)),
    )
)

_PRECISIONS = (
    Panel("int8", {"precision": "int8"}, {"precision": "int8"}),
    Panel("bf16 against its int8", {"precision": "bf16"}, {"precision": "int8"}),
    Panel("fp32", {"precision": "fp32"}, {"precision": "fp32"}),
)


def _decoding(
    label: str,
    batch: int,
    num_beams: int,
    model: str = "base",
    against: str = "ctranslate2",
    panels: tuple[Panel, ...] = _PRECISIONS[:1],
) -> TableCase:
    where = {"op": "peers", "model": model, "batch": batch, "num_beams": num_beams}
    return TableCase(label, where, (against,), panels=panels)


PEERS = (
    _decoding("base, greedy, 1 source", 1, 1, panels=_PRECISIONS),
    _decoding("base, 4 beams, 1 source", 1, 4, panels=_PRECISIONS),
    _decoding("base, greedy, 16 sources", 16, 1, panels=_PRECISIONS),
    _decoding("base, 4 beams, 16 sources", 16, 4, panels=_PRECISIONS),
    _decoding("a trained base, 8 to 60 tokens, one by one", 1, 1, "run"),
    _decoding("a trained base, 8 to 60 tokens, 16 at once", 16, 1, "run"),
    _decoding("a trained base, 8 to 60 tokens, 4 beams, one by one", 1, 4, "run"),
    _decoding("a trained base, 8 to 60 tokens, 4 beams, 16 at once", 16, 4, "run"),
    _decoding("GPT-2's small shape, one prompt", 1, 1, "gpt2", "llama.cpp"),
    _decoding("GPT-2's small shape, one prompt, fp32", 1, 1, "gpt2", "transformers", _PRECISIONS[2:]),
)

# Several tokens a step beside one. The weights are int8; the field names the dtype of the inputs.
_DRAFTED = (Panel("int8", {"dtype": "float32"}, {"dtype": "float32"}),)
DRAFTS = (
    TableCase(
        "an edit that repeats its prompt, prompt lookup",
        {"op": "prompt_lookup", "text": "edit"}, ("plain",), "prompt lookup", _DRAFTED,
    ),
    TableCase(
        "a text without repetition, prompt lookup",
        {"op": "prompt_lookup", "text": "new"}, ("plain",), "prompt lookup", _DRAFTED,
    ),
    TableCase(
        "a draft model with a tenth of the layers that is nearly always right",
        {"op": "draft_model", "text": "own"}, ("plain",), "draft model", _DRAFTED,
    ),
)  # fmt: skip
# Drafts of a small model that was trained for it, on modules of Python's library that neither model has seen.
TRAINED_DRAFTS = tuple(
    TableCase(
        f"{label}, drafts of a trained model",
        {"op": "trained_draft", "text": text}, ("plain",), "draft model", _PRECISIONS[::2],
    )
    for text, label in (("new", "code before its first repetition"), ("whole", "code"))
)  # fmt: skip
# A JSON schema beside no constraint.
CONSTRAINTS = tuple(
    TableCase(
        f"{rows} {'row' if rows == 1 else 'rows'} under a JSON schema",
        {"op": "structured", "rows": rows, "forced": False}, ("free",), "schema", _PRECISIONS[:1],
    )
    for rows in (1, 16)
)  # fmt: skip
# A step whose rows have four adapters in turn, beside one without.
ADAPTERS = tuple(
    TableCase(
        f"{rows} {'row' if rows == 1 else 'rows'} with LoRA adapters of rank 16",
        {"op": "adapters", "rows": rows}, ("none",), "adapters", _PRECISIONS[:1],
    )
    for rows in (1, 16)
)  # fmt: skip

_EACH = (
    Panel("int4", {"precision": "int4"}, {"precision": "int4"}),
    _PRECISIONS[0],
    Panel("bf16", {"precision": "bf16"}, {"precision": "bf16"}),
    _PRECISIONS[2],
)
_LLAMA_PROMPTS = ((1, 32, "a prompt of 32 tokens"), (1, 512, "a prompt of 512 tokens"), (16, 32, "16 prompts of 32"))
# Models of Llama's form, with 168 M parameters.
LLAMA = tuple(
    TableCase(
        f"{prompts}, {what}",
        {"op": "peers", "model": "llama", "batch": batch, "prompt": prompt, "new": new},
        ("llama.cpp", "transformers"),
        panels=_EACH,
    )
    for batch, prompt, prompts in _LLAMA_PROMPTS
    for new, what in ((1, "the first token"), (32, "32 tokens"))
)

# CPUs without AVX-512.
AVX2 = tuple(
    replace(case, against=("as it is",)) for case in DROP_IN if case.where["model"] in ("bert_base", "torch_nn_encoder")
)
AVX2_PEERS = tuple(
    replace(case, panels=(_PRECISIONS[0], _PRECISIONS[2])) for case in PEERS if case.where["model"] == "base"
)
# Intel CPUs with AMX.
AMX_PEERS = tuple(replace(case, panels=_PRECISIONS[:1]) for case in PEERS if case.where["model"] == "base")


class Headline(NamedTuple):
    """A sentence of README, and what it is measured by.

    Attributes:
        does: what fastformer does, as the beginning of a sentence.
        case: the case.
        panel: the number format.
        rivals: the providers that it names.
    """

    does: str
    case: TableCase
    panel: Panel
    rivals: tuple[str, ...]


def _case(cases: Sequence[TableCase], label: str) -> TableCase:
    (match,) = [case for case in cases if case.label == label]
    return match


_MINILM = {
    "op": "drop_in", "model": "minilm", "order": "sorted",
    "provider": ("fastformer.Encoder", "sentence-transformers", "onnxruntime", "openvino"),
}  # fmt: skip
_BERT = _case(DROP_IN, "BERT-base, 8 sequences of 32 to 128 tokens")
_SPEECH = tuple(
    TableCase(f"Whisper base: speech{how}", {"op": "speech", "model": "base", "windows": windows}, ("faster-whisper",),
              panels=_EACH[1::2])
    for how, windows in ((", one window after another", 1), (", in batches", 8))
)  # fmt: skip
# The tasks that README draws: each beside the programs that its users know.
WELL_KNOWN = (
    TableCase("MiniLM's shape: embeddings", _MINILM, ("onnxruntime",), "fastformer.Encoder", (INT8, FP32)),
    replace(_case(PEERS, "base, greedy, 1 source"), label="OPUS-MT's shape: translation", panels=_EACH[1::2]),
    _SPEECH[1],
    replace(
        _case(LLAMA, "a prompt of 512 tokens, 32 tokens"), label="Llama's form, 168 M: an answer", panels=_EACH[1::2]
    ),
    replace(
        _BERT,
        label="BERT-base: evaluation",
        where={**_BERT.where, "provider": ("accelerated", "as it is", "onnxruntime", "openvino")},
        panels=(INT8, FP32),
    ),
)
_EMBEDS_FP32 = Headline("embeds sentences (MiniLM's shape)", WELL_KNOWN[0], FP32, ("sentence-transformers",))
# The table in README: eight lines at most.
HEADLINES = (
    Headline("embeds sentences (MiniLM's shape)", WELL_KNOWN[0], INT8, ("onnxruntime",)),
    Headline("translates a sentence (OPUS-MT's shape)", WELL_KNOWN[1], INT8, ("ctranslate2",)),
    Headline("answers a prompt of 512 tokens (Llama's form)", WELL_KNOWN[3], INT8, ("llama.cpp",)),
    Headline(
        "answers 16 prompts together (Llama's form)", _case(LLAMA, "16 prompts of 32, 32 tokens"), INT8, ("llama.cpp",)
    ),
    Headline("transcribes speech in batches (Whisper base)", _SPEECH[1], INT8, ("faster-whisper",)),
    Headline("evaluates BERT-base after `accelerate`", _BERT, FP32, ("as it is", "onnxruntime")),
    Headline(
        "trains torch.nn's encoder after `accelerate`",
        _case(DROP_IN, "torch.nn's encoder, 6 layers, training step, 8 of 1 to 512 tokens"), FP32, ("as it is",),
    ),
    Headline(
        "trains GPT-2 small with the fused loss",
        _case(DROP_IN, "GPT-2 small, 16 to 256 tokens, with the fused loss"), FP32, ("as it is",),
    ),
)  # fmt: skip
# The tables of docs/coming-from, by their page.
COMING_FROM = {
    "ctranslate2": (
        HEADLINES[1],
        Headline("translates 16 sentences together (OPUS-MT's shape)", _case(PEERS, "base, greedy, 16 sources"),
                 _PRECISIONS[0], ("ctranslate2",)),
        Headline("translates a sentence with 4 beams (OPUS-MT's shape)", _case(PEERS, "base, 4 beams, 1 source"),
                 _PRECISIONS[0], ("ctranslate2",)),
    ),
    "sentence_transformers": (HEADLINES[0], _EMBEDS_FP32),
    "llama_cpp": (
        Headline("answers a prompt of 32 tokens (Llama's form)", _case(LLAMA, "a prompt of 32 tokens, 32 tokens"),
                 _PRECISIONS[0], ("llama.cpp",)),
        *HEADLINES[2:4],
    ),
    "faster_whisper": tuple(
        Headline(f"transcribes speech{how} (Whisper base)", case, panel, ("faster-whisper",))
        for how, case in zip(("", " in batches"), _SPEECH, strict=True) for panel in (INT8, FP32)
    ),
    "torch_nn": HEADLINES[5:],
}  # fmt: skip
# What each night measures; speech needs the weights of a Whisper.
NIGHTLY = (_EMBEDS_FP32, *(headline for headline in HEADLINES if headline.case not in _SPEECH))
