"""Each option of the applications for Ray reaches Ray, the server or the model; a stand-in for Ray records them."""

from __future__ import annotations

import importlib
import inspect
import sys
from collections.abc import Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest

pytest.importorskip("fastapi", reason="the extra `serve` is not installed")


class Data:
    """A dataset of Ray: rows by column, in files that are entries of a dictionary."""

    files: dict[str, dict[str, list[Any]]] = {}
    calls: list[dict[str, Any]] = []

    def __init__(self, columns: dict[str, list[Any]]) -> None:
        self.columns = columns

    @classmethod
    def read(cls, path: str, columns: list[str] | None = None) -> Data:
        found = cls.files[path]
        return cls({name: found[name] for name in columns or found})

    def map_batches(self, work: Any, *, batch_size: int, fn_constructor_args: Any = None, **how: Any) -> Data:
        if fn_constructor_args is not None:
            context = Context.get_current().checkpoint_config
            Data.calls.append({"batch_size": batch_size, "given": fn_constructor_args, "checkpoint": context, **how})
            work = work(*fn_constructor_args)
        size, made = max(map(len, self.columns.values())), list[Any]()
        for first in range(0, size, batch_size):
            part = {name: np.array(each[first : first + batch_size]) for name, each in self.columns.items()}
            made.append(work(part))
        return Data({name: [one for part in made for one in part[name].tolist()] for name in made[0]})

    def write_parquet(self, path: str) -> None:
        Data.files[path] = {
            name: [*Data.files.get(path, {}).get(name, []), *each] for name, each in self.columns.items()
        }

    def take_all(self) -> list[dict[str, Any]]:
        return [dict(zip(self.columns, row, strict=True)) for row in zip(*self.columns.values(), strict=True)]


class Context:
    current = SimpleNamespace(checkpoint_config="before")

    @classmethod
    def get_current(cls) -> Any:
        return cls.current


@pytest.fixture(scope="module")
def ray() -> Iterator[SimpleNamespace]:
    """Imports the two modules with a stand-in for Ray; yields them and the CPUs that an actor has."""
    resources: dict[str, float] = {}
    serve, data, top, checkpoint = (
        ModuleType(name) for name in ("ray.serve", "ray.data", "ray", "ray.data.checkpoint")
    )

    def deployment(replica: Any, **options: Any) -> Any:
        return SimpleNamespace(bind=lambda: SimpleNamespace(replica=replica, options=options))

    vars(serve).update(ingress=lambda app: lambda kind: (app, kind), deployment=deployment, Application=object)
    vars(data).update(ActorPoolStrategy=dict, DataContext=Context, Dataset=Data, read_parquet=Data.read)
    vars(checkpoint).update(CheckpointConfig=dict)
    context = SimpleNamespace(get_assigned_resources=lambda: resources)
    vars(top).update(serve=serve, data=data, get_runtime_context=lambda: context)
    names = ("fastformer.serving.ray_app", "fastformer.serving.ray_data")
    with pytest.MonkeyPatch.context() as patch:
        for module in (serve, data, top, checkpoint):
            patch.setitem(sys.modules, module.__name__, module)
        for name in names:
            patch.delitem(sys.modules, name, raising=False)
        app, corpus = map(importlib.import_module, names)
        yield SimpleNamespace(app=app, corpus=corpus, resources=resources)
        for name in names:
            patch.delitem(sys.modules, name)


