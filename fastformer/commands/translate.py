"""`fastformer translate`."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any


def translate(
    run: str,
    text: str | None = None,
    *,
    file: str | None = None,
    reference: str | None = None,
    attention: str | None = None,
    num_beams: int = 1,
    length_penalty: float = 0.6,
    max_new_tokens: int | None = None,
    repetition_penalty: float = 1.0,
    no_repeat_ngram_size: int = 0,
) -> None:
    """Translates a text, a file, or standard input line by line.

    Args:
        run: the run folder
        text: what to translate; without it and without --file, the lines of standard input
        file: a UTF-8 file, one sentence a line
        reference: the right translations of --file, a line each: prints BLEU and chrF
        attention: draw what the translation looked at into this PNG
        num_beams: hypotheses that are followed; 1 is greedy
        length_penalty: alpha of ((5 + length) / 6) ** alpha, for beams
        max_new_tokens: the longest output; by default the source's length + 100
        repetition_penalty: above 1 discourages tokens that were there
        no_repeat_ngram_size: no n-gram of this length comes twice; 0 is off
    """
    from fastformer.data.text import read_lines, read_pairs
    from fastformer.generation import Translator, draw_attention
    from fastformer.run_folder import load_model

    if attention and text is None:
        raise ValueError("expected a text to draw the attention of: fastformer translate RUN 'text' --attention F")
    if reference and file is None:
        raise ValueError("expected --file with --reference: its translations are compared with the reference")
    model, tokenizer = load_model(run, ("Transformer", "LSTMSeq2Seq"))
    translator = Translator(model, tokenizer)
    options: dict[str, Any] = {
        "num_beams": num_beams,
        "length_penalty": length_penalty,
        "max_new_tokens": max_new_tokens,
        "repetition_penalty": repetition_penalty,
        "no_repeat_ngram_size": no_repeat_ngram_size,
    }
    if attention and text is not None:
        source, target, weights = translator.attention(text)
        draw_attention(source, target, weights, attention, title=text)
        print(f"drew {attention}", file=sys.stderr)
    if text is not None:
        print(translator.translate([text], **options)[0])
    elif reference and file is not None:
        pairs = read_pairs(file, reference)
        found = translator.translate([source for source, _ in pairs], **options)
        print("\n".join(found))
        _print_scores(found, [target for _, target in pairs])
    else:
        lines = _standard_input() if file is None else read_lines(file, allow_empty=True)
        # A person at a terminal gets each answer at once.
        read_ahead = 1 if file is None and sys.stdin.isatty() else 1000
        for translation in translator.stream(lines, read_ahead=read_ahead, **options):
            print(translation, flush=True)


def _print_scores(found: list[str], references: list[str]) -> None:
    from fastformer.training.evaluate import corpus_scores

    for name, (score, signature) in corpus_scores(found, references).items():
        print(f"{name} {score:.2f}  {signature}", file=sys.stderr)


def _standard_input() -> Iterator[str]:
    """The lines of standard input, as they come."""
    from fastformer.data.text import split_lines

    for number, line in enumerate(sys.stdin.buffer, 1):
        yield from split_lines(line, "standard input", allow_empty=True, first=number)
