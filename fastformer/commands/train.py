"""`fastformer train`."""

from __future__ import annotations

from typing import Any

from fastformer.training.build import changed_config, read_yaml, start
from fastformer.training.config import TrainConfig


def train(run: str, *, config: str | None = None, resume: bool = False, settings: dict[str, Any]) -> int:
    """Trains on text files or on the built-in task; writes a run folder.

    Args:
        run: the run folder
        config: a YAML file with settings; flags override it
        resume: go on with the run in the folder
        settings: those that flags gave
    """
    values = read_yaml(config) if config else {}
    TrainConfig.from_dict(values)  # its mistakes are the file's, before flags hide them
    if "settings" in settings:
        settings["settings"] = {**values.get("settings", {}), **settings["settings"]}
    chosen = changed_config(run, values | settings) if resume else TrainConfig.from_dict(values | settings)
    trainer = start(chosen, run, resume=resume)
    trainer.train()
    if trainer.interrupted:
        return 130
    print(f"the model is in {run}: fastformer {'generate' if chosen.model == 'gpt' else 'translate'} {run} ...")
    return 0
