"""What bodies take: integers with a point, no field that would go unheeded; and few errors, however long a body is."""

from __future__ import annotations

from typing import Any

import pydantic
import pytest

from fastformer.serving.embeddings import EmbeddingsBody
from fastformer.serving.libretranslate import TranslateBody
from fastformer.serving.openai_bodies import ChatBody, CompletionBody, unsupported_field
from fastformer.serving.rerank import DocumentsBody
from fastformer.serving.tei import EmbedBody, PredictBody, RerankBody
from fastformer.serving.tgi import GenerateBody, Parameters
from fastformer.serving.translate import Ask
from tests.covering import each

RIGHT: dict[Any, dict[str, Any]] = {
    CompletionBody: {"prompt": "a"},
    ChatBody: {"messages": [{"role": "user", "content": "a"}]},
    EmbeddingsBody: {"input": "a"},
    EmbedBody: {"inputs": "a"},
    RerankBody: {"query": "a", "texts": ["b"]},
    PredictBody: {"inputs": "a"},
    DocumentsBody: {"query": "a", "documents": ["b"]},
    GenerateBody: {"inputs": "a"},
    Parameters: {},
    Ask: {"text": "a"},
    TranslateBody: {"q": "a", "source": "en", "target": "de"},
}
INTEGERS = [
    (kind, name)
    for kind in RIGHT
    for name, field in kind.model_json_schema()["properties"].items()
    if "integer" in {one.get("type") for one in (field, *field.get("anyOf", ()))}
]


@each("kind, name", INTEGERS)
def test_an_integer_may_have_a_point(kind, name) -> None:
    right = RIGHT[kind]
    found = getattr(kind.model_validate({**right, name: 2.0}), name)
    assert found == 2 and type(found) is int
    for wrong in (2.5, True, "2", "2.0", [2]):
        with pytest.raises(pydantic.ValidationError):
            kind.model_validate({**right, name: wrong})


def test_ids_of_tokens_may_have_points() -> None:
    assert CompletionBody.model_validate({"prompt": [1.0, 2]}).prompt == [1, 2]
    assert CompletionBody.model_validate({"prompt": [[1.0], [2]]}).prompt == [[1], [2]]
    assert CompletionBody.model_validate({"prompt": "a", "stop_token_ids": [7.0]}).stop_token_ids == [7]
    with pytest.raises(pydantic.ValidationError):
        CompletionBody.model_validate({"prompt": [1, 2.5]})


UNKNOWN = [kind for kind in RIGHT if getattr(kind, "unsupported", None)]


@pytest.mark.parametrize("kind", UNKNOWN)
def test_fields_that_would_change_an_answer_are_refused_by_name(kind) -> None:
    for name, neutral in kind.unsupported.items():
        if name not in kind.model_fields:
            for value in (*neutral, None):
                assert unsupported_field(kind.model_validate({**RIGHT[kind], name: value})) is None, name
            assert unsupported_field(kind.model_validate({**RIGHT[kind], name: {"a": 1}})) == name
    assert unsupported_field(kind.model_validate({**RIGHT[kind], "newest_field": {"a": 1}})) is None


# Fields of other servers that change what they answer, as their clients write them.
OF_OTHERS = (
    "allowed_token_ids audio bad_words bad_words_ids decoder_input_details documents dry_multiplier dynatemp_range "
    "early_stopping ebnf echo encoder_repetition_penalty epsilon_cutoff eta_cutoff forced_bos_token_id "
    "forced_eos_token_id format function_call functions grammar guided_choice guided_grammar guided_json guided_regex "
    "ignore_eos images include_stop_str_in_output json_schema length_penalty logits_processors lora_path max_length "
    "max_time min_length mirostat mirostat_mode modalities n_predict n_probs no_repeat_ngram_size no_stop_trim "
    "num_beams num_return_sequences options penalty_alpha prediction prompt_embeds prompt_logprobs reasoning_effort "
    "regex repeat_penalty response_format return_token_ids return_tokens_as_token_ids samplers skip_special_tokens "
    "spaces_between_special_tokens stop_sequences structural_tag structured_outputs suffix suppress_tokens tfs_z think "
    "thinking tool_choice tools top_a top_n_sigma top_n_tokens truncate truncate_prompt_tokens typical_p "
    "use_beam_search watermark web_search_options xtc_probability"
)
OF_OTHER_ENCODERS = (
    "add_special_tokens embedding_type embedding_types input_type instruction late_chunking max_chunks_per_doc "
    "max_tokens_per_doc normalized output_dimension output_dtype rank_fields return_multivector task task_type "
    "truncate_prompt_tokens use_activation"
)


@pytest.mark.parametrize("kind", UNKNOWN)
def test_fields_of_other_servers_are_refused(kind) -> None:
    of_text = issubclass(kind, CompletionBody | ChatBody | GenerateBody | Parameters)
    for name in {*(OF_OTHERS if of_text else OF_OTHER_ENCODERS).split()} - {*kind.model_fields}:
        assert unsupported_field(kind.model_validate({**RIGHT[kind], name: {"a": 1}})) == name


def test_fields_of_parts_are_refused_by_their_places() -> None:
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b", "function_call": {"name": "f"}}]
    assert unsupported_field(ChatBody.model_validate({"messages": messages})) == "messages.1.function_call"
    usage = {"stream_options": {"continuous_usage_stats": True}}
    assert unsupported_field(CompletionBody.model_validate({"prompt": "a", **usage})) == (
        "stream_options.continuous_usage_stats"
    )
    for name, value in (
        ("echo", 0),
        ("min_length", False),
        ("use_beam_search", 0.0),
    ):  # another type asks for something
        assert unsupported_field(CompletionBody.model_validate({"prompt": "a", name: value})) == name
    of_parameters = GenerateBody.model_validate({"inputs": "a", "parameters": {"num_beams": 2}})
    assert unsupported_field(of_parameters) == "parameters.num_beams"
    assert unsupported_field(GenerateBody.model_validate({"inputs": "a", "temperature": 2.0})) == "temperature"


@each("elements", [[None] * 1000, [1] * 1000 + [0.5], [[1] * 1000 + [None]], [["a"] * 3] * 1000])
@each("kind, field", [
    (CompletionBody, "prompt"), (CompletionBody, "stop"), (ChatBody, "messages"), (EmbeddingsBody, "input"),
    (EmbedBody, "inputs"), (RerankBody, "texts"), (PredictBody, "inputs"), (Ask, "text"), (Ask, "prefix"),
    (TranslateBody, "q"),
])  # fmt: skip
def test_a_long_list_has_few_errors(kind: Any, field: str, elements: list[Any]) -> None:
    content = {"role": "user", "content": elements}
    for value in (elements, [content]) if field == "messages" else (elements,):
        with pytest.raises(pydantic.ValidationError) as found:
            kind.model_validate({field: value})
        assert len(found.value.errors()) < 10
