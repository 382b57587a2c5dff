"""`fastformer serve`."""

from __future__ import annotations

from typing import Annotated

from fastformer.generation.config import Precision
from fastformer.settings import Range


def serve(
    folder: str,
    *,
    host: str = "127.0.0.1",
    port: Annotated[int, Range(0, 65535)] = 8000,
    device: str = "auto",
    precision: Precision | None = None,
    engine: str | None = None,
) -> None:
    """Serves a model over HTTP, to many clients at once.

    Args:
        folder: of a run, or as transformers or sentence-transformers saves it
        host: the address to listen on
        port: to listen on; 0 takes a free one
        device: auto (a GPU if there is one), cpu, cuda, cuda:1, ...
        precision: convert the weights to this; int8 and int4 are for a CPU; by default they stay as they were saved
        engine: how to decode; by default the fastest that can
    """
    import uvicorn

    from fastformer.devices import choose_device
    from fastformer.serving import make_app, open_service

    service = open_service(folder, precision=precision, device=choose_device(device, precision), engine=engine)
    uvicorn.run(make_app(service), host=host, port=port, http="h11", ws="none")
