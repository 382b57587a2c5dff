"""The bodies of requests to OpenAI's routes and of their responses, and errors in OpenAI's shape.

A field that this server doesn't support and that would change the answer is an error, since the client would misread an
answer that ignores it. `UNSUPPORTED`, and `UNSUPPORTED_OF_ENCODERS` of encoders, have the names of such fields, in the
formats that clients send, with the values that ask for nothing. Other unknown fields are ignored: OpenAI's clients send
new ones before servers know them.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal, TypeAlias

from fastapi import Response
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field
from pydantic_core import PydanticCustomError
from starlette.exceptions import HTTPException

from fastformer.serving.answers import answer, error_schemas
from fastformer.serving.limits import Limits

MOST_ALTERNATIVES = 20  # the most alternatives of a token, with their log-probabilities
_MOST_STOPS = 16
_MOST_BIASES = 1024
_MOST_TOOLS = 128  # as many as OpenAI takes
_MOST_MESSAGES = 2048  # messages of a chat, and parts of them; OpenAI takes as many messages

# Fields of OpenAI, vLLM, SGLang, llama.cpp, TGI and transformers that change what a language model answers. Each has
# the values that ask for nothing; for all of them None does. A field that a body takes isn't looked up here.
UNSUPPORTED: Mapping[str, tuple[Any, ...]] = {
    # OpenAI
    "audio": (), "echo": (False,), "function_call": ("none",), "functions": ([],), "modalities": (["text"],),
    "moderation": (), "prediction": (), "reasoning": (), "reasoning_effort": ("none",),
    "response_format": ({"type": "text"},), "store": (False,), "suffix": ("",), "tool_choice": ("none", "auto"),
    "tools": ([],), "verbosity": ("medium",), "web_search_options": (),
    # vLLM and SGLang
    "allowed_token_ids": ([],), "bad_words": ([],), "chat_template": (), "continue_final_message": (False,),
    "documents": ([],), "ebnf": (), "guided_choice": (), "guided_decoding_backend": (), "guided_grammar": (),
    "guided_json": (), "guided_regex": (), "guided_whitespace_pattern": (), "ignore_eos": (False,),
    "include_stop_str_in_output": (False,), "length_penalty": (1,), "logits_processors": ([],), "lora_path": (),
    "mm_processor_kwargs": ({},), "no_stop_trim": (False,), "prompt_embeds": (), "prompt_logprobs": (), "regex": (),
    "return_token_ids": (False,), "return_tokens_as_token_ids": (False,), "skip_special_tokens": (True,),
    "spaces_between_special_tokens": (True,), "structural_tag": (), "structured_outputs": (),
    "truncate_prompt_tokens": (), "use_beam_search": (False,), "vllm_xargs": ({},),
    # TGI
    "adapter_id": (), "best_of": (1,), "decoder_input_details": (False,), "grammar": (), "guideline": ("",),
    "stop_sequences": ([],), "tool_prompt": (), "top_n_tokens": (0,), "truncate": (), "typical_p": (1,),
    "watermark": (False,),
    # llama.cpp
    "dry_multiplier": (0,), "dynatemp_range": (0,), "json_schema": (), "logit_bias": ([], {}), "mirostat": (0,),
    "mirostat_mode": (0,), "n_predict": (-1,), "n_probs": (0,), "repeat_penalty": (1,), "samplers": (), "tfs": (1,),
    "tfs_z": (1,), "top_a": (0,), "top_n_sigma": (-1,), "typical": (1,), "xtc_probability": (0,),
    # transformers
    "bad_words_ids": (), "decoder_start_token_id": (), "diversity_penalty": (0,), "early_stopping": (False,),
    "encoder_repetition_penalty": (1,), "epsilon_cutoff": (0,), "eta_cutoff": (0,), "forced_bos_token_id": (),
    "forced_eos_token_id": (), "frequency_penalty": (0,), "max_length": (), "max_time": (), "min_length": (0,),
    "min_new_tokens": (0,), "no_repeat_ngram_size": (0,), "num_beams": (1,), "num_return_sequences": (1,),
    "penalty_alpha": (0,), "presence_penalty": (0,), "suppress_tokens": ([],),
    # Others
    "enable_thinking": (), "format": ("",), "images": ([],), "options": ({},), "think": (False,),
    "thinking": ({"type": "disabled"},),
    # Fields of one of this server's formats in a request of another
    "chat_template_kwargs": ({},), "max_completion_tokens": (), "max_new_tokens": (), "min_p": (0,), "min_tokens": (0,),
    "n": (1,), "stop_token_ids": ([],), "top_logprobs": (0,),
}  # fmt: skip

# The schema of a response of server-sent events: each event is an object with these fields.
_EVENT = {"type": "object", "properties": {"data": {"type": "string"}, "event": {"type": "string"}}}
EVENTS: dict[str, Any] = {"text/event-stream": {"schema": _EVENT}}

Temperature: TypeAlias = Annotated[float, Field(ge=0, le=2)]
Penalty: TypeAlias = Annotated[float, Field(ge=-2, le=2)]
Text: TypeAlias = Annotated[str, Field(min_length=1)]
LEAST_LOG_PROB = -9999.0  # JSON has no infinity
Schema: TypeAlias = dict[str, Any] | str
Stop: TypeAlias = Annotated[str, Field(min_length=1, max_length=1000)]


def _whole(value: Any) -> Any:
    """Returns 16 for 16.0: JSON has one kind of number, and JavaScript, Lua, R and Go's maps write either."""
    return int(value) if type(value) is float and value.is_integer() else value


