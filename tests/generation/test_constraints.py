"""New tokens match a schema, a regular expression, choices or a grammar, on every engine, beside rows that are free."""

from __future__ import annotations

import asyncio
import functools
import json
import random
import re
from typing import Any

import numpy as np
import pytest
import torch

from fastformer.data import ByteTokenizer
from fastformer.generation import GenerationConfig, generate
from fastformer.generation.async_generator import AsyncGenerator, ChatIds
from fastformer.generation.constraints import Constraint, Matcher, Triggers, Vocabulary, allowed_tokens
from fastformer.generation.engines.cpp import CppBatch
from fastformer.generation.generator import Generator
from fastformer.generation.request_builder import RequestBuilder
from fastformer.generation.scheduler import new_scheduler, run
from fastformer.models import GPT, Transformer
from tests.covering import by_turns, each
from tests.generation.detokenizers import detokenizer
from tests.generation.small import CPP, needs_cpp
from tests.generation.weights import drawn

pytest.importorskip("llguidance", reason="the llguidance library is not installed")
jsonschema = pytest.importorskip("jsonschema", reason="the jsonschema library is not installed")

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 5},
        "age": {"type": "integer", "minimum": -5, "maximum": 300},
        "tags": {"type": "array", "items": {"enum": ["é", "日本", 7]}, "minItems": 1, "maxItems": 2},
        "next": {"anyOf": [{"type": "null"}, {"$ref": "#/$defs/point"}]},
    },
    "required": ["name", "age", "tags", "next"],
    "additionalProperties": False,
    "$defs": {"point": {"type": "object", "properties": {"x": {"type": "boolean"}}, "required": ["x"],
                        "additionalProperties": False}},
}  # fmt: skip
CHOICES = ["yes", "yes, of course", "no", "don't", '"\\', "é"]
REGEX = r"[a-d]{2,4}(-[0-9]{1,3})?!"
GRAMMAR = 'start: "(" start ")" | /[x-z]/'
EACH = [{"schema": SCHEMA}, {"choices": CHOICES}, {"regex": REGEX}, {"grammar": GRAMMAR}]
PROMPT = [70, 71, 72]


@pytest.fixture(scope="module")
def model() -> Any:
    return drawn(GPT, vocab_size=400, d_model=16, num_heads=2, d_ff=16, num_layers=2, max_len=1000)


def texts(model: Any, tokenizer: Any, count: int = 1, **options: Any) -> list[str]:
    """Returns the new texts, which have ended before the limit."""
    limit = 900
    out = generate(model, [PROMPT], tokenizer=tokenizer, max_new_tokens=limit, num_return_sequences=count, **options)
    rows = [[i for i in row[len(PROMPT) :].tolist() if i] for row in out]
    assert all(len(row) < limit for row in rows)
    begin = [i for i, one in enumerate(tokenizer.token_bytes) if one == b"a"][-1]
    return [tokenizer.decode([begin, *row])[1:] for row in rows]


