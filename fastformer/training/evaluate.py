"""The scores of a validation: the plain negative log-likelihood, and for translators exact match, BLEU and chrF."""

from __future__ import annotations

import unicodedata
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from fastformer.data import Batch, Examples, collate, plan_epoch
from fastformer.settings import BleuTokenize
from fastformer.special_ids import SpecialIds
from fastformer.training.updates import places_of

_MODELS = ("flores101", "flores200", "spBLEU-1K")
# Scripts without spaces, by their Unicode names, and the tokenizers that find their words.
_WITHOUT_SPACES = {
    "CJK": "zh",
    "HIRAGANA": "ja-mecab",
    "KATAKANA": "ja-mecab",
    **dict.fromkeys(("THAI", "LAO", "KHMER", "MYANMAR", "TIBETAN"), "char"),
}
_LONG_WORD = 30  # characters
# The scores by their names, as the log shows them.
SHOWN = {
    "nll": "nll {:.4f}",
    "nll_per_character": "({:.4f} a character)",
    "exact_match": "exact match {:.4f}",
    "bleu": "BLEU {:.2f}",
    "chrf": "chrF {:.2f}",
}


@dataclass
class Scores:
    """The result of a validation.

    Attributes:
        nll: mean negative log-likelihood of a real target token, in nats, without label smoothing.
        nll_per_character: for a language model, the same per character of the text, which doesn't depend on the
            tokenizer.
        exact_match: share of translations equal to the reference; None when nothing was translated.
        bleu, chrf: sacreBLEU's scores of the corpus, None without the library; BLEU is also None if no reference has
            four words. The signatures say how the scores were computed.
        samples: (source, translation, reference).
        translated: the number of lines, from the first on, that were translated for all scores but nll.
        lines: the number of all lines.
    """

    nll: float
    nll_per_character: float | None = None
    exact_match: float | None = None
    bleu: float | None = None
    chrf: float | None = None
    signatures: dict[str, str] = field(default_factory=dict)
    samples: list[tuple[str, str, str]] = field(default_factory=list)
    translated: int = 0
    lines: int = 0


def model_loss(model: nn.Module, batch: Batch, **options: Any) -> torch.Tensor:
    """Computes the summed loss of a batch, for a model with a source or without."""
    loss: Callable[..., torch.Tensor] = model.loss  # type: ignore[assignment]
    target = (batch.target_in, batch.target_out)
    if batch.source is None:
        return loss(*target, layout=batch.target_layout, **options)
    layouts = {"source_layout": batch.source_layout, "target_layout": batch.target_layout}
    return loss(batch.source, *target, **layouts, **options)


@torch.inference_mode()
def losses_of(
    model: nn.Module,
    examples: Examples,
    *,
    max_tokens: int,
    packed: bool,
    device: torch.device,
    rank: int = 0,
    size: int = 1,
) -> dict[int, float]:
    """Computes the summed NLL of each batch of one process, by the batch's place in the plan.

    Args:
        model: the model.
        examples: the examples whose NLL is measured.
        max_tokens, packed: the settings of the batches.
        device: the device of the model.
        rank, size: the rank of the process, and the number of processes.
    """
    was_training = model.training
    model.eval()
    lengths, special_ids = examples.lengths, SpecialIds.of(model.config)
    plan = plan_epoch(lengths, max_tokens=max_tokens, batching="packed" if packed else "bucketed", seed=0, epoch=0)
    mine = places_of([lengths[indices] for indices in plan], model.config, rank, size, padded=not packed)
    losses = {}
    try:
        for place in sorted(mine):
            batch = collate([examples[i] for i in plan[place]], packed=packed, special_ids=special_ids).to(device)
            losses[place] = float(model_loss(model, batch))
    finally:
        model.train(was_training)
    return losses


def mean_of(losses: Mapping[int, float], examples: Examples) -> float:
    """Computes the mean NLL of a target token, in nats, from the losses of all batches by their places."""
    total = 0.0
    for place in range(len(losses)):  # in this order, so that the result has the same bits for any number of processes
        total += losses[place]
    return total / max(examples.num_tokens[1], 1)


def translation_scores(
    outputs: Sequence[str],
    pairs: Sequence[tuple[str, str]],
    nll: float,
    num_samples: int,
    *,
    bleu_tokenize: BleuTokenize = "13a",
) -> Scores:
    """Compares the translations of sources with their references."""
    sources, references = [source for source, _ in pairs], [target for _, target in pairs]
    exact_match = sum(a == b for a, b in zip(outputs, references, strict=True)) / len(pairs)
    scores = Scores(nll, exact_match=exact_match, translated=len(pairs))
    scores.samples = list(zip(sources, outputs, references, strict=True))[:num_samples]
    try:
        metrics = corpus_metrics(bleu_tokenize)
    except ImportError:
        return scores  # exact match needs no sacrebleu
    by_name = corpus_scores(outputs, references, bleu_tokenize=bleu_tokenize)
    (bleu, bleu_signature), (scores.chrf, chrf_signature) = by_name.values()
    scores.signatures = {"chrf_signature": chrf_signature}
    # BLEU counts runs of up to four words: if no reference has four, it is 0 for any translation.
    words = metrics["BLEU"].tokenizer
    if any(len(words(reference).split()) >= 4 for reference in references):
        scores.bleu = bleu
        scores.signatures["bleu_signature"] = bleu_signature
    return scores


