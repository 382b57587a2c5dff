"""`fastformer transcribe`: files, standard input, formats and mistakes."""

from __future__ import annotations

import io
import json
import re
import sys
from typing import Any

import pytest

from fastformer import WhisperModel
from fastformer.cli import main
from tests.audio.speech import folder, sound
from tests.audio.test_reading import wav

OPTIONS = ("--language", "en", "--beam_size", "1")
TIME = r"\d\d:\d\d:\d\d[.,]\d\d\d"


@pytest.fixture(scope="module")
def places(tmp_path_factory) -> Any:
    path = tmp_path_factory.mktemp("commands")
    folder(path / "model")
    for seed, name in enumerate(("a", "b", "c")):
        (path / f"{name}.wav").write_bytes(wav(sound(4 + seed, seed)))
    (path / "bad.wav").write_bytes(b"this is no audio")
    return path


@pytest.fixture
def ran(places, capsys, monkeypatch) -> Any:
    def run(*words: str, stdin: bytes = b"") -> tuple[int, str, str]:
        monkeypatch.chdir(places)
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(stdin)))
        code = main(["transcribe", "model", *words])
        return code, *capsys.readouterr()

    return run


@pytest.fixture(scope="module")
def texts(places) -> dict[str, list[str]]:
    model = WhisperModel(places / "model")
    names = ("a", "b", "c")
    found = (model.transcribe(places / f"{name}.wav", "en", beam_size=1)[0] for name in names)
    return {name: [segment.text.strip() for segment in segments] for name, segments in zip(names, found, strict=True)}


def test_each_format(ran, texts) -> None:
    code, out, _ = ran("a.wav", *OPTIONS)
    assert (code, out.splitlines()) == (0, texts["a"])
    code, out, _ = ran("a.wav", "--format", "srt", *OPTIONS)
    cues = re.findall(rf"(\d+)\n({TIME}) --> ({TIME})\n(.+)\n\n", out)
    assert [int(cue[0]) for cue in cues] == [*range(1, len(texts["a"]) + 1)]
    assert [cue[3] for cue in cues] == texts["a"] and "".join("".join(cue) for cue in cues) in re.sub(
        r"[\n]| --> ", "", out
    )
    code, out, _ = ran("a.wav", "--format", "vtt", *OPTIONS)
    assert out.startswith("WEBVTT\n\n") and len(re.findall(rf"{TIME} --> {TIME}\n.+\n\n", out)) == len(texts["a"])
    code, out, _ = ran("a.wav", "--format", "json", "--word_timestamps", *OPTIONS)
    value = json.loads(out)
    assert value["language"] == "en" and all(segment["words"] for segment in value["segments"])
    languages = []
    for more in ((), ("--language", "auto")):
        code, out, _ = ran("a.wav", "--format", "json", "--beam_size", "1", *more)
        assert code == 0
        languages.append(json.loads(out)["language"])
    assert languages[0] == languages[1]


def test_several_files_together_are_those_alone(ran, texts, places, tmp_path) -> None:
    code, out, _ = ran("a.wav", "b.wav", "c.wav", *OPTIONS)
    assert (code, out.splitlines()) == (0, [*texts["a"], *texts["b"], *texts["c"]])
    code, out, _ = ran("a.wav", "a.wav", *OPTIONS)
    assert (code, out.splitlines()) == (0, 2 * texts["a"])
    code, out, _ = ran("a.wav", "b.wav", "--format", "json", *OPTIONS)
    assert [len(json.loads(line)["segments"]) for line in out.splitlines()] == [len(texts["a"]), len(texts["b"])]
    for form in ("srt", "vtt"):
        code, out, error = ran("a.wav", "b.wav", "--format", form, *OPTIONS)
        assert code == 1 and "--out" in error and not out
    code, out, _ = ran("a.wav", "b.wav", "--format", "srt", "--out", str(tmp_path / "a" / "new"), *OPTIONS)
    assert code == 0 and out == ""
    assert {path.name for path in (tmp_path / "a" / "new").iterdir()} == {"a.srt", "b.srt"}
    assert texts["b"][0] in (tmp_path / "a" / "new" / "b.srt").read_text(encoding="utf-8")
    code, out, _ = ran(
        "a.wav", "b.wav", "--batch_size", "2", "--format", "json", "--out", str(tmp_path / "cut"), *OPTIONS
    )
    assert code == 0 and {path.name for path in (tmp_path / "cut").iterdir()} == {"a.json", "b.json"}
    code, _, error = ran("a.wav", str(places / "a.wav"), "--out", str(tmp_path / "new"))
    assert code == 1 and "different names" in error


def test_a_progress_bar_on_a_terminal(ran, monkeypatch) -> None:
    pytest.importorskip("tqdm", reason="the bar is tqdm's")
    for words in (["a.wav"], ["a.wav", "b.wav"], ["a.wav", "b.wav", "--batch_size", "2"]):
        lines = ran(*words, "--format", "json", *OPTIONS)[1].splitlines()
        durations = [json.loads(line)["duration"] for line in lines]
        monkeypatch.setattr(sys, "stderr", screen := io.StringIO())
        monkeypatch.setattr(screen, "isatty", lambda: True)
        assert ran(*words, *OPTIONS)[0] == 0
        shown = screen.getvalue()
        if len(words) == 2:  # the windows of all files are decoded together
            assert f"\r{sum(durations):.2f}s [" in shown, shown
        else:
            assert all(f"{seconds}/{round(seconds)} [" in shown for seconds in durations), shown  # a bar for each file
        monkeypatch.undo()


def test_standard_input(ran, texts, places) -> None:
    for words in ((), ("-",)):
        code, out, _ = ran(*words, *OPTIONS, stdin=(places / "b.wav").read_bytes())
        assert (code, out.splitlines()) == (0, texts["b"])
    code, _, error = ran(*OPTIONS)
    assert code == 1 and "empty" in error


@pytest.mark.parametrize(
    ("words", "code"),
    [
        (["bad.wav"], 1), (["none.wav"], 1), (["a.wav", "bad.wav"], 1), (["a.wav", "--language", "xx"], 1),
        (["a.wav", "--format", "doc"], 2), (["a.wav", "--beam_size", "0"], 1), (["a.wav", "--precision", "int4"], 2),
    ],
)  # fmt: skip
def test_mistakes_are_one_line(words, code, ran) -> None:
    found, _, error = ran(*words)
    assert found == code and error.count("\n") == 1 and "bug" not in error
