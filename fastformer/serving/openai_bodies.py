"""The bodies of requests to OpenAI's routes and of their responses.

`UNSUPPORTED` has the fields that fastformer knows but doesn't support, with the values that ask for nothing. Any other
value of them is an error, since the client would misread an answer that ignores it. Unknown fields are ignored:
OpenAI's clients send new ones before servers know them.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeAlias

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field
from pydantic_core import PydanticCustomError

MOST_ALTERNATIVES = 20  # the most alternatives of a token, with their log-probabilities
_MOST_STOPS = 16
_MOST_BIASES = 1024
_MOST_MESSAGES = 2048  # messages of a chat, and parts of them; OpenAI takes as many messages

# Fields of the standard that aren't supported, with the values that ask for nothing; for all of them None does.
UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    "audio": (),
    "echo": (False,),
    "function_call": ("none",),
    "functions": ([],),
    "modalities": (["text"],),
    "moderation": (),
    "prediction": (),
    "reasoning_effort": ("none",),
    "response_format": ({"type": "text"},),
    "store": (False,),
    "suffix": ("",),
    "tool_choice": ("none", "auto"),
    "tools": ([],),
    "verbosity": ("medium",),
    "web_search_options": (),
}

# The schema of a response of server-sent events: each event is an object with these fields.
_EVENT = {"type": "object", "properties": {"data": {"type": "string"}, "event": {"type": "string"}}}
EVENTS: dict[str, Any] = {"text/event-stream": {"schema": _EVENT}}

Temperature: TypeAlias = Annotated[float, Field(ge=0, le=2)]
Penalty: TypeAlias = Annotated[float, Field(ge=-2, le=2)]
Text: TypeAlias = Annotated[str, Field(min_length=1)]
LEAST_LOG_PROB = -9999.0  # JSON has no infinity
Stop: TypeAlias = Annotated[str, Field(min_length=1, max_length=1000)]
Token: TypeAlias = Annotated[int, Field(ge=0, lt=2**31)]
# Lists fail fast: to list the errors of all elements of a long one, in each type that it may have, takes seconds, in
# which no other request is answered.
TokenIds: TypeAlias = Annotated[list[Token], Field(min_length=1, fail_fast=True)]
Texts: TypeAlias = Annotated[list[str], Field(fail_fast=True)]


class Body(BaseModel):
    """The base of request bodies."""

    model_config = ConfigDict(extra="ignore", strict=True, allow_inf_nan=False)


class StreamOptions(Body):
    """The options of a stream.

    Attributes:
        include_usage: end the stream with a chunk that counts the tokens.
    """

    include_usage: bool | None = None


class GenerateBody(Body):
    """The fields of completions and chats; top_k, repetition_penalty, min_tokens and timeout aren't OpenAI's."""

    model: str | None = None
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    temperature: Temperature | None = None
    top_p: Annotated[float, Field(ge=0, le=1)] | None = None
    n: Annotated[int, Field(ge=1)] | None = None
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = None
    stop: Stop | Annotated[list[Stop], Field(max_length=_MOST_STOPS, fail_fast=True)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    logit_bias: (
        Annotated[dict[str, Annotated[float, Field(ge=-100, le=100)]], Field(max_length=_MOST_BIASES)] | None
    ) = None
    top_k: Annotated[int, Field(ge=0)] | None = None
    repetition_penalty: Annotated[float, Field(gt=0, le=100)] | None = None
    min_tokens: Annotated[int, Field(ge=0)] | None = None
    timeout: Annotated[float, Field(gt=0)] | None = None
    response_format: Any = None
    store: Any = None


class CompletionBody(GenerateBody):
    """The body of a POST /v1/completions request."""

    prompt: (
        str
        | Annotated[list[str], Field(min_length=1, fail_fast=True)]
        | TokenIds
        | Annotated[list[TokenIds], Field(min_length=1, fail_fast=True)]
    )
    logprobs: Annotated[int, Field(ge=0, le=MOST_ALTERNATIVES)] | None = None
    best_of: Annotated[int, Field(ge=1)] | None = None
    echo: Any = None
    suffix: Any = None


class ContentPart(Body):
    """A part of a message; only the type text is supported."""

    type: str
    text: str | None = None


class MessageBody(Body):
    """A message of a chat."""

    role: Literal["developer", "system", "user", "assistant"]
    content: str | Annotated[list[ContentPart], Field(min_length=1, fail_fast=True)]
    name: str | None = None
    tool_calls: Any = None
    function_call: Any = None
    refusal: Any = None


def _countable(messages: Any) -> Any:
    """Refuses too many messages, or parts of them, before each is read: that would take a second for a large body."""
    if isinstance(messages, list):
        contents = [one.get("content") for one in messages if isinstance(one, dict)]
        parts = sum(len(content) for content in contents if isinstance(content, list))
        if max(len(messages), parts) > _MOST_MESSAGES:
            raise PydanticCustomError("too_long", f"expected at most {_MOST_MESSAGES:,} messages, and parts of them")
    return messages


class ChatBody(GenerateBody):
    """The body of a POST /v1/chat/completions request."""

    messages: Annotated[
        list[MessageBody], Field(min_length=1, max_length=_MOST_MESSAGES, fail_fast=True), BeforeValidator(_countable)
    ]
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MOST_ALTERNATIVES)] | None = None
    audio: Any = None
    function_call: Any = None
    functions: Any = None
    modalities: Any = None
    moderation: Any = None
    prediction: Any = None
    reasoning_effort: Any = None
    tool_choice: Any = None
    tools: Any = None
    verbosity: Any = None
    web_search_options: Any = None


class EmbeddingsBody(Body):
    """The body of a POST /v1/embeddings request; prompt_name, truncate and timeout aren't OpenAI's.

    Attributes:
        input: a text or several. Ids are refused: clients make them for another model's vocabulary.
        truncate: cut texts that are too long; without it they are an error.
    """

    input: (
        Text
        | Annotated[list[Text], Field(min_length=1, fail_fast=True)]
        | Annotated[list[int], Field(min_length=1, fail_fast=True)]
        | Annotated[list[Annotated[list[int], Field(fail_fast=True)]], Field(min_length=1, fail_fast=True)]
    )
    model: str | None = None
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: Annotated[int, Field(ge=1)] | None = None
    prompt_name: str | None = None
    truncate: bool = False
    timeout: Annotated[float, Field(gt=0)] | None = None


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
    """A model that is served."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str


