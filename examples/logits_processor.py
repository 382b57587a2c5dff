"""A logits processor of your own: a translation that avoids the letters you name (a lipogram).

    python examples/logits_processor.py MODEL "a text" --without e

A processor gets the ids so far, (rows, length), and the logits of the next token, (rows, vocab_size). The search
(greedy, beams or samples) continues with the logits that it returns.
"""

from __future__ import annotations

import argparse

import torch
from torch import Tensor

import fastformer


class Without:
    """Forbids all tokens that contain one of the given letters.

    Args:
        tokens: the text of each id.
        letters: the letters to avoid, in lower case.
    """

    def __init__(self, tokens: list[str], letters: str) -> None:
        self.banned = torch.tensor([any(letter in token.lower() for letter in letters) for token in tokens])

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        return scores.masked_fill(self.banned[: scores.shape[-1]], float("-inf"))


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("text")
    parser.add_argument("--without", default="e")
    options = parser.parse_args(arguments)

    translator = fastformer.Translator.from_pretrained(options.model)
    tokens = [translator.tokenizer.decode([i]) for i in range(translator.model.config.vocab_size)]
    print(translator.translate(options.text))
    print(translator.translate(options.text, logits_processor=[Without(tokens, options.without)], max_new_tokens=24))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
