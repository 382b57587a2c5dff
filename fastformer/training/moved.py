"""Checks of files that may have moved before a run resumes: its data, its tokenizer, and the run that it began from.

Files are compared by content. Their paths may have changed: to another mount, another name, from relative to absolute.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping

from torch import Tensor

from fastformer.checkpoints import load_model
from fastformer.data import Tokenizer
from fastformer.data.files import STDIN
from fastformer.data.pair import contents
from fastformer.data.tables import file_of
from fastformer.models.weights import safetensors_library
from fastformer.training.config import TrainConfig, paths_of
from fastformer.training.examples import tokenizer_of
from fastformer.training.sections import SOURCES, WORDS


def check_there(config: TrainConfig) -> None:
    """Checks that the data files of a run that resumes exist at the paths in its settings.

    Raises:
        ValueError: a missing file; the message names the flag for its new path.
    """
    for name in (name for kind, names in SOURCES.items() if kind != "task" for name in names):
        for path in paths_of(getattr(config, name) or os.curdir):
            if path != STDIN and not os.path.exists(file_of(path)):
                raise ValueError(
                    f"expected the run's {name} in {path}, but there is no file: if it moved, give --{name} with its "
                    "new place; its content is compared with what the run began with"
                )


def check_tokenizer(config: TrainConfig, before: TrainConfig, tokenizer: Tokenizer) -> None:
    """Checks that a changed setting of the tokenizer means the one in the run folder, which the run uses.

    Args:
        config: the current settings.
        before: the settings in the checkpoint.
        tokenizer: the tokenizer in the run folder.

    Raises:
        ValueError: another tokenizer.
    """
    if config.tokenizer == before.tokenizer:
        return
    is_path = config.tokenizer not in WORDS
    if is_path and (
        contents(tokenizer_of(config, [])) == contents(tokenizer)
        if all(map(os.path.exists, paths_of(config.tokenizer)))
        else (
            before.tokenizer not in WORDS  # it moved, and a run that resumes doesn't open it
        )
    ):
        return
    raise ValueError(
        f"a run that goes on keeps its tokenizer: expected that of {before.tokenizer}, got another in "
        f"{config.tokenizer}; leave --tokenizer out, or train anew in another folder"
    )


def check_origin(config: TrainConfig, before: TrainConfig, digest: str | None) -> None:
    """Checks that a changed init_from has the weights that the run began with.

    Args:
        config, before: see `check_tokenizer`.
        digest: the digest of those weights, by `digest_of`; None if an earlier version of fastformer began the run.

    Raises:
        ValueError: other weights, or a run that didn't begin with any.
    """
    now, was = config.init_from, before.init_from
    if now == was:
        return
    if was is None:
        raise ValueError(
            f"expected no init_from for a run that goes on and began without one, got {now}: leave --init_from out, or "
            "train anew in another folder"
        )
    if now is None or (
        digest is not None and os.path.exists(now) and digest_of(load_model(now)[0].state_dict()) != digest
    ):
        raise ValueError(
            f"a run that goes on keeps its init_from: expected the weights that were in {was}, got those in {now}; "
            "leave --init_from out, or train anew in another folder"
        )


def digest_of(state: Mapping[str, Tensor]) -> str:
    """Computes a SHA-256 of weights, which doesn't depend on the format of their file."""
    plain = {name: tensor.detach().cpu().contiguous() for name, tensor in state.items()}
    return hashlib.sha256(safetensors_library().save(plain)).hexdigest()
