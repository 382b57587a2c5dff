"""Settings of a tiny training, for the tests of run folders."""

from tests.training.conftest import config as config
from tests.training.conftest import no_tensorboard as no_tensorboard
