"""Flags of other toolkits get a hint, and the help uses the same words everywhere."""

from __future__ import annotations

import pytest

from fastformer.cli import main


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("translate r --beam_size 4", "--num_beams"),
        ("translate r --max_length 4", "--max_new_tokens"),
        ("translate r --input f", "--file"),
        ("translate r --output f", "standard output"),
        ("generate r t --max_length 4", "--max_new_tokens"),
        ("train r --block_size 4", "--seqlen"),
        ("train r --learning-rate 4", "--lr"),
        ("train r --gradient_accumulation_steps=4", "--accumulate"),
        ("train r --max_steps 4", "'--steps'"),
        ("train r --output_dir f", "RUN"),
        ("train r --d_model 4", "--model.d_model"),
    ],
)
def test_flags_of_other_toolkits(words, said, ran) -> None:
    assert said in ran(*words.split(), code=2).err


def test_dashes_in_flags_are_underscores(capsys) -> None:
    for flag in ("--top-k", "--top_k"):
        assert main(["generate", "no_such_run", "a", flag, "0"]) == 1 and "no_such_run" in capsys.readouterr().err


def test_a_word_before_the_command_is_no_flag_of_it(ran) -> None:
    for words in ("--num_beams 3 translate r t", "--greedy generate r t", "doctor --file f"):
        assert "unrecognized arguments" in ran(*words.split(), code=2).err
    for words in ("translate -h", "-h", "--help"):
        assert "usage" in ran(*words.split()).out
    assert "torch" in ran("doctor").out


def test_the_help_says_how_a_text_is_given(ran) -> None:
    text = " ".join(ran("translate", "--help").out.split())
    assert "after --" in text and "--FLAG=TEXT" in text and "--FLAG=false" in text


def test_messages_do_not_expose_the_parser(capsys) -> None:
    for words in (
        "train r --seed 1.5",
        "train r --model.d_model 1e",
        "train r --precision fp33",
        "train r --task 7",
        "average r --last x",
        "translate r t --max_batch_bytes 1.5e",
        "translate r t --early_stopping x",
        "generate r t --top_p a",
    ):
        main(words.split())
        error = capsys.readouterr().err
        assert not any(inside in error for inside in ("class", "NoneType", "Literal", "type=", "Union", "\\n")), error
