"""transformers' Marian, whose layers are BART's."""

from __future__ import annotations

from transformers.models.marian import modeling_marian as marian

from fastformer.integrations.bart import Decoder, DecoderLayer, Encoder, EncoderLayer, Seq2SeqModel
from fastformer.integrations.causal import KeepsPadding, derive, signed_as
from fastformer.integrations.fused_loss import Seq2SeqLoss
from fastformer.integrations.hugging_face import keeps_recording, know
from fastformer.integrations.padding import Owner
from fastformer.integrations.swap import Swap

know(marian)


class MarianEncoderLayer(EncoderLayer, marian.MarianEncoderLayer):
    """Fused."""


class MarianDecoderLayer(DecoderLayer, marian.MarianDecoderLayer):
    """Fused."""


@keeps_recording
@signed_as(marian.MarianEncoder)
class MarianEncoder(Encoder, marian.MarianEncoder):
    """Packed."""

    kinds = (MarianEncoderLayer, marian.MarianAttention)


@keeps_recording
@signed_as(marian.MarianDecoder)
class MarianDecoder(Decoder, marian.MarianDecoder):
    """Packed."""

    kinds = (MarianDecoderLayer, marian.MarianAttention)


MarianMTModel = derive(__name__, marian.MarianMTModel, Seq2SeqModel)
MarianWithLoss = derive(__name__, marian.MarianMTModel, Seq2SeqModel, Seq2SeqLoss, name="MarianWithLoss")
MarianForCausalLM = derive(__name__, marian.MarianForCausalLM, KeepsPadding)


MarianModel = derive(__name__, marian.MarianModel, Owner)


SWAPS = (
    Swap(marian.MarianModel, MarianModel),
    Swap(marian.MarianEncoderLayer, MarianEncoderLayer),
    Swap(marian.MarianDecoderLayer, MarianDecoderLayer),
    Swap(marian.MarianEncoder, MarianEncoder),
    Swap(marian.MarianDecoder, MarianDecoder),
    Swap(marian.MarianMTModel, MarianMTModel),
    Swap(marian.MarianForCausalLM, MarianForCausalLM),
)
LOSS_SWAPS = (Swap(marian.MarianMTModel, MarianWithLoss),)
