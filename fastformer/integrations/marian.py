"""transformers' Marian, whose layers are BART's."""

from __future__ import annotations

from transformers.models.marian import modeling_marian as marian

from fastformer.integrations.bart import DecoderLayer, EncoderLayer
from fastformer.integrations.engine_encode import StackOnEncoder
from fastformer.integrations.fused_loss import Seq2SeqLoss
from fastformer.integrations.heads import KeepsPadding, Seq2SeqModel, derive, replacements
from fastformer.integrations.padding import Owner
from fastformer.integrations.replace import Replacement
from fastformer.integrations.stacks import Decoder, Encoder


class MarianEncoderLayer(EncoderLayer, marian.MarianEncoderLayer):
    """Marian's encoder layer in fused ops."""


class MarianDecoderLayer(DecoderLayer, marian.MarianDecoderLayer):
    """Marian's decoder layer in fused ops."""


MarianEncoder = derive(
    __name__, marian.MarianEncoder, StackOnEncoder, Encoder, kinds=(MarianEncoderLayer, marian.MarianAttention)
)
MarianDecoder = derive(__name__, marian.MarianDecoder, Decoder, kinds=(MarianDecoderLayer, marian.MarianAttention))
REPLACEMENTS = replacements(
    globals(),
    marian,
    {"MarianModel": Owner, "MarianMTModel": Seq2SeqModel, "MarianForCausalLM": KeepsPadding},
    *(MarianEncoderLayer, MarianDecoderLayer, MarianEncoder, MarianDecoder),
)
MarianWithLoss = derive(__name__, marian.MarianMTModel, Seq2SeqModel, Seq2SeqLoss, name="MarianWithLoss")
LOSS_REPLACEMENTS = (Replacement(marian.MarianMTModel, MarianWithLoss),)
