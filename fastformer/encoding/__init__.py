"""Encoders from the texts to the numbers: embeddings of texts, scores of pairs, classes.

folder.py          what sentence-transformers and transformers wrote, as it lies on disk
tokens.py          texts as ids, cut to what the model takes
batches.py         which texts are computed together
engine.py          `EncoderEngine`: the model in one C++ call, or by its modules
modules.py         what stands behind the model: pooling, linear layers, norms
encoder.py         `Encoder`: embeddings
cross_encoder.py   `CrossEncoder`: scores and classes
requests.py        texts of one of several callers, and what becomes of them
scheduler.py       the requests of many callers, computed together
"""

from fastformer.encoding.cross_encoder import CrossEncoder as CrossEncoder
from fastformer.encoding.encoder import Encoder as Encoder
from fastformer.encoding.engine import EncoderEngine as EncoderEngine
