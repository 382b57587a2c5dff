"""`fastformer average`."""

from __future__ import annotations

from pathlib import Path


def average(run: str, *, last: int = 5) -> None:
    """Averages the weights of a run's last checkpoints into its model.

    Args:
        run: the run folder
        last: how many checkpoints
    """
    from fastformer.models.pretrained import save_model
    from fastformer.run_folder import load_model
    from fastformer.run_folder.checkpoint import average_weights, checkpoints, describe_average
    from fastformer.run_folder.lock import RunLock

    if last < 1:
        raise ValueError(f"expected --last of at least 1, got {last}")
    model, tokenizer = load_model(run)
    with RunLock(Path(run)):
        found = checkpoints(Path(run))[-last:]
        model.load_state_dict(average_weights(found))
        save_model(model, run, tokenizer, notes={"model": describe_average(found)})
    print(f"averaged {', '.join(path.stem for path in found)} into {run}")