USUAL: dict[str, Any] = {
    "name": "fastformer", "ray_actor_options.num_cpus": 1, "ray_actor_options.num_gpus": 0,
    "max_ongoing_requests": 256, "max_queued_requests": 512, "autoscaling_config.min_replicas": 1,
    "autoscaling_config.max_replicas": 1, "autoscaling_config.target_ongoing_requests": 32,
    "graceful_shutdown_timeout_s": 30, "health_check_period_s": 5, "threads": 1, "folder": "a", "precision": None,
    "device": None, "engine": None, "limits": "{}", "keys": (), "page_public": False,
}  # fmt: skip
# Of each option: other values than its default, and what they change.
OPTIONS: dict[str, list[tuple[Any, dict[str, Any]]]] = {
    "folder": [("b", {"folder": "b"})],
    "num_cpus": [
        (3.5, {"ray_actor_options.num_cpus": 3.5, "threads": 3}), (2, {"ray_actor_options.num_cpus": 2, "threads": 2}),
        (0.5, {"ray_actor_options.num_cpus": 0.5}),
    ],
    "num_gpus": [(0.5, {"ray_actor_options.num_gpus": 0.5, "device": "cuda"})],
    "precision": [("int8", {"precision": "int8"})],
    "engine": [("cpp", {"engine": "cpp"})],
    "min_replicas": [(2, {"autoscaling_config.min_replicas": 2})],
    "max_replicas": [(4, {"autoscaling_config.max_replicas": 4})],
    "target_ongoing_requests": [(2.5, {"autoscaling_config.target_ongoing_requests": 2.5})],
    "max_queued_requests": [(7, {"max_queued_requests": 7})],
    "limits": [
        ({"max_waiting": 9}, {"max_ongoing_requests": 9, "limits": "{'max_waiting': 9}"}),
        ({"drain_s": 2}, {"graceful_shutdown_timeout_s": 2, "limits": "{'drain_s': 2.0}"}),
    ],
    "keys_file": [("keys", {"keys": ("one", "two")})],
    "page_public": [(True, {"page_public": True})],
}  # fmt: skip


def test_each_option_of_the_application_reaches_its_place(ray, monkeypatch, tmp_path) -> None:
    monkeypatch.delenv("FASTFORMER_API_KEYS", raising=False)
    (tmp_path / "keys").write_text("one\ntwo\n")
    found: dict[str, Any] = {}
    usual = vars(ray.app.Limits())

    def note(limits: Any) -> str:
        return str({name: value for name, value in vars(limits).items() if usual[name] != value})

    def opened(folder: str, *, limits: Any, **options: Any) -> str:
        found.update(folder=folder, limits=note(limits), **options)
        return "service"

    def made(service: str, limits: Any, *, keys: Any, **options: Any) -> str:
        assert service == "service" and note(limits) == found["limits"]
        found.update(keys=(*keys,), **options)
        return "app"

    monkeypatch.setattr(ray.app.torch, "set_num_threads", lambda count: found.update(threads=count))
    monkeypatch.setattr(ray.app, "open_service", opened)
    monkeypatch.setattr(ray.app, "make_app", made)

    def built(**options: Any) -> dict[str, Any]:
        found.clear()
        bound = ray.app.build(ray.app.Options(**{"folder": "a", **options}))
        assert bound.replica[0]() == "app"
        for name, value in bound.options.items():
            found.update(
                {f"{name}.{key}": each for key, each in value.items()} if isinstance(value, dict) else {name: value}
            )
        return dict(found)

    assert built() == USUAL
    assert OPTIONS.keys() == ray.app.Options.model_fields.keys()
    for option, rows in OPTIONS.items():
        for value, changes in rows:
            value = str(tmp_path / value) if option == "keys_file" else value
            assert built(**{option: value}) == USUAL | changes, option
    for wrong in ({"folders": "a"}, {"limits": {"max_waiting": 0}}, {"limits": {"most": 1}}):
        with pytest.raises((ValueError, TypeError)):
            built(**wrong)


@pytest.mark.parametrize("is_alive", [True, False])
def test_a_replica_is_healthy_while_its_thread_lives(is_alive, ray) -> None:
    replica = ray.app.build(ray.app.Options(folder="a")).replica[1]()
    session = SimpleNamespace(is_alive=is_alive)
    replica.app = SimpleNamespace(state=SimpleNamespace(service=SimpleNamespace(session=session)))
    if is_alive:
        replica.check_health()
    else:
        with pytest.raises(RuntimeError):
            replica.check_health()


