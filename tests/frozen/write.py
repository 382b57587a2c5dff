"""Writes the frozen files again: `python -m tests.frozen.write names`, `... served`, `... edges`, `... odd`,
`... journeys` or `... run`.

Do so only where a change of behaviour is meant; say which, and why, in the commit message. New public names need no
writing, for only what is frozen is held; new flags need `names`, new routes and fields `served`. `run` trains the run
folder again, which gives up the proof that folders of earlier versions still load; journeys through it have to be
written behind it.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

os.environ.setdefault("FASTFORMER_STRICT", "1")

import torch  # noqa: E402

HERE = Path(__file__).parent
NAMES, STATE_DICTS, JOURNEYS = HERE / "public_names.json", HERE / "state_dicts.json", HERE / "journeys.json"
FLAGS = HERE / "flags.json"
SERVED, IDLE = HERE / "served.json", HERE / "idle.json"
EDGES, ODD = HERE / "edges.json", HERE / "odd.json"


def write(file: Path, values: dict[str, Any], *, depth: int) -> None:
    """Writes JSON with a line for each entry `depth` levels down, so that a diff shows the changes."""

    def lines(value: Any, level: int) -> str:
        if level == depth or not isinstance(value, dict) or not value:
            return json.dumps(value, ensure_ascii=False)
        inner = [f"{' ' * (level + 1)}{json.dumps(key)}: {lines(one, level + 1)}" for key, one in value.items()]
        return "{\n" + ",\n".join(inner) + f"\n{' ' * level}}}"

    file.write_text(lines(values, 0) + "\n")


def write_names() -> None:
    from tests.frozen.names import flags_now, names_now, state_dicts_now

    write(NAMES, names_now(), depth=2)
    write(STATE_DICTS, state_dicts_now(), depth=1)
    write(FLAGS, flags_now(), depth=2)


def write_served() -> None:
    from tests.frozen.served import BODIES, folders, idle_now, served_now

    with tempfile.TemporaryDirectory() as folder:
        write(SERVED, {kind: served_now(place) for kind, place in folders(Path(folder)).items()}, depth=3)
    write(IDLE, {kind.__name__: idle_now(kind) for kind in BODIES}, depth=2)


def write_edges() -> None:
    from tests.frozen.edges import edges_now
    from tests.serving.models import services
    from tests.serving.test_fields import CASES

    with tempfile.TemporaryDirectory() as folder:
        places = services(Path(folder))
        write(EDGES, {route: asyncio.run(edges_now(route, places[case[0]])) for route, case in CASES.items()}, depth=2)


def write_odd() -> None:
    from tests.frozen.odd import FOLDERS, KINDS, names_of, read_ones, settings_now

    found = {kind: read_ones(settings_now(kind, names_of(kind))) for kind in KINDS}
    write(ODD, {**found, **{name: read(of) for name, (read, of) in FOLDERS.items()}}, depth=2)


def write_journeys() -> None:
    from tests.frozen.journeys import JOURNEYS as journeys

    found = {}
    for name, take in journeys.items():
        with tempfile.TemporaryDirectory() as folder:
            torch.manual_seed(0)
            found[name] = take(Path(folder))
    write(JOURNEYS, found, depth=2)


def write_run() -> None:
    import tokenizers
    from tokenizers import models, pre_tokenizers

    from fastformer.training import start
    from tests.frozen.journeys import PAIRS, RUN, WORDS, settings

    english = ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine"]
    german = ["null", "eins", "zwei", "drei", "vier", "fünf", "sechs", "sieben", "acht", "neun"]
    draw = random.Random(0)
    digits = [[draw.randrange(10) for _ in range(1 + i % 4)] for i in range(96)]
    sides = [[" ".join(words[digit] for digit in row) for row in digits] for words in (english, german)]
    PAIRS.write_text("".join(f"{source}\t{target}\n" for source, target in zip(*sides, strict=True)))
    vocabulary = {token: i for i, token in enumerate(["<pad>", "</s>", "<unk>", *english, *german])}
    backend = tokenizers.Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    backend.save(str(WORDS))
    folder = Path("/tmp/fastformer-frozen")  # its name is in the settings of the run
    folder.mkdir()
    try:
        start(settings(folder, log_every=100), folder / "run").train()
        shutil.rmtree(RUN, ignore_errors=True)
        kept = ("config.json", "config.yaml", "model.safetensors", "tokenizer.json", "metrics.jsonl", "checkpoints")
        RUN.mkdir()
        for name in kept:
            place = folder / "run" / name
            (shutil.copytree if place.is_dir() else shutil.copy)(place, RUN / name)
    finally:
        shutil.rmtree(folder)


if __name__ == "__main__":
    commands = {"names": write_names, "served": write_served, "journeys": write_journeys}
    (commands | {"edges": write_edges, "odd": write_odd, "run": write_run})[sys.argv[1]]()
