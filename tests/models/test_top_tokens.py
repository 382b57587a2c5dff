"""The contract of `top_tokens` in both models: it chooses from the result of `logits`, even an overridden one."""

from __future__ import annotations

import pytest
import torch

from fastformer.ops import record_backends
from tests.models import test_gpt_options, test_transformer


@pytest.mark.parametrize("options", [{}, {"tie_embeddings": False}], ids=["tied", "untied"])
@pytest.mark.parametrize("module", [test_gpt_options, test_transformer], ids=["gpt", "transformer"])
@torch.inference_mode()
def test_top_tokens(module, options):
    model = module.model_of(num_heads=4, **options)
    cls = type(model)
    hidden = torch.randn(2, 3, model.config.d_model, dtype=torch.float64)

    def check(logits, *, fused):
        for k in (1, 5):
            with record_backends() as ran:
                values, indices = model.top_tokens(hidden, k)
            # The op is for the class's own logits alone.
            assert any(name == "linear_topk" for name, _ in ran) == fused
            expected = logits.log_softmax(-1).topk(k, -1)
            assert torch.equal(indices, expected.indices) and indices.shape == (2, 3, k)
            torch.testing.assert_close(values, expected.values)
            values, indices = model.top_tokens(hidden, k, log_probs=False)
            assert torch.equal(indices, expected.indices)
            torch.testing.assert_close(values, logits.topk(k, -1).values)

    plain = hidden @ model.output_weight.T
    check(plain, fused=True)
    step = torch.compile(lambda hidden: model.top_tokens(hidden, 3), backend="aot_eager", fullgraph=True)
    assert torch.equal(step(hidden).indices, plain.topk(3, -1).indices)

    model.__class__ = type("Renamed", (cls,), {})
    check(plain, fused=True)
    model.__class__ = type("Turned", (cls,), {"logits": lambda self, hidden: cls.logits(self, hidden) * -2.0})
    check(plain * -2.0, fused=False)
    model.__class__ = cls
    model.logits = lambda hidden: plain + torch.arange(plain.shape[-1])
    check(plain + torch.arange(plain.shape[-1]), fused=False)