def corpus_scores(
    outputs: Sequence[str],
    references: Sequence[str],
    *more_references: Sequence[str],
    bleu_tokenize: BleuTokenize = "13a",
    ter: bool = False,
) -> dict[str, tuple[float, str]]:
    """Computes sacreBLEU's scores of translations, each with the signature that says how it was computed.

    Args:
        outputs: the translations; empty ones count as such.
        references: the right translations, one for each.
        more_references: further lists of references, each as long as the translations.
        bleu_tokenize: the tokenization for BLEU: "zh", "ja-mecab", "ko-mecab", and "char" or "flores200" for other
            languages without spaces.
        ter: add the translation edit rate.

    Returns:
        "BLEU", "chrF" and, with `ter`, "TER".

    Raises:
        ImportError: sacrebleu is not installed, or a package that it needs for this bleu_tokenize.
        ValueError: the model of this bleu_tokenize isn't in sacrebleu's folder.
    """
    metrics, given = corpus_metrics(bleu_tokenize, ter), [list(references), *map(list, more_references)]
    return {
        name: (metric.corpus_score(list(outputs), given).score, str(metric.get_signature()))
        for name, metric in metrics.items()
    }


def corpus_metrics(bleu_tokenize: BleuTokenize = "13a", ter: bool = False) -> dict[str, Any]:
    """Builds the metrics of `corpus_scores` by name, as sacreBLEU's objects.

    Raises:
        ImportError: see `corpus_scores`.
        ValueError: see `corpus_scores`.
    """
    try:
        from sacrebleu.metrics.bleu import BLEU
        from sacrebleu.metrics.chrf import CHRF
        from sacrebleu.metrics.ter import TER
    except ImportError as error:
        raise ImportError("BLEU and chrF need sacrebleu: pip install 'fastformer[train]'") from error
    _check_model(bleu_tokenize)
    try:
        bleu = BLEU(tokenize=bleu_tokenize)
    except (RuntimeError, ImportError) as error:
        extra = bleu_tokenize.partition("-")[0]
        raise ImportError(f"bleu_tokenize {bleu_tokenize} needs pip install 'sacrebleu[{extra}]'") from error
    return {"BLEU": bleu, "chrF": CHRF(), **({"TER": TER()} if ter else {})}


def _check_model(bleu_tokenize: str) -> None:
    """Raises a ValueError for a tokenizer without its model on this machine, which sacreBLEU would download."""
    if bleu_tokenize not in _MODELS:
        return
    from sacrebleu.tokenizers.tokenizer_spm import SPM_MODELS
    from sacrebleu.utils import SACREBLEU_DIR

    url = SPM_MODELS[bleu_tokenize]["url"]
    file = Path(SACREBLEU_DIR, "models", Path(url).name)
    if not file.is_file():
        raise ValueError(f"bleu_tokenize {bleu_tokenize} needs the model {file}, which isn't there: get it from {url}")


def words_hint(references: Sequence[str], bleu_tokenize: str) -> str | None:
    """Returns advice if BLEU can't find the words of references, because they have no spaces; else None.

    Args:
        references: the right translations.
        bleu_tokenize: the chosen one; those that don't need spaces find words.
    """
    if bleu_tokenize not in ("13a", "intl", "none"):
        return None
    scripts = [{unicodedata.name(letter, "").partition(" ")[0] for letter in text} for text in references]
    # A text in these scripts is one run, unless it was cut into words. A run in another script is a word, unless it
    # is very long.
    runs = [
        some
        for some, text in zip(scripts, references, strict=True)
        if len(text.split()) == 1 and (some & _WITHOUT_SPACES.keys() or len(text) > _LONG_WORD)
    ]
    if 2 * len(runs) <= len(references):
        return None
    counts = Counter(script for some in runs for script in some & _WITHOUT_SPACES.keys())
    advice = "HIRAGANA" if counts["HIRAGANA"] else max(counts, key=lambda script: counts[script], default="THAI")
    return (
        f"the references have no spaces, and BLEU by {bleu_tokenize} takes what stands between spaces for a word: give "
        f"--bleu_tokenize {_WITHOUT_SPACES[advice]}, or look at chrF"
    )
