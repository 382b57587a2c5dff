"""The published tables and pictures match the committed results, and a change of either is noticed."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

pytest.importorskip("matplotlib", reason="not installed: pip install matplotlib")

from benchmarks.publish.charts import charts
from benchmarks.publish.latest import AT_FULL_RATE, WITH_AMX, WITHOUT_AVX512, Results
from benchmarks.publish.style import PICTURES, digest, rows_of
from benchmarks.publish.summary import TableCase
from benchmarks.publish.tables import NOT_MEASURED, TABLES, Numbers
from benchmarks.readme import PAGES, all_written, differences, main, read
from tests.covering import each

TEXTS = read(PAGES)
STALE = "python -m benchmarks.readme --write (and python -m benchmarks.plot)"


@pytest.fixture(scope="module")
def results() -> Results:
    return Results()


def test_every_table_is_that_of_the_results(results: Results) -> None:
    assert not differences(TEXTS, Numbers(results)), STALE


@each("page", PAGES)
def test_a_page_shows_only_pictures_that_exist(page: Path) -> None:
    for link in re.findall(r"\((\S*benchmarks/pictures/\w+\.svg)\)", TEXTS[page]):
        path = (page.parent / link).resolve()
        assert path.parent == PICTURES.resolve() and path.is_file()


def test_every_picture_is_shown_and_has_a_chart() -> None:
    shown = {name for text in TEXTS.values() for name in re.findall(r"pictures/(\w+)\.svg\)", text)}
    assert shown == {path.stem for path in PICTURES.iterdir()} <= charts().keys()


@each("name", charts())
def test_a_picture_matches_its_rows(name: str, results: Results) -> None:
    rows, path = charts()[name].select(results), PICTURES / f"{name}.svg"
    assert path.is_file() == bool(rows), STALE
    if rows:
        assert rows_of(path.read_text(encoding="utf-8")) == digest(rows), STALE


# The same, on results and a page of their own.

SHARED = {"device": "EPYC", "capability": "AVX512", "cores": 2, "threads": 2, "torch": "2.13", "command": "python -m x",
          "time": "2026-01-02"}  # fmt: skip


def line(provider: str, ms: float, **fields: object) -> dict[str, object]:
    return SHARED | {"op": "toy", "mode": "fwd", "dtype": "float32", "provider": provider, "ms_p50": ms,
                     "shape": {"rows": 4}} | fields  # fmt: skip


LINES = [line("fastformer", 2.0), line("eager", 5.0)]
TOY = TableCase("toy", {"op": "toy"}, ("eager",))


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Makes a page with one block that is up to date with one file of results."""
    monkeypatch.setattr("benchmarks.readme.TABLES", {"toy": lambda n: f"{n.ratio(TOY, 'fp32', 'eager')} times"})
    (tmp_path / "README.md").write_text(
        "# x\n\n## Numbers\n\nWords.\n\n<!-- numbers: toy -->\n<!-- end -->\n\n## Next\n\n3\n"
    )
    write(tmp_path, LINES)
    assert run(tmp_path, "--write") == 0 and run(tmp_path) == 0
    assert "<!-- numbers: toy -->\n2.5 times\n<!-- end -->" in (tmp_path / "README.md").read_text()
    return tmp_path


def write(folder: Path, lines: list[dict[str, object]]) -> None:
    (folder / "cpu.jsonl").write_text("".join(json.dumps(row) + "\n" for row in lines))


