"""The routes of text-embeddings-inference: POST /embed, /embed_sparse, /rerank, /predict, GET /info."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal, TypeAlias

from fastapi import APIRouter, Request, Response
from pydantic import BaseModel, Discriminator, Field, Tag
from starlette.exceptions import HTTPException

from fastformer import __version__
from fastformer.encoding.scheduler import STEP_TOKENS
from fastformer.encoding.sparse import sparse_of
from fastformer.serving.answers import answer, error_schemas
from fastformer.serving.embeddings import UNSUPPORTED_OF_ENCODERS
from fastformer.serving.encoder_service import NOTHING, SIGMOID, EmbedService, RankService
from fastformer.serving.gate import until_gone
from fastformer.serving.limits import Limits
from fastformer.serving.openai_bodies import Body, Int, Texts, unsupported_field
from fastformer.serving.rerank import DocumentsBody, Ranking, ranking
from fastformer.serving.service import Service

# The HTTP status of each of TEI's error types, and the type for a status that comes from elsewhere.
_STATUS = {"empty": 400, "validation": 422, "tokenizer": 422, "backend": 424, "overloaded": 429, "unhealthy": 503}
_TYPES = {400: "validation", 401: "unauthorized", 404: "not_found", 413: "validation", 503: "unhealthy"}
_TYPES |= {status: kind for kind, status in _STATUS.items() if status > 400 and kind != "tokenizer"}


class _Body(Body):
    """The fields of all requests.

    Attributes:
        truncate: cut texts that are too long; without it they are an error. truncation_direction "left" is refused.
        timeout: seconds after which the request fails; at most the server's limit.
    """

    unsupported = UNSUPPORTED_OF_ENCODERS

    truncate: bool | None = None
    truncation_direction: Literal["left", "right", "Left", "Right"] | None = None
    timeout: Annotated[float, Field(gt=0)] | None = None


class EmbedBody(_Body):
    """The body of a POST /embed request. Ids of tokens are refused: clients make them for another model's vocabulary.

    Attributes:
        normalize: divide each embedding by its length.
    """

    inputs: str | Texts
    prompt_name: str | None = None
    normalize: bool | None = True
    dimensions: Annotated[Int, Field(ge=1)] | None = None


class SparseBody(_Body):
    """The body of a POST /embed_sparse request; see `EmbedBody`."""

    inputs: str | Texts
    prompt_name: str | None = None


class SparseValue(BaseModel):
    """The id of a word, and its weight."""

    index: int
    value: float


class RerankBody(_Body):
    """The body of a POST /rerank request.

    Attributes:
        raw_scores: return the model's raw scores; without it a sigmoid maps them to numbers from 0 to 1.
        return_text: return each text with its score.
    """

    query: str
    texts: Texts
    raw_scores: bool | None = None
    return_text: bool | None = None


def _form(body: Any) -> str:
    is_own = not isinstance(body, dict) or "texts" in body or "documents" not in body
    return "[texts]" if is_own else "[documents]"


# The brackets keep the names of both forms out of the places of errors.
RankBody: TypeAlias = Annotated[
    Annotated[RerankBody, Tag("[texts]")] | Annotated[DocumentsBody, Tag("[documents]")], Discriminator(_form)
]

Single: TypeAlias = Annotated[list[str], Field(min_length=1, max_length=2, fail_fast=True)]


class PredictBody(_Body):
    """The body of a POST /predict request.

    Attributes:
        inputs: a text; two texts, which are one pair; or a list of lists of one text or two.
        raw_scores: see `RerankBody`.
    """

    inputs: str | Single | Annotated[list[Single], Field(fail_fast=True)]
    raw_scores: bool | None = None


class ErrorBody(BaseModel):
    """The body of an error response."""

    error: str
    error_type: str


class Rank(BaseModel):
    """The index of a text in the request's list, and its score."""

    index: int
    score: float
    text: str | None = None


class Prediction(BaseModel):
    """A label and its score."""

    label: str
    score: float


class Info(BaseModel):
    """The body of a GET /info response."""

    model_id: str
    model_sha: str | None
    model_dtype: str
    served_model_name: str
    model_type: dict[str, Any]
    max_concurrent_requests: int
    max_input_length: int
    max_batch_tokens: int
    max_batch_requests: int | None
    max_client_batch_size: int
    auto_truncate: bool
    tokenization_workers: int
    version: str


