"""`fastformer generate`."""

from __future__ import annotations

import logging
from typing import Literal

logger = logging.getLogger("fastformer")

TEXTS = ("prompt",)


def generate(
    run: str,
    prompt: str,
    *,
    device: str = "auto",
    precision: Literal["fp32", "bf16", "fp16", "int8"] | None = None,
    greedy: bool = False,
    num_beams: int = 1,
    num_return_sequences: int = 1,
    beam_rules: Literal["tensor2tensor", "transformers"] = "tensor2tensor",
    length_penalty: float | None = None,
    early_stopping: bool | Literal["never"] = False,
    num_beam_groups: int = 1,
    diversity_penalty: float = 0.0,
    min_new_tokens: int = 0,
    max_new_tokens: int | None = None,
    max_time: float | None = None,
    repetition_penalty: float = 1.0,
    no_repeat_ngram_size: int = 0,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    seed: int | None = None,
) -> None:
    """Continues a prompt with a language model.

    It samples, if no flag says otherwise. One continuation is printed as it is made; several, or those of beams, at the
    end.

    Args:
        run: the run folder
        prompt: the text to continue
        device: auto (a GPU if there is one), cpu, cuda, cuda:1, ...
        precision: what the weights become; int8 is for a CPU alone; without it they stay as they were saved
        greedy: take the best token always, without sampling
        num_beams: above 1, search with so many beams instead of sampling
        num_return_sequences: so many continuations, with a line of --- between them
        beam_rules: whose beam search; transformers is that of Hugging Face's generate
        length_penalty: alpha of ((5 + length) / 6) ** alpha, by transformers' rules of length ** alpha, which divides
            the score of beams; by default 0.6, by transformers' rules 1.0
        early_stopping: stop when num_beams hypotheses are finished, better ones possible or not; never, of
            transformers' rules alone, goes on while a better one is possible
        num_beam_groups: so many groups of beams, which avoid each other's tokens; with --diversity_penalty
        diversity_penalty: what a token costs for each time that an earlier group has just chosen it
        min_new_tokens: the shortest continuation
        max_new_tokens: the longest continuation; by default as much as the model's positions allow
        max_time: seconds after which it ends with what there is
        repetition_penalty: above 1 discourages tokens that were there
        no_repeat_ngram_size: no n-gram of this length comes twice; 0 is off
        temperature: of the sampling; below 1 sharpens the distribution
        top_k: draw from the k best tokens; 0 is all
        top_p: draw from the smallest set of tokens that holds this probability
        seed: of the sampling
    """
    from torch import Tensor

    from fastformer.generation import generate as search
    from fastformer.generation.precisions import DTYPES, asked_precision
    from fastformer.generation.streaming import TextStreamer
    from fastformer.run_folder import choose_device, load_model

    if greedy and num_beams > 1:
        raise ValueError(f"expected --greedy or --num_beams {num_beams}, got both")
    if greedy and num_return_sequences > 1:
        raise ValueError(
            f"expected --greedy or --num_return_sequences {num_return_sequences}, got both: "
            "the best token always makes one continuation"
        )
    for name, value, neutral in (("temperature", temperature, 1.0), ("top_k", top_k, 0), ("top_p", top_p, 1.0)):
        if value != neutral and (greedy or num_beams > 1):
            other = "--greedy" if greedy else f"--num_beams {num_beams}"
            raise ValueError(f"expected {other} or --{name} {value}, got both: it is sampling that a {name} changes")
    place = choose_device("cpu" if (device, precision) == ("auto", "int8") else device)
    model, tokenizer = load_model(run, ("GPT",), device=place, dtype=DTYPES.get(precision or ""))
    ids = tokenizer.encode(prompt)
    if not ids:
        raise ValueError("expected a prompt of at least one token, got an empty one")
    unknown = 0 if tokenizer.special_ids.unk is None else ids.count(tokenizer.special_ids.unk)
    if unknown:
        logger.warning("the tokenizer doesn't know %d of the prompt's %d tokens", unknown, len(ids))
    # What is sampled or greedy comes token by token; beams and several samples are known at the end.
    streamer = TextStreamer(tokenizer, prompt=prompt) if max(num_beams, num_return_sequences) == 1 else None
    out = search(
        model,
        [ids],
        num_beams=num_beams,
        num_return_sequences=num_return_sequences,
        beam_rules=beam_rules,
        length_penalty=length_penalty,
        early_stopping=early_stopping,
        num_beam_groups=num_beam_groups,
        diversity_penalty=diversity_penalty,
        min_new_tokens=min_new_tokens,
        max_new_tokens=max_new_tokens,
        max_time=max_time,
        repetition_penalty=repetition_penalty,
        no_repeat_ngram_size=no_repeat_ngram_size,
        do_sample=not greedy and num_beams == 1,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        seed=seed,
        precision=asked_precision(model, precision),
        streamer=streamer,
    )
    if streamer is not None:
        return
    assert isinstance(out, Tensor)
    texts = []
    for row in out.tolist():
        # A tokenizer may give back a prompt that it doesn't hold quite as it was, a line end say.
        said, again = tokenizer.decode(row), tokenizer.decode(ids)
        texts.append(prompt + said[len(again) :] if said.startswith(again) else said)
    print("\n---\n".join(texts))
