"""GGUF files, in which llama.cpp keeps a model and its tokenizer.

`file.py` reads the values and the tensors of a file, `blocks.py` has the kinds of numbers, `tokenizers.py` makes the
tokenizer, `models.py` the model, and `write.py` writes a file. To add an architecture, add its line to `ARCHITECTURES`
in `architectures.py`; its family must be one of `checkpoints.hf`.
"""

from fastformer.checkpoints.gguf.blocks import Kind as Kind
from fastformer.checkpoints.gguf.file import is_gguf as is_gguf
from fastformer.checkpoints.gguf.models import architecture_of as architecture_of
from fastformer.checkpoints.gguf.models import load_file as load_file
from fastformer.checkpoints.gguf.models import pooling_of as pooling_of
from fastformer.checkpoints.gguf.models import search_options as search_options
from fastformer.checkpoints.gguf.write import write_gguf as write_gguf
