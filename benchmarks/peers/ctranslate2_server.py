"""CTranslate2 behind FastAPI, in the way its users write it; a process of its own.

    python -m benchmarks.peers.ctranslate2_server FOLDER PORT int8 WORKERS THREADS [--together 32]

FOLDER has `ctranslate2/`, the model, and `tokenizer.json`. The first free worker translates a request. With --together,
requests that wait for a worker are translated in one batch. CTranslate2 itself batches only the texts of one call, so
its users need a queue of their own, and a batch ends when its longest translation does.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path

import ctranslate2
import tokenizers
import uvicorn
from fastapi import FastAPI
from pydantic import BaseModel


class TranslateRequest(BaseModel):
    """The fields of fastformer's `/v1/translate` that are used here."""

    text: str
    max_new_tokens: int = 256


class BatchTranslator:
    """The model with its tokenizer."""

    def __init__(self, folder: Path, compute_type: str, workers: int, threads: int) -> None:
        self.tokenizer = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
        self.eos = self.tokenizer.token_to_id("</s>")
        self.translator = ctranslate2.Translator(
            str(folder / "ctranslate2"), compute_type=compute_type, inter_threads=workers, intra_threads=threads
        )

    def answer(self, asks: list[TranslateRequest]) -> list[str]:
        """Returns the translations of texts, in one batch."""
        sources = [[str(token) for token in [*self.tokenizer.encode(ask.text).ids, self.eos]] for ask in asks]
        longest = max(ask.max_new_tokens for ask in asks)
        results = self.translator.translate_batch(
            sources, beam_size=1, max_decoding_length=longest, max_input_length=0, max_batch_size=0
        )
        limited = zip(results, asks, strict=True)
        ids = [[int(token) for token in result.hypotheses[0][: ask.max_new_tokens]] for result, ask in limited]
        return self.tokenizer.decode_batch(ids)


def make_app(answering: BatchTranslator, together: int, workers: int) -> FastAPI:
    """Makes the application; together: the largest number of requests in a batch, 0 for one request each."""
    waiting: asyncio.Queue[tuple[TranslateRequest, asyncio.Future[str]]] = asyncio.Queue()

    async def work() -> None:
        while True:
            batch = [await waiting.get()]
            while len(batch) < together and not waiting.empty():
                batch.append(waiting.get_nowait())
            texts = await asyncio.to_thread(answering.answer, [ask for ask, _ in batch])
            for (_, future), text in zip(batch, texts, strict=True):
                if not future.done():
                    future.set_result(text)

    @contextlib.asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        running = [asyncio.create_task(work()) for _ in range(workers if together else 0)]
        yield
        for task in running:
            task.cancel()

    app = FastAPI(lifespan=lifespan)

    @app.get("/health")
    def health() -> dict[str, str]:
        return {"status": "ok"}

    if together:

        @app.post("/v1/translate")
        async def translate_together(ask: TranslateRequest) -> dict[str, str]:
            future = asyncio.get_running_loop().create_future()
            await waiting.put((ask, future))
            return {"text": await future}

    else:

        @app.post("/v1/translate")
        def translate(ask: TranslateRequest) -> dict[str, str]:
            return {"text": answering.answer([ask])[0]}

    return app


def main() -> None:
    """Serves until a signal ends the process."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.peers.ctranslate2_server")
    parser.add_argument("folder", type=Path)
    parser.add_argument("port", type=int)
    parser.add_argument("compute_type")
    parser.add_argument("workers", type=int)
    parser.add_argument("threads", type=int)
    parser.add_argument("--together", type=int, default=0)
    options = parser.parse_args()
    answering = BatchTranslator(options.folder, options.compute_type, options.workers, options.threads)
    app = make_app(answering, options.together, options.workers)
    uvicorn.run(app, host="127.0.0.1", port=options.port, log_level="error", access_log=False)


if __name__ == "__main__":
    main()