ERRORS = error_schemas(
    ErrorBody,
    {
        400: "The request is empty.",
        404: "There is no such route.",
        413: "The body is too large.",
        422: "The request is wrong.",
        424: "The model can't do that, or has failed.",
    },
)


class TeiError(HTTPException):
    """An error of one of TEI's types; the type decides the status."""

    def __init__(self, error_type: str, message: str) -> None:
        super().__init__(_STATUS[error_type], message)
        self.fields = {"error_type": error_type}


def error_response(status: int, message: str, **detail: Any) -> Response:
    """Makes an error response in TEI's shape.

    Args:
        status: the HTTP status; a request that breaks the schema is a 422 here.
        message: says what was expected and what the request had.
        detail: error_type, if it is known; param, the wrong field; headers of the response.
    """
    fields = error_fields(status, message, **detail)
    status = 422 if fields["error_type"] == "validation" and status == 400 else status
    return answer(fields, status, detail.get("headers"))


def error_fields(status: int, message: str, **detail: Any) -> dict[str, Any]:
    """Returns the JSON value of an error; see `error_response`."""
    kind = detail.get("error_type") or _TYPES.get(status, "backend" if status >= 500 else "validation")
    return {"error": message, "error_type": kind}


def router(service: Service, limits: Limits) -> APIRouter:
    """Makes TEI's routes for a model."""
    routes = APIRouter()
    if isinstance(service, EmbedService):
        _add_embed(routes, service, limits)
        if service.encoder.pooling == "splade":
            _add_sparse(routes, service, limits)
    if isinstance(service, RankService):
        _add_predict(routes, service, limits)
        _add_rerank(routes, service, limits)
    return routes


def _add_embed(routes: APIRouter, service: EmbedService, limits: Limits) -> None:
    _add_info(routes, service, limits, {"embedding": {"pooling": service.encoder.pooling}})

    @routes.post("/embed", responses={200: {"model": list[list[float]]}, **ERRORS})
    async def embed(body: EmbedBody, http: Request) -> Response:
        """Returns the embeddings of texts."""
        texts = [body.inputs] if isinstance(body.inputs, str) else body.inputs
        _check(body, [[text] for text in texts], limits)
        width = service.encoder.get_embedding_dimension()
        if body.dimensions is not None and body.dimensions > width:
            raise TeiError("validation", f"expected dimensions of at most {width}, got {body.dimensions:,}")
        # Without normalize, the output of the layers after the pooling is returned unchanged.
        work = service.embed(
            texts,
            prompt_name=body.prompt_name,
            normalize=body.normalize is not False,
            truncate_dim=body.dimensions,
            cuts=bool(body.truncate),
            timeout=body.timeout,
        )
        encoded = await until_gone(http, work)
        return answer(encoded.rows.tolist())


def _add_sparse(routes: APIRouter, service: EmbedService, limits: Limits) -> None:
    responses: dict[int | str, Any] = {200: {"model": list[list[SparseValue]]}, **ERRORS}

    @routes.post("/embed_sparse", responses=responses)
    async def embed_sparse(body: SparseBody, http: Request) -> Response:
        """Returns the weights of words in texts, of a SPLADE."""
        texts = [body.inputs] if isinstance(body.inputs, str) else body.inputs
        _check(body, [[text] for text in texts], limits)
        work = service.embed(texts, prompt_name=body.prompt_name, cuts=bool(body.truncate), timeout=body.timeout)
        encoded = await until_gone(http, work)
        rows = [zip(row.indices.tolist(), row.values.tolist(), strict=True) for row in map(sparse_of, encoded.rows)]
        return answer([[{"index": index, "value": value} for index, value in row] for row in rows])


