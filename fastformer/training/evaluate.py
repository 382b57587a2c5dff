"""What validation says of a model: its plain negative log-likelihood; of translators exact match, BLEU, chrF."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from fastformer.data import Batch, Example, Examples, collate, plan_epoch
from fastformer.generation import Translator
from fastformer.settings import BleuTokenize
from fastformer.special_ids import SpecialIds


@dataclass
class Scores:
    """The result of a validation.

    Attributes:
        nll: mean negative log-likelihood of a real target token, in nats, without label smoothing.
        nll_per_character: of a language model, the same for a character of the text, whatever the tokens.
        exact_match: share of translations equal to the reference; None when nothing was translated.
        bleu, chrf: sacreBLEU's scores of the corpus, None without the library, BLEU also where no reference has four
            words; signatures say how.
        samples: (source, translation, reference).
    """

    nll: float
    nll_per_character: float | None = None
    exact_match: float | None = None
    bleu: float | None = None
    chrf: float | None = None
    signatures: dict[str, str] = field(default_factory=dict)
    samples: list[tuple[str, str, str]] = field(default_factory=list)


def model_loss(model: nn.Module, batch: Batch, **options: Any) -> torch.Tensor:
    """The summed loss of a batch, whichever model it is."""
    loss: Callable[..., torch.Tensor] = model.loss  # type: ignore[assignment]
    if batch.source is None:
        return loss(batch.target_in, batch.target_out, layout=batch.target_layout, **options)
    return loss(
        batch.source,
        batch.target_in,
        batch.target_out,
        source_layout=batch.source_layout,
        target_layout=batch.target_layout,
        **options,
    )


def lengths_of(examples: Sequence[Example]) -> torch.Tensor:
    """(examples, 2): source and target lengths."""
    if isinstance(examples, Examples):
        return examples.lengths
    return torch.tensor([example.lengths for example in examples], device="cpu")


@torch.inference_mode()
def negative_log_likelihood(
    model: nn.Module, examples: Sequence[Example], *, max_tokens: int, packed: bool, device: torch.device
) -> float:
    """Mean NLL of a real target token, in nats."""
    was_training = model.training
    model.eval()
    plan = plan_epoch(
        lengths_of(examples), max_tokens=max_tokens, batching="packed" if packed else "bucketed", seed=0, epoch=0
    )
    special_ids = SpecialIds.of(model.config)
    total, tokens = 0.0, 0
    try:
        for indices in plan:
            batch = collate([examples[i] for i in indices], packed=packed, special_ids=special_ids).to(device)
            total += float(model_loss(model, batch))
            tokens += batch.num_target_tokens
    finally:
        model.train(was_training)
    return total / max(tokens, 1)


def translate_and_score(
    translator: Translator, pairs: list[tuple[str, str]], nll: float, num_samples: int, **options: Any
) -> Scores:
    """Translates the sources and compares with the references."""
    sources, references = [source for source, _ in pairs], [target for _, target in pairs]
    found = translator.translate(sources, **options)
    scores = Scores(nll, exact_match=sum(a == b for a, b in zip(found, references, strict=True)) / len(pairs))
    scores.samples = list(zip(sources, found, references, strict=True))[:num_samples]
    try:
        (bleu, bleu_signature), (scores.chrf, chrf_signature) = corpus_scores(found, references).values()
    except ImportError:
        return scores  # exact match is there
    scores.signatures = {"chrf_signature": chrf_signature}
    # BLEU counts runs of up to four words: where no reference has four, it is 0 whatever was said.
    if any(len(reference.split()) >= 4 for reference in references):
        scores.bleu = bleu
        scores.signatures["bleu_signature"] = bleu_signature
    return scores


def corpus_scores(
    found: Sequence[str],
    references: Sequence[str],
    *more_references: Sequence[str],
    bleu_tokenize: BleuTokenize = "13a",
    ter: bool = False,
) -> dict[str, tuple[float, str]]:
    """sacreBLEU's scores of translations, each with the signature that says how it was computed.

    Args:
        found: the translations; empty ones count as such.
        references: the right translations, one for each.
        more_references: further ones, as many in each.
        bleu_tokenize: how BLEU cuts text into words: "zh", "ja-mecab" and "ko-mecab" for languages without spaces.
        ter: add the translation edit rate.

    Returns:
        "BLEU", "chrF" and, where it was asked for, "TER".

    Raises:
        ImportError: sacrebleu is not installed, or what it needs for this bleu_tokenize.
    """
    metrics, given = corpus_metrics(bleu_tokenize, ter), [list(references), *map(list, more_references)]
    return {
        name: (metric.corpus_score(list(found), given).score, str(metric.get_signature()))
        for name, metric in metrics.items()
    }


def corpus_metrics(bleu_tokenize: BleuTokenize = "13a", ter: bool = False) -> dict[str, Any]:
    """The metrics of `corpus_scores` by name, as sacreBLEU's objects.

    Raises:
        ImportError: see `corpus_scores`.
    """
    try:
        from sacrebleu.metrics.bleu import BLEU
        from sacrebleu.metrics.chrf import CHRF
        from sacrebleu.metrics.ter import TER
    except ImportError as error:
        raise ImportError("BLEU and chrF need sacrebleu: pip install 'fastformer[train]'") from error
    try:
        bleu = BLEU(tokenize=bleu_tokenize)
    except (RuntimeError, ImportError) as error:
        extra = bleu_tokenize.partition("-")[0]
        raise ImportError(f"bleu_tokenize {bleu_tokenize} needs pip install 'sacrebleu[{extra}]'") from error
    return {"BLEU": bleu, "chrF": CHRF(), **({"TER": TER()} if ter else {})}