@pytest.mark.parametrize(("kind", "name"), [(WITHOUT_AVX512, "avx2"), (AT_FULL_RATE, "accelerated_full_rate")])
def test_results_of_other_machines_are_separate(folder: Path, kind: str, name: str) -> None:
    """This holds even if they are newer and of the same case."""
    lacking = Numbers(Results(folder))
    assert TABLES[name](lacking) == "" and len(lacking.missing) == 1
    same = {"op": "drop_in", "model": "torch_nn_encoder", "dtype": "fp32", "shape": {"seqlen": "128"},
            "mode": "forward"}  # fmt: skip
    write(folder, [*LINES, line("accelerated", 2.0, **same), line("as it is", 3.0, **same)])
    same |= {"time": "2026-02-03"}
    lines = [line("accelerated", 2.0, **same), line("as it is", 14.0, **same), line("eager", 9.0, time="2026-02-03")]
    (folder / f"{kind}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in lines))
    assert run(folder) == 0, "the other tables are as they were"
    numbers = Numbers(Results(folder))
    assert "6 layers, 8 of 128 tokens | 7.0 |" in TABLES[name](numbers)
    assert "6 layers, 8 of 128 tokens | 1.5 · – |" in TABLES["accelerated"](numbers)
    assert numbers.figures[0].origin == f"{kind}.jsonl:1, {kind}.jsonl:2"


def test_the_losses_are_those_of_all_tables_and_name_the_cpu(tmp_path: Path) -> None:
    encoder = {"op": "drop_in", "model": "torch_nn_encoder", "dtype": "fp32", "shape": {"seqlen": "128"},
               "mode": "forward"}  # fmt: skip
    adapted = {"op": "adapters", "precision": "int8", "shape": {"rows": 1}}
    files = {
        "cpu": (("accelerated", 4.0, encoder), ("as it is", 1.0, encoder), ("adapters", 2.0, adapted),
                ("none", 1.9, adapted)),
        WITHOUT_AVX512: (("accelerated", 2.0, encoder), ("as it is", 1.0, encoder)),
        WITH_AMX: (("adapters", 3.0, adapted), ("none", 1.0, adapted)),
        AT_FULL_RATE: (("accelerated", 1.0, encoder), ("as it is", 2.0, encoder)),
    }  # fmt: skip
    for name, rows in files.items():
        lines = (json.dumps(line(provider, ms, **same)) for provider, ms, same in rows)
        (tmp_path / f"{name}.jsonl").write_text("\n".join(lines) + "\n")
    numbers = Numbers(Results(tmp_path))
    lost = [row.strip("| ").split(" | ") for row in TABLES["losses"](numbers).splitlines()[2:]]
    assert [(row[1], "AVX-512" in row[0], "AMX" in row[0]) for row in lost] == [
        ("0.25", False, False), ("0.33", False, True), ("0.50", True, False), ("0.95", False, False),
    ]  # fmt: skip
    assert [figure.origin.partition(":")[0] for figure in numbers.figures] == [
        "cpu.jsonl", f"{WITH_AMX}.jsonl", f"{WITHOUT_AVX512}.jsonl", "cpu.jsonl"
    ]  # fmt: skip


def test_tables_of_amx_name_the_cpu_and_compare_other_programs_alone(folder: Path) -> None:
    """Speech on an Intel CPU leaves the figures of AMD as they are; a program that we speed up is no rival."""
    speech = {"op": "speech", "model": "base", "shape": {"windows": 8}, "precision": "int8"}
    of_amd, of_intel = {"device": "AMD EPYC, family 25, model 17"}, {"device": "Intel(R) Xeon(R) Processor, family 6"}
    write(folder, [line("fastformer", 2.0, **speech, **of_amd), line("faster-whisper", 6.0, **speech, **of_amd)])
    texts = {
        "op": "drop_in",
        "model": "minilm_real",
        "dtype": "int8",
        "shape": {"order": "mixed"},
        "time": "2026-02-03",
    }
    providers = ("fastformer.Encoder", 1.0), ("sentence-transformers, accelerated", 1.5), ("openvino", 8.0)
    speech["time"] = "2026-02-03"
    lines = [
        *(line(name, ms, **speech, **of_intel) for name, ms in (("fastformer", 2.0), ("faster-whisper", 10.0))),
        *(line(name, ms, **texts, **of_intel) for name, ms in providers),
    ]
    (folder / f"{WITH_AMX}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in lines))
    numbers = Numbers(Results(folder))
    for name, cpu, ratio in (("from_faster_whisper", "AMD EPYC", "3.0"), ("amx_speech", "Intel Xeon", "5.0")):
        made = TABLES[name](numbers)
        assert f"two cores of {cpu} |" in made and f"{ratio} times as fast as faster-whisper" in made
    made = TABLES["amx_encoders"](numbers)
    assert "| 8.0 |" in made and "accelerated" not in made


def run(folder: Path, *arguments: str) -> int:
    return main([*arguments, "--results", str(folder), "--pages", str(folder / "README.md")])


def edit(folder: Path, old: str, new: str) -> None:
    text = (folder / "README.md").read_text()
    assert old in text
    (folder / "README.md").write_text(text.replace(old, new, 1))


def test_a_figure_changed_by_hand_is_noticed(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    edit(folder, "2.5 times", "2.6 times")
    assert run(folder) == 1
    out = capsys.readouterr().out
    assert "-2.6 times" in out and "+2.5 times" in out


def test_a_missing_line_is_reported(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(
        folder, [LINES[0], SHARED | {"op": "toy", "mode": "fwd", "provider": "eager", "missing": "pip install eager"}]
    )
    assert run(folder) == 1  # the page still says 2.5
    assert run(folder, "--write") == 0 and run(folder) == 0
    assert "not measured: toy, fp32, against eager" in capsys.readouterr().out
    assert "not measured times" in (folder / "README.md").read_text()
    (folder / "cpu.jsonl").write_text("")
    assert run(folder) == 0


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("<!-- end -->", "", "each once"),
        ("numbers: toy", "numbers: boy", "boy"),
        ("<!-- numbers: toy -->", "<!-- numbers: toy -->\n<!-- end -->\n<!-- numbers: toy -->", "each once"),
        ("<!-- numbers: toy -->\n2.5 times\n<!-- end -->", "", "toy"),
    ],
)
def test_blocks_that_are_not_whole(folder, old, new, message, capsys) -> None:
    edit(folder, old, new)
    before = (folder / "README.md").read_text()
    with pytest.raises(SystemExit):
        run(folder, "--write")
    assert message in capsys.readouterr().err and (folder / "README.md").read_text() == before


def test_the_list_has_a_line_and_a_command_for_each_figure(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(folder, "--list") == 0
    out = capsys.readouterr().out
    assert "2.5  toy, fp32, against eager" in out and "cpu.jsonl:1, cpu.jsonl:2: python -m x" in out


def test_fields_that_fit_several_cases_are_refused(tmp_path: Path) -> None:
    write(tmp_path, [*LINES, line("fastformer", 2.0, shape={"rows": 8}), line("eager", 5.0, shape={"rows": 8})])
    with pytest.raises(ValueError, match="'rows': 8"):
        list(TOY.comparisons(Results(tmp_path).rows))
    assert len(list(TableCase("toy", {"op": "toy", "rows": 8}, ("eager",)).comparisons(Results(tmp_path).rows))) == 1


def test_all_blocks_can_be_written_without_any_result(tmp_path: Path) -> None:
    numbers = Numbers(Results(tmp_path))
    assert NOT_MEASURED in "".join(all_written(TEXTS, numbers).values()) and len(numbers.missing) > 20
    assert {name for name, block in TABLES.items() if NOT_MEASURED in block(numbers)} >= {"models", "ops", "decoding"}


def test_a_quick_run_has_its_own_tables_and_no_published_figures(tmp_path, capsys) -> None:
    norm = {"op": "add_layer_norm", "mode": "fwdbwd", "shape": {"rows": 4096, "dim": 512, "dropout_p": 0.1}}
    write(tmp_path, [fields | norm | {"quick": True} for fields in LINES])
    assert main(["--tables", str(tmp_path)]) == 0
    assert capsys.readouterr().out == (
        "| times faster, fp32, than | eager PyTorch |\n| --- | --- |\n"
        "| add_layer_norm (4096, 512), dropout, training | 2.5 |\n"
    )
    assert not Results(tmp_path).rows
    write(tmp_path, LINES)  # of no case that a table shows
    assert main(["--tables", str(tmp_path)]) == 0
    assert "has no line of" in capsys.readouterr().out
