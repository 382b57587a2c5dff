"""Converts the fields of OpenAI's requests into decoding options."""

from __future__ import annotations

from typing import Any

from fastformer.generation.processors import CountPenalties, LeastShare, TokenBias
from fastformer.serving.limits import Limits
from fastformer.serving.openai_bodies import ApiError, GenerateBody
from fastformer.serving.service import GenerateService

_LEAST_TOP_P = 1e-9  # keeps one token, as OpenAI's 0 does
_DIGITS = 9  # the most digits of a token's id


def check_length(text: str | list[int], limits: Limits, param: str) -> None:
    """Raises an ApiError if a text has more characters than the limits allow."""
    if isinstance(text, str) and (reason := limits.why_not([text])) is not None:
        raise ApiError(reason, param=param, code="string_above_max_length")


def check_count(body: GenerateBody, limits: Limits) -> None:
    """Raises an ApiError if a request asks for more answers to a prompt than the limits allow."""
    if (body.n or 1) > limits.max_beams:
        raise ApiError(f"expected n of at most {limits.max_beams}", param="n")


def new_tokens(body: GenerateBody, ids: list[int], service: GenerateService, requested: int | None, usual: int) -> int:
    """Returns the most new tokens of a prompt's answer.

    Args:
        body: the request's body.
        ids: the ids of the prompt.
        service: its model limits the number of positions.
        requested: the number in the request; None: the request has none.
        usual: the number for a request without one, if the model has positions for as many.
    """
    limits = service.limits
    name = "max_completion_tokens" if getattr(body, "max_completion_tokens", None) is not None else "max_tokens"
    if requested is not None and requested > limits.max_new_tokens:
        raise ApiError(f"expected {name} of at most {limits.max_new_tokens:,}, got {requested:,}", param=name)
    room = service.session.max_len - len(ids)
    if requested is not None and requested > room:
        raise ApiError(
            f"expected {name} of at most {room:,} after a prompt of {len(ids):,} tokens, because the model has "
            f"{service.session.max_len:,} positions; got {requested:,}",
            param=name,
            code="context_length_exceeded",
        )
    return requested or min(room, limits.max_new_tokens, usual)


def options_of(body: GenerateBody, service: GenerateService, prompt_length: int, *, is_chat: bool) -> dict[str, Any]:
    """Returns the decoding options for a request; the model's folder has those that the request omits.

    If neither sets a temperature, tokens are drawn at temperature 1, as OpenAI does. Temperature 0 is greedy decoding.

    Args:
        body: the request's body.
        service: completes the prompt.
        prompt_length: the number of the prompt's tokens, which penalties don't count.
        is_chat: whether the answer is one in a chat, which ends with its turn.
    """
    options: dict[str, Any] = {"seed": body.seed}
    if body.temperature == 0:
        options |= {"do_sample": False, "temperature": 1.0, "top_k": 0, "top_p": 1.0}
    else:
        options |= {"do_sample": True, "num_return_sequences": body.n or 1}
        if body.temperature is not None:
            options["temperature"] = body.temperature
        if body.top_p is not None:
            options["top_p"] = max(body.top_p, _LEAST_TOP_P)
        if body.top_k is not None:
            options["top_k"] = max(body.top_k, 0)
    if body.stop:
        options["stop_strings"] = [body.stop] if isinstance(body.stop, str) else body.stop
    if body.repetition_penalty is not None:
        options["repetition_penalty"] = body.repetition_penalty
    if body.min_tokens is not None:
        options["min_new_tokens"] = body.min_tokens
    if body.stop_token_ids:
        size = service.session.model.config.vocab_size
        if (largest := max(body.stop_token_ids)) >= size:
            raise ApiError(f"expected ids of tokens below {size:,}, got {largest:,}", param="stop_token_ids")
        options["eos_token_id"] = [*service.session.ends_of(is_chat=is_chat), *body.stop_token_ids]
    if processors := _processors(body, service, prompt_length):
        options["logits_processor"] = processors
    return options


def _processors(body: GenerateBody, service: GenerateService, prompt_length: int) -> list[Any]:
    processors: list[Any] = []
    if body.presence_penalty or body.frequency_penalty:
        processors.append(CountPenalties(body.presence_penalty or 0.0, body.frequency_penalty or 0.0, prompt_length))
    if body.logit_bias:
        size = service.session.model.config.vocab_size
        biases = []
        for name, bias in body.logit_bias.items():
            is_number = name.isascii() and name.isdecimal() and len(name) <= _DIGITS
            if not is_number or int(name) >= size:
                raise ApiError(f"expected ids of tokens below {size:,}, got {name!r:.40}", param="logit_bias")
            biases.append((int(name), bias))
        processors.append(TokenBias(tuple(sorted(biases))))
    if body.min_p and body.temperature != 0:  # as in vLLM, of the probabilities at the request's temperature
        temperature = service.session.config.temperature if body.temperature is None else body.temperature
        processors.append(LeastShare(body.min_p, temperature))
    return processors
