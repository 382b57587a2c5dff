"""transformers' Marian, whose layers are BART's."""

from __future__ import annotations

from transformers.models.marian import modeling_marian as marian

from fastformer.integrations.bart import Decoder, DecoderLayer, Encoder, EncoderLayer, Seq2SeqModel
from fastformer.integrations.causal import KeepsPadding, signed_as
from fastformer.integrations.fused_loss import Seq2SeqLoss
from fastformer.integrations.hugging_face import keeps_recording, know
from fastformer.integrations.readers import hand_on
from fastformer.integrations.swap import Swap

know(marian)
hand_on(marian.MarianModel, marian.MarianDecoderWrapper)


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


@keeps_recording
@signed_as(marian.MarianMTModel)
class MarianMTModel(Seq2SeqModel, marian.MarianMTModel):
    """Packed where nobody looks at padding."""


@keeps_recording
@signed_as(marian.MarianMTModel)
class MarianWithLoss(Seq2SeqModel, Seq2SeqLoss, marian.MarianMTModel):
    """The same, with the fused loss."""


@keeps_recording
@signed_as(marian.MarianForCausalLM)
class MarianForCausalLM(KeepsPadding, marian.MarianForCausalLM):
    """Padded."""


SWAPS = (
    Swap(marian.MarianEncoderLayer, MarianEncoderLayer),
    Swap(marian.MarianDecoderLayer, MarianDecoderLayer),
    Swap(marian.MarianEncoder, MarianEncoder),
    Swap(marian.MarianDecoder, MarianDecoder),
    Swap(marian.MarianMTModel, MarianMTModel),
    Swap(marian.MarianForCausalLM, MarianForCausalLM),
)
LOSS_SWAPS = (Swap(marian.MarianMTModel, MarianWithLoss),)
