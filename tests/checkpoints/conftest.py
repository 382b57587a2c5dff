"""The settings of a tiny training, for what a run folder has to do with one."""

from tests.training.conftest import config as config
from tests.training.conftest import no_tensorboard as no_tensorboard
