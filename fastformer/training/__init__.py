"""The trainer: settings, schedules, loop, checkpoints."""

from fastformer.training.build import start as start
from fastformer.training.config import TrainConfig as TrainConfig
from fastformer.training.trainer import Trainer as Trainer
