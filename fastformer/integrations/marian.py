"""transformers' Marian, whose layers are BART's."""

from __future__ import annotations

from transformers.models.marian import modeling_marian as marian

from fastformer.integrations.bart import DecoderLayer, Encoder, EncoderLayer
from fastformer.integrations.causal import signed_as
from fastformer.integrations.fused_loss import Seq2SeqLoss
from fastformer.integrations.hugging_face import keeps_recording
from fastformer.integrations.swap import Swap


class MarianEncoderLayer(EncoderLayer, marian.MarianEncoderLayer):
    """Fused."""


class MarianDecoderLayer(DecoderLayer, marian.MarianDecoderLayer):
    """Fused."""


@keeps_recording
class MarianEncoder(Encoder, marian.MarianEncoder):
    """Packed."""

    kinds = (MarianEncoderLayer, marian.MarianAttention)


@keeps_recording
@signed_as(marian.MarianMTModel)
class MarianWithLoss(Seq2SeqLoss, marian.MarianMTModel):
    """With the fused loss."""


SWAPS = (
    Swap(marian.MarianEncoderLayer, MarianEncoderLayer),
    Swap(marian.MarianDecoderLayer, MarianDecoderLayer),
    Swap(marian.MarianEncoder, MarianEncoder),
)
LOSS_SWAPS = (Swap(marian.MarianMTModel, MarianWithLoss),)
