"""`fastformer average`."""

from __future__ import annotations

import logging
from pathlib import Path

from fastformer.commands import command_line

logger = logging.getLogger("fastformer")


def average(run: str, *, last: int | None = None) -> None:
    """Averages the weights of a run's last checkpoints into its model.

    Args:
        run: the run folder
        last: the number of checkpoints; by default all that the run has kept
    """
    from fastformer.checkpoints import load_model
    from fastformer.checkpoints.lock import RunLock
    from fastformer.checkpoints.training_state import average_weights, checkpoints, describe_average
    from fastformer.files import check_places
    from fastformer.models.pretrained import CONFIG, save_model
    from fastformer.models.weights import WEIGHTS, check_entries, entries_of
    from fastformer.training.world import read_parts

    if last is not None and last < 1:
        raise ValueError(f"expected --last of at least 1, got {last}")
    folder = Path(run)
    if not checkpoints(folder):
        raise ValueError(f"expected a run with checkpoints to average, but {run} has none")
    check_places(folder, (WEIGHTS, CONFIG))
    model, _ = load_model(run)
    with RunLock(folder):
        paths = checkpoints(folder)[-(last or 0) :]
        weights = average_weights(paths, read_parts)
        check_entries(paths[-1], f"the model in {run}", entries_of(weights), entries_of(model.state_dict()))
        model.load_state_dict(weights)
        save_model(model, run, notes={"model": describe_average(paths)})
    if last is not None and len(paths) < last:
        logger.warning(
            "--last asks for %d checkpoints; %s has %d, which were averaged (to keep more, train with --keep_last %d)",
            last, run, len(paths), last,
        )  # fmt: skip
    print(f"averaged {', '.join(path.stem for path in paths)} into {run}")
    if type(model).__name__ != "GPT":
        score = command_line("translate", run, "--file", "SOURCE", "--reference", "TARGET")
        print(f"nothing was validated; {score} scores the model")
