"""Files of a run that may have moved before it is resumed: its data, its tokenizer, the run that it began from.

The content counts. A path names today's place: on another mount, under another name, relative or absolute.
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
    """Makes sure that the data of a run that goes on are where its settings say.

    Raises:
        ValueError: a file that isn't there; the flag that says where it is now is named.
    """
    for name in (name for kind, names in SOURCES.items() if kind != "task" for name in names):
        for path in paths_of(getattr(config, name) or os.curdir):
            if path != STDIN and not os.path.exists(file_of(path)):
                raise ValueError(
                    f"expected the run's {name} in {path}, but there is no file: if it moved, give --{name} with its "
                    "new place; its content is compared with what the run began with"
                )


def check_tokenizer(config: TrainConfig, before: TrainConfig, own: Tokenizer) -> None:
    """Holds a tokenizer that is given anew against the one in the run folder, which is used.

    Args:
        config: the settings now.
        before: those in the checkpoint.
        own: the tokenizer in the run folder.

    Raises:
        ValueError: another tokenizer.
    """
    if config.tokenizer == before.tokenizer:
        return
    is_path = config.tokenizer not in WORDS
    if is_path and (
        contents(tokenizer_of(config, [])) == contents(own)
        if all(map(os.path.exists, paths_of(config.tokenizer)))
        else (
            before.tokenizer not in WORDS  # it moved, and a run that goes on doesn't open it
        )
    ):
        return
    raise ValueError(
        f"a run that goes on keeps its tokenizer: expected that of {before.tokenizer}, got another in "
        f"{config.tokenizer}; leave --tokenizer out, or train anew in another folder"
    )


def check_origin(config: TrainConfig, before: TrainConfig, digest: str | None) -> None:
    """Holds an init_from that is given anew against the weights that the run began with.

    Args:
        config, before: see `check_tokenizer`.
        digest: of those weights, by `digest_of`; None where an earlier version began the run.

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
    """A SHA-256 of weights, whatever file they are in."""
    plain = {name: tensor.detach().cpu().contiguous() for name, tensor in state.items()}
    return hashlib.sha256(safetensors_library().save(plain)).hexdigest()
