"""Writes and reads the settings of a run, and compares them with those in its last checkpoint."""

from __future__ import annotations

import json
import logging
import os
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from fastformer.checkpoints.training_state import checkpoints
from fastformer.data.files import STDIN
from fastformer.files import write_atomically
from fastformer.training.config import TrainConfig, merged, paths_of
from fastformer.training.sections import SEVERAL, WORDS
from fastformer.training.yaml_file import read_yaml, yaml_library

logger = logging.getLogger("fastformer")

CONFIG = "config.yaml"
# The weights, the data and their order depend on these: a run that resumes can't change them. Files are
# compared by content (`training.moved`).
FIXED = (
    "model preset settings task vocab_size seqlen max_len batching max_tokens accumulate ema seed "
    "held_out data_weights shards_at_once max_length_ratio min_chars max_chars drop_duplicates drop_identical "
    "shared_vocab normalization spaces max_token_length user_tokens drop_user_tokens"
)
# The behaviour of runs of earlier versions, whose settings lack these names.
EARLIER = {"held_out": "last", "spaces": "keep"}
PATHS = "train_source train_target val_source val_target train_tsv val_tsv train_text val_text train_data init_from"


def run_config(run: str | os.PathLike[str], given: dict[str, Any], resume: bool | str = False) -> TrainConfig:
    """Returns the settings to train with: the given ones, which override the run's own if the run resumes.

    Args:
        run: the run folder.
        given: settings from flags and files.
        resume: see `start`.

    Raises:
        ValueError: an unknown setting or a value that is not allowed; a run whose settings can't be read.
    """
    if not resume or (resume == "auto" and not checkpoints(Path(run))):
        return TrainConfig.from_dict(given)
    before = load_config(run).to_dict()
    return TrainConfig.from_dict(merged(before, given))


def save_config(run: Path, config: TrainConfig) -> None:
    """Writes config.yaml, unless the file has these settings already."""
    data = yaml_library().safe_dump(config.to_dict(), sort_keys=False, explicit_end=True).encode()
    file = run / CONFIG
    if not file.is_file() or file.read_bytes() != data:
        write_atomically(file, data)


def load_config(run: str | os.PathLike[str]) -> TrainConfig:
    """Loads the settings of a run.

    Raises:
        ValueError: no such file, or one that is damaged.
    """
    file = Path(run) / CONFIG
    if not file.is_file() and not checkpoints(Path(run)):
        raise ValueError(f"expected a run to continue, but {run} has no checkpoints")
    if file.exists() and not file.is_file():  # reading a named pipe could block forever
        raise ValueError(f"expected a YAML file with settings, but there is no file {file}")
    values = read_yaml(file)
    # Half of a YAML file is often valid YAML, so the end mark of the document is required.
    if not file.read_text(encoding="utf-8").rstrip().endswith("\n..."):
        raise ValueError(f"expected {file} to end with a line of three dots, as it was written: is it cut short?")
    return TrainConfig.from_dict({**EARLIER, **values})


def check_unchanged(config: TrainConfig, saved: str, origin: object) -> TrainConfig:
    """Checks the settings of a run that resumes against those in its checkpoint, which take precedence.

    Args:
        config: the settings from config.yaml and flags.
        saved: the settings in the checkpoint, as JSON.
        origin: the checkpoint.

    Returns:
        The settings in the checkpoint.

    Raises:
        ValueError: a changed setting on which the finished updates depend.
    """
    try:
        settings = TrainConfig.from_dict({**EARLIER, **json.loads(saved)})
    except (AttributeError, RecursionError, TypeError, ValueError) as error:
        raise ValueError(f"{origin} holds no settings that can be read ({error}): train anew") from error
    before, after = asdict(settings), asdict(config)
    for name in FIXED.split():
        if before[name] != after[name]:
            raise ValueError(
                f"a run that goes on keeps its {name}: expected {before[name]!r}, got {after[name]!r}; leave it out "
                f"(and as it was in {CONFIG}), or train anew in another folder"
            )
    for name, value in after.items():
        if before[name] != value:
            logger.info("from here on %s is %s (it was %s)", name, value, before[name])
    return settings


def absolute_paths(config: TrainConfig) -> TrainConfig:
    """Returns the settings with absolute paths."""
    paths = {name: getattr(config, name) for name in PATHS.split()}
    if config.tokenizer not in WORDS:
        paths["tokenizer"] = config.tokenizer
    absolute: dict[str, Any] = {name: _absolute(name, path) for name, path in paths.items() if path and path != STDIN}
    return replace(config, **absolute)


def _absolute(name: str, path: str) -> str:
    paths = paths_of(path) if name in SEVERAL else [path]
    # The shell expands ~ only at the beginning of a word.
    absolute = [os.path.abspath(one if os.path.exists(one) else os.path.expanduser(one)) for one in paths]
    # A comma in the name of a folder is no separator while the folder exists.
    return ",".join(absolute if len(absolute) == 1 or paths_of(",".join(absolute)) == absolute else paths)
