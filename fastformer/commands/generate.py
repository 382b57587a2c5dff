"""`fastformer generate`."""

from __future__ import annotations

from typing import Any


def generate(
    run: str,
    prompt: str,
    *,
    greedy: bool = False,
    num_beams: int = 1,
    length_penalty: float = 0.6,
    max_new_tokens: int | None = None,
    repetition_penalty: float = 1.0,
    no_repeat_ngram_size: int = 0,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    seed: int | None = None,
) -> None:
    """Continues a prompt with a language model.

    Args:
        run: the run folder
        prompt: the text to continue
        greedy: take the best token always, without sampling
        num_beams: above 1, search with so many beams instead of sampling
        length_penalty: alpha of ((5 + length) / 6) ** alpha, for beams
        max_new_tokens: the longest continuation; by default as much as the model's positions allow
        repetition_penalty: above 1 discourages tokens that were there
        no_repeat_ngram_size: no n-gram of this length comes twice; 0 is off
        temperature: below 1 sharpens the distribution
        top_k: draw from the k best tokens; 0 is all
        top_p: draw from the smallest set of tokens that holds this probability
        seed: of the sampling
    """
    import torch

    from fastformer.generation import generate as search
    from fastformer.run_folder import load_model

    model, tokenizer = load_model(run, ("GPT",))
    ids = tokenizer.encode(prompt)
    if not ids:
        raise ValueError("expected a prompt of at least one token, got an empty one")
    options: dict[str, Any] = {
        "num_beams": num_beams,
        "length_penalty": length_penalty,
        "max_new_tokens": max_new_tokens,
        "repetition_penalty": repetition_penalty,
        "no_repeat_ngram_size": no_repeat_ngram_size,
    }
    if not greedy and num_beams == 1:
        options |= {"do_sample": True, "temperature": temperature, "top_k": top_k, "top_p": top_p, "seed": seed}
    out = search(model, torch.tensor([ids]), **options)
    assert isinstance(out, torch.Tensor)
    print(tokenizer.decode(out[0].tolist()))