# An integer. Texts and booleans are refused, as is 16.5.
Int: TypeAlias = Annotated[int, BeforeValidator(_whole)]
Token: TypeAlias = Annotated[Int, Field(ge=0, lt=2**31)]
# Lists fail fast: to list the errors of all elements of a long one, in each type that it may have, takes seconds, in
# which no other request is answered.
TokenIds: TypeAlias = Annotated[list[Token], Field(min_length=1, fail_fast=True)]
Texts: TypeAlias = Annotated[list[str], Field(fail_fast=True)]


_BOUNDS = {"ge": "minimum", "gt": "exclusiveMinimum", "le": "maximum", "lt": "exclusiveMaximum"}


def with_bounds(schema: Any) -> None:
    """Gives the bounds of integers the names of JSON's schemas; pydantic leaves its own behind a validator."""
    if isinstance(schema, dict):
        for name in _BOUNDS.keys() & schema.keys() if schema.get("type") == "integer" else ():
            schema[_BOUNDS[name]] = schema.pop(name)
    for each in schema.values() if isinstance(schema, dict) else schema if isinstance(schema, list) else ():
        with_bounds(each)


class Body(BaseModel):
    """The base of request bodies. Fields that it doesn't have are kept for `unsupported_field`.

    Attributes:
        unsupported: fields that it doesn't have and that would change the answer, with the values that ask for nothing.
    """

    model_config = ConfigDict(extra="allow", strict=True, allow_inf_nan=False, json_schema_extra=with_bounds)

    unsupported: ClassVar[Mapping[str, tuple[Any, ...]]] = {}


def unsupported_field(body: Body) -> str | None:
    """Returns the place of a field that isn't supported and has a value that asks for something; None without one."""
    for name, value in (body.model_extra or {}).items():
        neutral = body.unsupported.get(name)
        if neutral is not None and value is not None and not any(_is_same(value, one) for one in neutral):
            return name
    given = body.model_fields_set
    for name, value in vars(body).items():
        if name not in given:
            continue
        parts = [(name, value)] if isinstance(value, Body) else []
        if isinstance(value, list):
            parts = [(f"{name}.{place}", one) for place, one in enumerate(value) if isinstance(one, Body)]
        for place, part in parts:
            if (inner := unsupported_field(part)) is not None:
                return f"{place}.{inner}"
    return None