ROWS: dict[str, list[Any]] = {"id": [3, 1, 2], "key": [4, 5, 6], "text": ["a", "b", "c"], "line": ["d", "e", "f"]}
# What a translation of these rows hands on, and of each argument another value and what it changes.
HANDED: dict[str, Any] = {
    "given": ("model", "text", "translation", None, {}), "batch_size": 1024, "num_cpus": 1,
    "compute": {"min_size": 1, "max_size": 1}, "checkpoint": "before",
    "written": {**ROWS, "translation": ["A", "B", "C"]},
}  # fmt: skip
ARGUMENTS: dict[str, tuple[Any, dict[str, Any]]] = {
    "id_column": ("key", {}),
    "text_column": ("line", {
        "given": ("model", "line", "translation", None, {}), "written": {**ROWS, "translation": ["D", "E", "F"]}}),
    "translation_column": ("said", {
        "given": ("model", "text", "said", None, {}), "written": {**ROWS, "said": ["A", "B", "C"]}}),
    "checkpoint": ("place", {"checkpoint": {"id_column": "id", "checkpoint_path": "place"}}),
    "num_cpus": (2, {"num_cpus": 2}),
    "max_actors": (5, {"compute": {"min_size": 1, "max_size": 5}}),
    "batch_size": (2, {"batch_size": 2}),
    "precision": ("int8", {"given": ("model", "text", "translation", "int8", {})}),
    "actor": (None, {"written": {**ROWS, "translation": ["a", "b", "c"]}}),
    "num_beams": (2, {"given": ("model", "text", "translation", None, {"num_beams": 2})}),
}  # fmt: skip


def test_each_argument_of_a_corpus_reaches_its_place(ray, monkeypatch) -> None:
    opened: list[Any] = []

    def from_pretrained(folder: str, *, precision: Any) -> Any:
        opened.append((folder, precision))
        return SimpleNamespace(translate=lambda texts, **options: [text.upper() for text in texts])

    monkeypatch.setattr(ray.corpus.Translator, "from_pretrained", from_pretrained)
    monkeypatch.setattr(ray.corpus.torch, "set_num_threads", lambda count: None)

    class Keeping(ray.corpus.TranslateRows):  # type: ignore[misc]
        def __call__(self, batch: Any) -> Any:
            return {**batch, self.translation_column: batch[self.text_column]}

    def handed(**arguments: Any) -> dict[str, Any]:
        Data.files, Data.calls = {"source": ROWS}, []
        assert ray.corpus.translate_corpus("source", "target", "model", **arguments) == 3
        assert Context.current.checkpoint_config == "before"
        [call] = Data.calls
        assert opened.pop() == (call["given"][0], call["given"][3])
        return {**call, "written": Data.files["target"]}

    assert handed() == HANDED
    names = [each.name for each in inspect.signature(ray.corpus.translate_corpus).parameters.values() if each.kind == 3]
    assert ARGUMENTS.keys() == {*names, "num_beams"}
    for name, (value, changes) in ARGUMENTS.items():
        assert handed(**{name: Keeping if name == "actor" else value}) == HANDED | changes, name
    # Rows that are there twice, or under other ids, are an error, whichever column has the ids.
    for column in ("id", "key"):
        for other in (ROWS[column][:2] * 2, [9, *ROWS[column][1:]]):
            wrong: Any = {column: other}
            monkeypatch.setattr(Data, "write_parquet", lambda self, path, rows=wrong: Data.files.update({path: rows}))
            with pytest.raises(RuntimeError, match=f"{len(other)}"):
                handed(id_column=column)


@pytest.mark.parametrize(("resources", "threads"), [({}, 1), ({"CPU": 3.0}, 3), ({"CPU": 0.5}, 1)])
def test_an_actor_has_the_threads_of_its_cpus(resources, threads, ray, monkeypatch) -> None:
    counts: list[int] = []
    monkeypatch.setattr(ray.corpus.Translator, "from_pretrained", lambda folder, *, precision: None)
    monkeypatch.setattr(ray.corpus.torch, "set_num_threads", counts.append)
    ray.resources.clear()
    ray.resources.update(resources)
    ray.corpus.TranslateRows("model", "text", "said", None, {})
    assert counts == [threads]
