"""Models on disk: the run folder of a training, and the folders of other programs.

RUN/config.json, model.safetensors   the model (`fastformer.models.pretrained`)
RUN/tokenizer.json                   its tokenizer (`fastformer.data.tokenizer_files`)
RUN/config.yaml                      the settings of the training
RUN/checkpoints/step-*.pt            the state that a training resumes from (`training_state.py`)
RUN/.lock                            the process that trains in the folder (`lock.py`)
RUN/metrics.jsonl                    losses and scores

`run.py` loads a model from the folder of a run or from one that transformers wrote. `hf/` has one file for each family
of transformers' models: its settings, the names of its weights, its tokenizer. To add a family, write that file and its
line in `hf/__init__.py`.
"""

from fastformer.checkpoints.hf import generation_settings as generation_settings
from fastformer.checkpoints.run import load_model as load_model
from fastformer.checkpoints.run import load_models as load_models
