"""`fastformer train`."""

from __future__ import annotations

from typing import Any, Literal

from fastformer.training.build import start
from fastformer.training.config import TrainConfig
from fastformer.training.interrupts import Interrupts
from fastformer.training.settings import read_yaml, run_config


def train(
    run: str, *, config: str | None = None, resume: bool | Literal["auto"] = False, settings: dict[str, Any]
) -> int:
    """Trains on text files or on the built-in task; writes a run folder.

    Args:
        run: the run folder
        config: a YAML file with settings; flags override it
        resume: go on with the run in the folder; auto: go on if there is one, else begin
        settings: those that flags gave
    """
    with Interrupts() as interrupts:
        values = read_yaml(config) if config else {}
        TrainConfig.from_dict(values)  # its mistakes are the file's, before flags hide them
        if "settings" in settings:
            settings["settings"] = {**values.get("settings", {}), **settings["settings"]}
        chosen = run_config(run, values | settings, resume)
        trainer = start(chosen, run, resume=resume, interrupts=interrupts)
        trainer.train()
    if trainer.interrupted:
        return interrupts.exit_code
    command = "generate" if trainer.config.model == "gpt" else "translate"
    print(f"the model is in {run}: fastformer {command} {run} ...")
    return 0