class ModelsBody(BaseModel):
    """The body of a GET /v1/models response."""

    object: Literal["list"]
    data: list[ModelBody]


class CachedTokens(BaseModel):
    """The number of a prompt's tokens that were read from the cache."""

    cached_tokens: int


class Usage(BaseModel):
    """The numbers of tokens of a request and its answers."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: CachedTokens


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


class ChatMessage(BaseModel):
    """An answer in a chat."""

    role: Literal["assistant"]
    content: str
    refusal: None


class ChatChoice(BaseModel):
    """An answer in a chat, with the reason why it ended."""

    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None
    finish_reason: Literal["stop", "length"]


class ChatCompletion(BaseModel):
    """The body of a POST /v1/chat/completions response."""

    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    system_fingerprint: str
    choices: list[ChatChoice]
    usage: Usage


class EmbeddingRow(BaseModel):
    """An embedding: numbers, or the base64 of their fp32 in little endian."""

    object: Literal["embedding"]
    index: int
    embedding: list[float] | str


class EmbeddingsUsage(BaseModel):
    """The number of the texts' tokens."""

    prompt_tokens: int
    total_tokens: int


class Embeddings(BaseModel):
    """The body of a POST /v1/embeddings response."""

    object: Literal["list"]
    data: list[EmbeddingRow]
    model: str
    usage: EmbeddingsUsage
