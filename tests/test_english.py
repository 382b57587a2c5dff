"""No text that a user or a newcomer reads hides its actor; `python -m tests.english --list` finds the places."""

from __future__ import annotations

from pathlib import Path

from tests.english import findings


def test_the_actor_is_named() -> None:
    places = [place for place in findings() if place.path.parts[0] != "csrc"]  # only the command counts these
    assert not places, "\n".join(f"{place.path}:{place.line}: {place.text}" for place in places)


def test_the_count_finds_planted_words(tmp_path: Path) -> None:
    """The count includes each kind of text, and excludes code and clauses that are nouns."""
    (tmp_path / "fastformer").mkdir()
    (tmp_path / "csrc").mkdir()
    (tmp_path / "README.md").write_text("Nobody reads this.\n\n```\nnobody\n```\n\nWhat is hooked stays as it is.\n")
    (tmp_path / "csrc" / "x.h").write_text("int x;  // who knows\n")
    (tmp_path / "fastformer" / "x.py").write_text(
        '"""What a file is called."""\nwho = "nobody"  # what is left is free\nraise ValueError("whoever calls it")\n'
    )
    counts = sorted((place.kind, place.text.split()[0]) for place in findings(tmp_path))
    assert counts == [
        ("comments", "what"), ("comments", "who"), ("messages", "whoever"), ("pages", "Nobody"), ("pages", "What"),
    ]  # fmt: skip
