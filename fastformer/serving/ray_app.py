"""The HTTP application on many machines with Ray Serve: replicas, autoscaling, draining. Needs the extra `ray`.

    serve run fastformer.serving.ray_app:build folder=/models/opus-mt num_cpus=8
    serve.run(build(Options(folder="/models/opus-mt", num_cpus=8, max_replicas=4)))

Each replica holds a model and a batch of its own, which requests join as they come: Ray only distributes the requests
and batches nothing. Each replica reads the keys on its own machine, as `fastformer serve` does.
"""

from __future__ import annotations

from typing import Any

import torch
from fastapi import FastAPI
from pydantic import BaseModel, ConfigDict
from ray import serve

from fastformer.serving.app import make_app
from fastformer.serving.gate import read_keys
from fastformer.serving.limits import Limits
from fastformer.serving.service import open_service


class Options(BaseModel):
    """The options of `build`, in the names of the `args` of a Serve config file.

    Attributes:
        folder: the model's folder, which has to exist on every machine.
        num_cpus: the CPUs of a replica, and the number of its threads.
        num_gpus: the GPUs of a replica; above 0, the model runs on the first.
        precision, engine: see `open_service`.
        min_replicas, max_replicas: the bounds within which Ray scales the number of replicas.
        target_ongoing_requests: the load of a replica at which Ray neither adds nor removes replicas.
        max_queued_requests: the most requests that wait for a replica at each proxy; one more is answered 503.
        limits: fields of `Limits` by name; max_waiting and drain_s are Ray's, too.
        keys_file, page_public: see `fastformer serve`.
    """

    model_config = ConfigDict(extra="forbid")

    folder: str
    num_cpus: float = 1
    num_gpus: float = 0
    precision: str | None = None
    engine: str | None = None
    min_replicas: int = 1
    max_replicas: int = 1
    target_ongoing_requests: float = 32
    max_queued_requests: int = 512
    limits: dict[str, Any] = {}
    keys_file: str | None = None
    page_public: bool = False


def build(options: Options) -> serve.Application:
    """Makes the application for `serve.run`, or for a Serve config file.

    Raises:
        ValueError: unknown or impossible limits.
    """
    limits = Limits(**options.limits)

    def app() -> FastAPI:  # runs in the replica
        torch.set_num_threads(max(1, int(options.num_cpus)))
        device, precision = ("cuda" if options.num_gpus else None), options.precision
        service = open_service(options.folder, precision=precision, device=device, engine=options.engine, limits=limits)  # type: ignore[arg-type]
        return make_app(service, limits, keys=read_keys(options.keys_file), page_public=options.page_public)

    class Replica:
        def check_health(self) -> None:  # Ray asks from time to time, and replaces a replica that raises
            if not self.app.state.service.session.is_alive:  # type: ignore[attr-defined]
                raise RuntimeError("the model's thread has ended")

    scaling = {
        "min_replicas": options.min_replicas,
        "max_replicas": options.max_replicas,
        "target_ongoing_requests": options.target_ongoing_requests,
    }
    deployment: Any = serve.deployment(
        serve.ingress(app)(Replica),
        name="fastformer",
        ray_actor_options={"num_cpus": options.num_cpus, "num_gpus": options.num_gpus},
        max_ongoing_requests=limits.max_waiting,
        max_queued_requests=options.max_queued_requests,
        autoscaling_config=scaling,
        graceful_shutdown_timeout_s=limits.drain_s,
        health_check_period_s=5,
    )
    return deployment.bind()
