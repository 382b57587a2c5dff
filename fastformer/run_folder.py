"""The old name of `fastformer.checkpoints`."""

from fastformer.checkpoints import load_model as load_model
from fastformer.checkpoints import load_models as load_models
from fastformer.devices import choose_device as choose_device