def matches(text: str, options: dict[str, Any]) -> bool:
    if "schema" in options:
        jsonschema.validate(json.loads(text), options["schema"])
        return True
    if "choices" in options:
        return text in options["choices"]
    if "regex" in options:
        return re.fullmatch(options["regex"], text) is not None
    inner = text.strip("()")
    return inner in "xyz" and text == "(" * (len(text) // 2) + inner + ")" * (len(text) // 2)


@pytest.mark.parametrize(
    "kind, options", by_turns(["bytes", "bpe", "byte level", "byte fallback", "sentencepiece"], [*EACH])
)
def test_every_text_that_ends_matches(kind, options, model, tmp_path_factory) -> None:
    tokenizer = detokenizer(kind, tmp_path_factory.mktemp("tokenizer"))
    sampling = {"do_sample": True, "seed": 3, "temperature": 3.0}
    found = texts(model, tokenizer, **options) + texts(model, tokenizer, 6, **options, **sampling)
    assert all(matches(text, options) for text in found)
    assert len({*found}) > 1


@pytest.mark.parametrize("engine", [CPP, "kv_cache", "recompute"])
@pytest.mark.parametrize("more", [{}, {"repetition_penalty": 1.5}, {"shortlist": [*range(3, 259)]}], ids=str)
def test_the_best_allowed_token_is_chosen(engine, more, model) -> None:
    tokenizer, said = ByteTokenizer(), list[int]()
    while True:  # a loop that knows only which bytes may come next
        if any(tokenizer.encode(one) == said for one in CHOICES) and not any(
            tokenizer.encode(one)[: len(said)] == said != tokenizer.encode(one) for one in CHOICES
        ):
            break
        allowed = {tokenizer.encode(one)[len(said)] for one in CHOICES if tokenizer.encode(one)[: len(said)] == said
                   and len(tokenizer.encode(one)) > len(said)}  # fmt: skip
        allowed |= {1} if any(tokenizer.encode(one) == said for one in CHOICES) else set()
        logits = model(torch.tensor([[*PROMPT, *said]]))[0, -1]
        if "repetition_penalty" in more:
            seen = torch.tensor(sorted({*PROMPT, *said}))
            old = logits[seen]
            logits[seen] = torch.where(old > 0, old / 1.5, old * 1.5)
        said.append(max(allowed, key=lambda i: float(logits[i])))
        if said[-1] == 1:
            break
    out = generate(model, [PROMPT], choices=CHOICES, tokenizer=tokenizer, engine=engine, max_new_tokens=40, **more)
    assert out[0, len(PROMPT) :].tolist() == said


@needs_cpp
@pytest.mark.parametrize("threads", [1, 2])
def test_rows_with_and_without_constraints_share_a_batch(threads, model) -> None:
    tokenizer, kinds = ByteTokenizer(), [
        {"schema": SCHEMA}, {}, {"regex": REGEX, "do_sample": True, "seed": 1}, {"choices": CHOICES},
        {"do_sample": True, "seed": 2}, {"grammar": GRAMMAR, "repetition_penalty": 1.2}, {"num_beams": 3},
        {"regex": "[a-z]{12}", "num_return_sequences": 3, "do_sample": True, "seed": 5},
    ]  # fmt: skip

    def requests(options: dict[str, Any]) -> list[Any]:
        builder = RequestBuilder(model, GenerationConfig(max_new_tokens=20, **options), tokenizer=tokenizer)
        return [builder.build(builder.check(PROMPT))]

    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        with torch.inference_mode():
            together, alone = [requests(one) for one in kinds], [requests(one) for one in kinds]
            builder = RequestBuilder(model, GenerationConfig())
            run(new_scheduler(builder.engine), [one for each in together for one in each])
            for each in alone:
                run(new_scheduler(builder.engine), each)
    finally:
        torch.set_num_threads(before)
    for one, other in zip(together, alone, strict=True):
        assert [row.tokens for row in one[0].results] == [row.tokens for row in other[0].results]


def test_a_text_that_is_cut_is_the_beginning_of_one_that_matches(model) -> None:
    whole = "a" * 50
    out = generate(model, [PROMPT], choices=[whole], tokenizer=ByteTokenizer(), max_new_tokens=7)
    assert ByteTokenizer().decode(out[0, len(PROMPT) :].tolist()) == whole[:7]


@pytest.mark.parametrize(
    "options",
    [
        {"schema": {"type": "string", "format": "unheard-of"}}, {"schema": {"not": {"type": "null"}}},
        {"schema": {"$ref": "#/nowhere"}}, {"schema": {"type": "fruit"}}, {"schema": {"enum": []}},
        {"schema": "{"}, {"schema": 7}, {"regex": "("}, {"regex": "(?=a)b"}, {"regex": ""},
        {"grammar": "start: nothing"}, {"grammar": "start: start"}, {"schema": {"$ref": "#"}},
        {"choices": ["a", ""]}, {"choices": [1]}, {"regex": "a", "choices": ["a"]}, {"regex": "a", "num_beams": 2},
        {"regex": "a", "forced_eos_token_id": 1}, {"schema": {"type": "array", "uniqueItems": True}},
    ],
    ids=str,
)  # fmt: skip
def test_what_cannot_be_enforced_is_an_error_before_the_first_token(options, model) -> None:
    with pytest.raises(ValueError, match=next(iter(options))):
        generate(model, [PROMPT], tokenizer=ByteTokenizer(), max_new_tokens=4, **options)


def test_a_constraint_needs_a_tokenizer_and_prompts(model) -> None:
    with pytest.raises(ValueError, match="tokenizer"):
        generate(model, [PROMPT], regex="a")
    with pytest.raises(ValueError, match="tokenizer"):
        generate(model, [PROMPT], regex="a", tokenizer=object())
    source = drawn(
        Transformer, vocab_size=260, d_model=8, num_heads=2, d_ff=8, num_encoder_layers=1, num_decoder_layers=1
    )
    with pytest.raises(ValueError, match="source"):
        generate(source, [PROMPT], regex="a", tokenizer=ByteTokenizer())


def test_options_that_forbid_every_allowed_token_are_an_error(model) -> None:
    [token] = ByteTokenizer().encode("b")
    generator = Generator(model)
    with pytest.raises(ValueError, match="constraint"):
        generator.generate([PROMPT], regex="ab+", suppress_tokens=[token], tokenizer=ByteTokenizer(), max_new_tokens=9)
    assert generator.generate([PROMPT], regex="ab{2}", tokenizer=ByteTokenizer(), max_new_tokens=9).shape[1] == 6


def test_a_processor_cannot_break_a_constraint(model) -> None:
    def wants_z(input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        return torch.full_like(scores, -9.0).index_fill(1, torch.tensor(ByteTokenizer().encode("z")), 50.0)

    [text] = texts(model, ByteTokenizer(), regex="[a-c]{4}", logits_processor=wants_z)
    assert re.fullmatch("[a-c]{4}", text)


@needs_cpp
@pytest.mark.parametrize("more", [{}, {"do_sample": True, "seed": 7}, {"repetition_penalty": 1.3}], ids=str)
def test_certain_tokens_are_read_in_one_pass_and_change_nothing(more, model, monkeypatch, calls_of) -> None:
    fields = {f"a rather long name of field {i}": {"type": "boolean"} for i in range(3)}
    schema = {"type": "object", "properties": fields, "required": [*fields], "additionalProperties": False}
    options = {"schema": schema, "tokenizer": ByteTokenizer(), "max_new_tokens": 300, **more}
    reads = calls_of(CppBatch, "read")
    out = generate(model, [PROMPT, [5]], return_dict_in_generate=True, **options)
    passes = len(reads)
    monkeypatch.setattr(Matcher, "forced", lambda matcher: [])
    plain = generate(model, [PROMPT, [5]], return_dict_in_generate=True, **options)
    assert out.sequences.tolist() == plain.sequences.tolist()
    torch.testing.assert_close(out.token_log_probs, plain.token_log_probs, rtol=0, atol=0)
    assert 2 * passes < len(reads) - passes


def drawn_schema(draw: random.Random, depth: int = 0, definitions: int = 0) -> dict[str, Any]:
    """Draws a schema that bounds every text."""
    kinds = ["string", "integer", "number", "boolean", "null", "enum", "const", "format", "pattern", "ref"]
    kinds += ["object", "array", "anyOf", "tuple"] * (2 if depth < 3 else 0)
    kind = draw.choice(kinds)
    inner = functools.partial(drawn_schema, draw, depth + 1, definitions)
    if kind == "ref":
        return {"$ref": f"#/$defs/d{draw.randrange(definitions)}"} if definitions else {"type": "null"}
    if kind == "string":
        least = draw.randrange(3)
        return {"type": "string", "minLength": least, "maxLength": least + draw.randrange(1, 5)}
    if kind in ("integer", "number"):
        low = draw.randrange(-1000, 1000)
        name = draw.choice(["maximum", "exclusiveMaximum"])
        return {"type": kind, "minimum": low, name: low + draw.randrange(2, 5000)}
    if kind in ("enum", "const"):
        values: list[Any] = draw.sample([1, -2.5, "é", "日本", '"\\', None, True, [], {"a": [1]}, "a b", ""], 3)
        return {"enum": values} if kind == "enum" else {"const": values[0]}
    if kind == "format":
        return {"type": "string", "format": draw.choice(["date", "uuid", "ipv4", "email"])}
    if kind == "pattern":
        return {
            "type": "string",
            "pattern": draw.choice(["^[a-c]{2,4}$", "^(x|yz)+[0-9]?$", "^\\d{3}-é?$"]),
            "maxLength": 9,
        }
    if kind == "anyOf":
        return {"anyOf": [inner() for _ in range(draw.randrange(1, 4))]}
    if kind == "tuple":
        return {"type": "array", "prefixItems": [inner(), inner()], "items": False, "minItems": 2}
    if kind == "array":
        return {"type": "array", "items": inner(), "minItems": draw.randrange(2), "maxItems": draw.randrange(2, 4)}
    if kind == "object":
        names = draw.sample(["name", "größe", "a b", "日本", "_", "x-1", 'q"'], draw.randrange(1, 4))
        required = [name for name in names if draw.random() < 0.7]
        properties = {name: inner() for name in names}
        return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}
    return {"type": kind}


@pytest.mark.parametrize("count", [12, pytest.param(300, marks=pytest.mark.slow)])
def test_random_schemas(count, model) -> None:
    draw, tokenizer, generator, ended = random.Random(1), ByteTokenizer(), Generator(model), 0
    for number in range(count):
        schema = drawn_schema(draw, definitions=2)
        schema["$defs"] = {f"d{i}": drawn_schema(draw, 2) for i in range(2)}
        options = {"tokenizer": tokenizer, "max_new_tokens": 700, "do_sample": True, "seed": number, "temperature": 2.0}
        out = generator.generate([PROMPT], schema=schema, num_return_sequences=3, **options)
        assert isinstance(out, torch.Tensor)
        for row in out[:, len(PROMPT) :].tolist():
            ids = [i for i in row if i]
            if len(ids) < 700:
                text = b"".join(tokenizer.token_bytes[i] or b"" for i in ids).decode()
                checker = jsonschema.Draft202012Validator(schema, format_checker=jsonschema.FormatChecker())
                checker.validate(json.loads(text))
                ended += 1
    assert ended > 2.5 * count


async def _completion(model: Any, tokenizer: Any, prompt: list[int], **options: Any) -> Any:
    async with AsyncGenerator(model, tokenizer) as session:
        [one] = await session.complete(prompt, **options)
        pieces = [piece async for piece in session.stream(prompt, **options)]
        assert "".join(piece.text for piece in pieces) == one.text
        assert pieces[-1].finish_reason == one.finish_reason
        return one


@pytest.mark.parametrize("kind", ["bytes", "byte fallback", "sentencepiece"])
def test_a_whole_text_stops_and_a_cut_one_has_the_reason_length(kind, model, tmp_path_factory) -> None:
    tokenizer = detokenizer(kind, tmp_path_factory.mktemp("tokenizer"))
    for prompt in (PROMPT, ChatIds(PROMPT)):
        whole = asyncio.run(_completion(model, tokenizer, prompt, choices=["  two spaces"], max_new_tokens=12))
        assert (whole.text, whole.finish_reason) == ("  two spaces", "stop")
    cut = asyncio.run(_completion(model, tokenizer, PROMPT, regex="[a-z]{12}", max_new_tokens=3))
    assert len(cut.tokens) == 3 and cut.finish_reason == "length"


class Tokens:
    """A tokenizer whose ids have given texts."""

    def __init__(self, *texts: str) -> None:
        self.token_bytes = [text.encode() for text in texts]


def test_callers_that_compile_a_constraint_at_once_keep_one_grammar(monkeypatch) -> None:
    import llguidance

    vocabulary, constraint, make = Vocabulary(Tokens(*"ab"), 2), Constraint("regex", "[ab]{3}"), llguidance.LLMatcher
    kept: list[Any] = []

    class BesideAnother:
        grammar_from_regex = staticmethod(make.grammar_from_regex)

        def __new__(cls, *given: Any, **options: Any) -> Any:
            monkeypatch.setattr(llguidance, "LLMatcher", make)
            kept.append(vocabulary.grammar(constraint))
            return make(*given, **options)

    monkeypatch.setattr(llguidance, "LLMatcher", BesideAnother)
    vocabulary.grammar(constraint)
    for count in range(1, 41):
        vocabulary.grammar(Constraint("regex", f"a{{{count}}}"))
    assert vocabulary.grammar(constraint) is kept[0]


# The tokens of a row, "·" between them, and in capitals what is under the constraint, three letters of a and b.
LATE: list[tuple[str, dict[str, Any]]] = [
    ("f·a·<c>·A·B·A·f·<c>·B·A·A", {}),
    ("f·<·c·>·A·A·B·<c>·A", {}),
    ("f<·c>a·B·A·f", {}),  # a token may have the mark's end and more
    ("f<·c>f·a·b·a", {}),  # but if that breaks the constraint, the row stays free
    ("<c·a·<c>·A·B·B", {}),
    ("<<c>·A", {}),
    ("<t>·f·<c>·a·</t>·f·<c>·A", {"hidden": ("<t>", "</t>")}),
    ("f·<t>·<c>·A·A·A", {"hidden": ("<t>", "</t>")}),  # it isn't at the beginning
    ("f·<c>·a·</·t>·<c>·A", {"hidden": ("<t>", "</t>"), "is_open": True}),
    ("<s>·A", {"texts": {"SPECIAL": ""}, "shown": {0: "SPECIAL"}}),
    (" ·ab·A·;· ·ab·A·f·ab·a", {"texts": {"ab": "ab"}, "is_first": True}),
    ("f·ab·a", {"texts": {"ab": "ab"}, "is_first": True}),
]


@each("row, options", LATE)
def test_a_constraint_holds_only_behind_its_triggers(row, options) -> None:
    texts = ["<s>", *"abcft<>; ", "<c>", "<<c>", "<c", "f<", "c>a", "c>f", "c>", "<t>", "</t>", "</", "t>", "ab"]
    vocabulary = Vocabulary(Tokens(*texts), len(texts))
    constraint = Constraint("regex", "[ab]{3}")
    triggers = Triggers(constraint, **{"texts": {"<c>": ""}, "shown": {}, **options})
    matcher: Any = vocabulary.late_matcher(triggers, [])
    allowed = [i for i, text in enumerate(texts) if not set(text) - set("ab")]
    for token in row.split("·"):
        copied = matcher.copy()
        for one in (copied, matcher):
            mask = np.zeros((1, one.num_words), np.uint32)
            one.fill(mask[0])
            found = np.flatnonzero(allowed_tokens(mask, len(texts))).tolist()
            is_bound = token.isupper()
            assert one.is_bound == is_bound and (set(found) <= {*allowed} if is_bound else len(found) == len(texts))
            one.take(texts.index(token.lower()))