def _add_predict(routes: APIRouter, service: RankService, limits: Limits) -> None:
    labels = service.encoder.labels
    kind = "reranker" if service.encoder.num_labels == 1 else "classifier"
    names = {str(place): label for place, label in enumerate(labels)}
    of_labels = {"id2label": names, "label2id": {label: place for place, label in enumerate(labels)}}
    _add_info(routes, service, limits, {kind: of_labels})

    responses: dict[int | str, Any] = {200: {"model": list[Prediction] | list[list[Prediction]]}, **ERRORS}

    @routes.post("/predict", responses=responses)
    async def predict(body: PredictBody, http: Request) -> Response:
        """Returns the classes of texts or pairs."""
        is_one, inputs = _inputs(body.inputs)
        _check(body, inputs, limits)
        squashes = not body.raw_scores
        work = service.scores(
            inputs,
            activation=SIGMOID if squashes and len(labels) == 1 else NOTHING,
            softmax=squashes and len(labels) > 1,
            cuts=bool(body.truncate),
            timeout=body.timeout,
        )
        encoded = await until_gone(http, work)
        given = [_predictions(row, labels) for row in encoded.rows.reshape(len(inputs), len(labels)).tolist()]
        return answer(given[0] if is_one else given)


def _add_rerank(routes: APIRouter, service: RankService, limits: Limits) -> None:
    @routes.post("/rerank", responses={200: {"model": list[Rank] | Ranking}, **ERRORS})
    async def rerank(body: RankBody, http: Request) -> Response:
        """Ranks texts by how well they answer a query, the best first; with documents, as /v1/rerank does."""
        if isinstance(body, DocumentsBody):
            return answer(await ranking(body, http, service, limits))
        if service.encoder.num_labels != 1:
            raise TeiError("backend", f"expected a model of one label to rank with, got {service.encoder.num_labels}")
        pairs = [[body.query, text] for text in body.texts]
        _check(body, pairs, limits)
        activation = NOTHING if body.raw_scores else SIGMOID
        work = service.scores(pairs, activation=activation, cuts=bool(body.truncate), timeout=body.timeout)
        scores = (await until_gone(http, work)).rows.tolist()
        order = sorted(range(len(scores)), key=lambda place: -scores[place])
        ranks: list[dict[str, Any]] = [{"index": place, "score": scores[place]} for place in order]
        for rank in ranks if body.return_text else ():
            rank["text"] = body.texts[rank["index"]]
        return answer(ranks)


def _add_info(routes: APIRouter, service: EmbedService | RankService, limits: Limits, kind: dict[str, Any]) -> None:
    info = Info(
        model_id=service.name,
        model_sha=None,
        model_dtype=service.encoder.precision,
        served_model_name=service.name,
        model_type=kind,
        max_concurrent_requests=limits.max_waiting,
        max_input_length=service.max_seq_length,
        max_batch_tokens=STEP_TOKENS,
        max_batch_requests=None,
        max_client_batch_size=limits.max_texts,
        auto_truncate=False,
        tokenization_workers=1,
        version=__version__,
    ).model_dump()
    known: dict[int | str, Any] = {status: ERRORS[status] for status in (401, 503)}

    @routes.get("/info", responses={200: {"model": Info}, **known})
    async def of_model() -> Response:
        """Describes the model and its limits."""
        return answer(info)


def _inputs(given: str | list[Any]) -> tuple[bool, list[list[str]]]:
    """Returns whether the input is a single text or pair, and the list of texts and pairs."""
    if isinstance(given, str):
        return True, [[given]]
    is_one = bool(given) and isinstance(given[0], str)
    return is_one, [given] if is_one else given


def _predictions(row: Sequence[float], labels: Sequence[str]) -> list[dict[str, Any]]:
    """Returns the labels of an input with their scores, the best first."""
    order = sorted(range(len(labels)), key=lambda place: -row[place])
    return [{"score": row[place], "label": labels[place]} for place in order]


def _check(body: _Body, inputs: Sequence[Sequence[str]], limits: Limits) -> None:
    """Checks the fields that all bodies share."""
    if (name := unsupported_field(body)) is not None:
        raise TeiError("validation", f"expected no {name}, which this server doesn't support: leave it out")
    if not inputs:
        raise TeiError("empty", "expected at least one text, got none")
    if (reason := limits.why_not([text for texts in inputs for text in texts], len(inputs))) is not None:
        raise TeiError("validation", reason)
    if body.truncate and (body.truncation_direction or "right").lower() == "left":
        raise TeiError("validation", "expected truncation_direction right: texts are cut at their end")
