"""Flags of other toolkits get a hint, and the help uses the same words everywhere."""

from __future__ import annotations

import importlib

import pytest

from fastformer.cli import main
from fastformer.commands._parsing import make_parser
from fastformer.commands._words import nearest

# By command: flags of other toolkits, each with the one that is meant, or with a part of what is said instead.
TRAIN = """
batch_size=--max_tokens block_size=--seqlen context_length=--seqlen d_model=--model.d_model data=--train_text
dropout_rate=--model.dropout eval_steps=--val_every gradient_accumulation_steps=--accumulate gradient_clip_val=--clip
input=--train_source learning_rate=--lr learning-rate=--lr logging_steps=--log_every max_epoch=--epochs
max_grad_norm=--clip max_length=--max_len max_seq_length=--max_len max_steps=--steps max_update=--steps
num_train_epochs=--epochs per_device_train_batch_size=--max_tokens resume_from_checkpoint=--resume
save_interval=--save_every save_steps=--save_every src=--train_source tgt=--train_target train_steps=--steps
update_freq=--accumulate warmup_steps=--warmup warmup_updates=--warmup output_dir=RUN save_dir=RUN
"""
TRANSLATE = """
batch_size=--max_batch_size beam=--num_beams beam_size=--num_beams input=--file max_len_b=--max_new_tokens
max_length=--max_new_tokens min_length=--min_new_tokens nbest=--n_best num_return_sequences=--n_best src=--file
target_prefix=--prefix tgt=--reference model=RUN model_dir=RUN model_name_or_path=RUN output=standard
output_file=standard
"""


@pytest.mark.parametrize(("command", "rows"), [("train", TRAIN), ("translate", TRANSLATE)], ids=["train", "translate"])
def test_flags_of_other_toolkits(command, rows, ran) -> None:
    _, hints = make_parser(importlib.import_module(f"fastformer.commands.{command}"), command)
    for row in rows.split():
        flag, meant = row.split("=")
        said = nearest(f"--{flag}", hints, {})
        assert (f"'{meant}'" if meant.startswith("--") else meant) in said, (flag, said)
    assert said in ran(command, "r", f"--{flag}=4", code=2).err


def test_dashes_in_flags_are_underscores(capsys) -> None:
    for flag in ("--top-k", "--top_k"):
        assert main(["generate", "no_such_run", "a", flag, "0"]) == 1 and "no_such_run" in capsys.readouterr().err


@pytest.mark.parametrize("flag", ["-top_k", "-top-k"])
def test_a_flag_with_one_dash_is_no_text(flag, ran) -> None:
    assert "--top_k" in ran("generate", "no_such_run", flag, "3", code=2).err


def test_a_word_before_the_command_is_no_flag_of_it(ran) -> None:
    for words in ("--num_beams 3 translate r t", "--greedy generate r t", "doctor --file f"):
        assert "unrecognized arguments" in ran(*words.split(), code=2).err
    for words in ("translate -h", "-h", "--help"):
        assert "usage" in ran(*words.split()).out
    assert "translate RUN [TEXT] [--" in ran("translate", "--help").out
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