def _is_same(value: Any, neutral: Any) -> bool:
    return bool(value == neutral) and isinstance(value, bool) == isinstance(neutral, bool)


class StreamOptions(Body):
    """The options of a stream.

    Attributes:
        include_usage: end the stream with a chunk that counts the tokens.
    """

    unsupported = {"continuous_usage_stats": (False,)}

    include_usage: bool | None = None


class StructuredBody(Body):
    """The fields that constrain an answer, of which a request has at most one; response_format is OpenAI's."""

    response_format: dict[str, Any] | None = None
    structured_outputs: dict[str, Any] | None = None
    guided_json: Schema | None = None
    guided_regex: str | None = None
    guided_choice: Annotated[list[str], Field(fail_fast=True)] | None = None
    guided_grammar: str | None = None
    json_schema: Schema | None = None
    regex: str | None = None
    grammar: str | None = None
    ebnf: str | None = None

    @property
    def constraints(self) -> dict[str, Any]:
        """The fields that the request has, and their values."""
        given = self.model_fields_set
        names = [name for name in StructuredBody.model_fields if name in given]
        return {name: value for name in names if (value := getattr(self, name)) is not None}


class GenerateBody(StructuredBody):
    """The fields of completions and chats.

    top_k, min_p, repetition_penalty, min_tokens, stop_token_ids and timeout aren't OpenAI's.
    """

    model: str | None = None
    max_tokens: Annotated[Int, Field(ge=1)] | None = None
    temperature: Temperature | None = None
    top_p: Annotated[float, Field(ge=0, le=1)] | None = None
    n: Annotated[Int, Field(ge=1)] | None = None
    seed: Annotated[Int, Field(ge=-(2**63), lt=2**63)] | None = None
    stop: Stop | Annotated[list[Stop], Field(max_length=_MOST_STOPS, fail_fast=True)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    logit_bias: (
        Annotated[dict[str, Annotated[float, Field(ge=-100, le=100)]], Field(max_length=_MOST_BIASES)] | None
    ) = None
    top_k: Annotated[Int, Field(ge=-1)] | None = None  # vLLM's -1 is all, as 0 is
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    repetition_penalty: Annotated[float, Field(gt=0, le=100)] | None = None
    min_tokens: Annotated[Int, Field(ge=0)] | None = None
    stop_token_ids: Annotated[list[Token], Field(max_length=_MOST_STOPS, fail_fast=True)] | None = None
    timeout: Annotated[float, Field(gt=0)] | None = None


class CompletionBody(GenerateBody):
    """The body of a POST /v1/completions request."""

    unsupported = {**UNSUPPORTED, "add_special_tokens": (True,)}

    prompt: (
        str
        | Annotated[list[str], Field(min_length=1, fail_fast=True)]
        | TokenIds
        | Annotated[list[TokenIds], Field(min_length=1, fail_fast=True)]
    )
    parse_special: bool | None = None
    logprobs: Annotated[Int, Field(ge=0, le=MOST_ALTERNATIVES)] | None = None
    best_of: Annotated[Int, Field(ge=1)] | None = None


class ContentPart(Body):
    """A part of a message; only the type text is supported."""

    type: str
    text: str | None = None


class CalledBody(Body):
    """The name of a tool in a call, and its arguments as JSON."""

    name: str
    arguments: str


class ToolCallBody(Body):
    """A call of a tool in an assistant's message."""

    id: str | None = None
    type: Literal["function"] = "function"
    function: CalledBody


class MessageBody(Body):
    """A message of a chat.

    Attributes:
        tool_calls: the calls of tools in an assistant's message, which may lack content.
        tool_call_id: the call whose result a tool's message is.
        reasoning_content: the reasoning of an assistant's message, for templates that read it.
    """

    # prefix and partial ask to continue a message
    unsupported = {
        "audio": (), "function_call": (), "partial": (False,), "prefix": (False,), "reasoning": ("",),
        "refusal": ("",),
    }  # fmt: skip

    role: Literal["developer", "system", "user", "assistant", "tool"]
    content: str | Annotated[list[ContentPart], Field(min_length=1, fail_fast=True)] | None = None
    name: str | None = None
    tool_calls: Annotated[list[ToolCallBody], Field(max_length=_MOST_TOOLS, fail_fast=True)] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None


class FunctionBody(Body):
    """A function that the model may call, with the JSON schema of its arguments.

    Attributes:
        strict: whether a format of the schema that isn't known is an error.
    """

    name: Annotated[str, Field(pattern="^[a-zA-Z0-9_.-]{1,128}$")]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class ToolBody(Body):
    """A tool that the model may call."""

    type: Literal["function"]
    function: FunctionBody


def _countable(messages: Any) -> Any:
    """Refuses too many parts of messages before each is read: that would take a second for a large body."""
    if isinstance(messages, list):
        contents = [one.get("content") for one in messages if isinstance(one, dict)]
        parts = sum(len(content) for content in contents if isinstance(content, list))
        if parts > _MOST_MESSAGES:
            raise PydanticCustomError("too_long", f"expected at most {_MOST_MESSAGES:,} parts of messages")
    return messages


class ChatBody(GenerateBody):
    """The body of a POST /v1/chat/completions request; the last two fields aren't OpenAI's.

    Attributes:
        tool_choice: whether the model calls tools: "none", "auto", "required", or an object with the name of one.
        add_generation_prompt: end the prompt with the beginning of an answer.
        chat_template_kwargs: further variables of the chat template.
    """

    unsupported = {**UNSUPPORTED, "add_special_tokens": (False,)}

    messages: Annotated[
        list[MessageBody], Field(min_length=1, max_length=_MOST_MESSAGES, fail_fast=True), BeforeValidator(_countable)
    ]
    tools: Annotated[list[ToolBody], Field(max_length=_MOST_TOOLS, fail_fast=True)] | None = None
    tool_choice: Literal["none", "auto", "required"] | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    max_completion_tokens: Annotated[Int, Field(ge=1)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[Int, Field(ge=0, le=MOST_ALTERNATIVES)] | None = None
    add_generation_prompt: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None


# The bodies of responses.


class ErrorFields(BaseModel):
    """The fields of an error."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(BaseModel):
    """The body of an error response."""

    error: ErrorFields


class ModelBody(BaseModel):
    """A model that is served; parent: the one that an adapter changes."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    parent: str | None = None


class ModelsBody(BaseModel):
    """The body of a GET /v1/models response."""

    object: Literal["list"]
    data: list[ModelBody]


class CachedTokens(BaseModel):
    """The number of a prompt's tokens that were read from the cache."""

    cached_tokens: int


class Usage(BaseModel):
    """The numbers of tokens of a request and its answers, and of those drafted rightly and wrongly if any were."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: CachedTokens
    completion_tokens_details: dict[str, int] | None = None


class LegacyLogprobs(BaseModel):
    """The log-probabilities of a completion's tokens."""

    tokens: list[str]
    token_logprobs: list[float]
    top_logprobs: list[dict[str, float]] | None
    text_offset: list[int]


class TextChoice(BaseModel):
    """A completion."""

    index: int
    text: str
    logprobs: LegacyLogprobs | None
    finish_reason: Literal["stop", "length"] | None


class TextCompletion(BaseModel):
    """The body of a POST /v1/completions response."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    system_fingerprint: str
    choices: list[TextChoice]
    usage: Usage


class TopLogprob(BaseModel):
    """A likely token at a place of the answer."""

    token: str
    logprob: float
    bytes: list[int] | None


class TokenLogprob(TopLogprob):
    """A token of the answer, with the likely tokens at its place."""

    top_logprobs: list[TopLogprob]


class ChatLogprobs(BaseModel):
    """The log-probabilities of an answer's tokens."""

    content: list[TokenLogprob]
    refusal: None


class CalledFunction(BaseModel):
    """The name of a tool, and its arguments as JSON."""

    name: str
    arguments: str


class ToolCall(BaseModel):
    """A call of a tool."""

    id: str
    type: Literal["function"]
    function: CalledFunction


class ChatMessage(BaseModel):
    """An answer in a chat; it has tool_calls and reasoning_content if the model wrote some."""

    role: Literal["assistant"]
    content: str | None
    refusal: None
    tool_calls: list[ToolCall] | None = None
    reasoning_content: str | None = None


class ChatChoice(BaseModel):
    """An answer in a chat, with the reason why it ended."""

    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None
    finish_reason: Literal["stop", "length", "tool_calls"]


class ChatCompletion(BaseModel):
    """The body of a POST /v1/chat/completions response."""

    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    system_fingerprint: str
    choices: list[ChatChoice]
    usage: Usage


_TYPES = {
    401: ("authentication_error", "invalid_api_key"),
    403: ("permission_error", None),
    404: ("not_found_error", None),
    413: ("invalid_request_error", "request_too_large"),
    429: ("rate_limit_error", "rate_limit_exceeded"),
    503: ("service_unavailable_error", "service_unavailable"),
    504: ("timeout_error", "timeout"),
}

# The names that clients send if they are configured with a URL and no model: those of Hugging Face, and of speech.
_PLACEHOLDERS = ("dummy", "tgi", "whisper-1")

ERRORS = error_schemas(
    ErrorBody,
    {
        400: "The request is wrong; `param` says where.",
        404: "Another model than the one that is served.",
        413: "The body is too large.",
    },
)


class ApiError(HTTPException):
    """An error with OpenAI's fields.

    Args:
        message: says what was expected and what the request had.
        param: the wrong field of the request.
        code: names the error for programs.
        status: the HTTP status.
    """

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None, status: int = 400) -> None:
        super().__init__(status, message)
        self.fields = {"param": param, "code": code}


def error_fields(status: int, message: str, **detail: Any) -> dict[str, Any]:
    """Returns the JSON value of an error."""
    usual = ("server_error", None) if status >= 500 else ("invalid_request_error", None)
    kind, code = _TYPES.get(status, usual)
    return {
        "error": {
            "message": message,
            "type": kind,
            "param": detail.get("param"),
            "code": code if detail.get("code") is None else detail["code"],
        }
    }


def error_response(status: int, message: str, **detail: Any) -> Response:
    """Makes an error response in OpenAI's shape.

    Args:
        status, message: see `ApiError`.
        detail: param and code, as for `ApiError`; headers of the response.
    """
    return answer(error_fields(status, message, **detail), status, detail.get("headers"))


def check_model(requested: str | None, served: Collection[str]) -> None:
    """Raises an ApiError if a request names another model than one that is served."""
    if requested not in (None, *served, *_PLACEHOLDERS):
        names = ", ".join(map(repr, served))
        reason = f"expected the model {names:.400}, which is served here, got {requested!r:.80}"
        raise ApiError(reason, param="model", code="model_not_found", status=404)


def check_length(text: str | list[int], limits: Limits, param: str) -> None:
    """Raises an ApiError if a text has more characters than the limits allow."""
    if isinstance(text, str) and len(text) > limits.max_text_chars:
        raise ApiError(limits.why_not([text]) or "", param=param, code="string_above_max_length")


def check_texts(texts: Sequence[str], limits: Limits, param: str) -> None:
    """Raises an ApiError if there are more texts, or longer ones, than the limits allow."""
    if (reason := limits.why_not(texts)) is not None:
        code = "string_above_max_length" if len(texts) <= limits.max_texts else None
        raise ApiError(reason, param=param, code=code)


def check_body(body: Body, served: Collection[str]) -> None:
    """Raises an ApiError if a body names another model, or has a value of a field that isn't supported."""
    check_model(getattr(body, "model", None), served)
    name = unsupported_field(body)
    if name is not None:
        raise ApiError(
            f"expected no {name}, which this server doesn't support: leave it out",
            param=name,
            code="unsupported_parameter",
        )
