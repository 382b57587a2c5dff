"""Accelerated models work with compilers, checkpoints, parallelism, adapters and copies."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.utils.parametrize as parametrize
import transformers
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounter
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.utils.checkpoint import checkpoint
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.models.t5.modeling_t5 import T5LayerNorm
from transformers.pytorch_utils import Conv1D

import fastformer
from fastformer.ops import record_backends
from tests.covering import by_turns, covering
from tests.integrations import families as small
from tests.integrations.families import PACKED
from tests.nn.test_differences import Counted

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning")

REAL = small.RIGHT
IDS = small.IDS.masked_fill(~REAL, 1)
LABELS = IDS.masked_fill(~REAL, -100)


class Tagger(nn.Module):
    """A model of torch.nn's modules."""

    def __init__(self, dropout: float, num_layers: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(60, 24)
        layer = nn.TransformerEncoderLayer(24, 3, 40, dropout, batch_first=True, norm_first=True)
        self.encoder = nn.TransformerEncoder(layer, num_layers, nn.LayerNorm(24), enable_nested_tensor=False)
        self.head = nn.Linear(24, 60)

    def forward(self, input_ids: Tensor, attention_mask: Tensor, labels: Tensor) -> tuple[Tensor]:
        x = self.encoder(self.embedding(input_ids), src_key_padding_mask=attention_mask == 0)
        return (nn.functional.cross_entropy(self.head(x).flatten(0, 1), labels.flatten()),)


# What the config of each family calls the number of its layers.
DEPTHS = {name: ["num_hidden_layers"] for name in ("bert", "gpt2", "llama")}
DEPTHS["marian"] = ["encoder_layers", "decoder_layers"]


def make(family: str, dropout: float = 0.0, num_layers: int = 2) -> Any:
    if family == "torch.nn":
        torch.manual_seed(5)
        return Tagger(dropout, num_layers).double()
    options: dict[str, Any] = dict.fromkeys(DEPTHS[family], num_layers) | dict.fromkeys(small.DROPOUTS[family], dropout)
    if family in small.CAUSAL:
        options["use_cache"] = False
    return small.make(family, seed=5, **options).train()


def accelerated(model: Any, **options: Any) -> Any:
    """Accelerates a model, or a new one of a family."""
    made = make(model, **options) if isinstance(model, str) else model
    # The model around torch.nn's encoder isn't known, but reads no padding.
    is_torchs = any(isinstance(each, nn.TransformerEncoder) for each in made.modules())
    assert fastformer.report(fastformer.accelerate(made, padding="skip" if is_torchs else "auto")).swapped
    return made


def batch(padded: bool = True) -> dict[str, Tensor]:
    real = REAL if padded else torch.ones_like(REAL)
    return {"input_ids": IDS, "attention_mask": real.long(), "labels": LABELS}


class Step:
    """A training step: the loss, all gradients by name, and fastformer's ops that ran."""

    def __init__(self, model: Any, **options: Any) -> None:
        options = options or batch()
        model.zero_grad()
        torch.manual_seed(7)
        with record_backends() as ran:
            self.loss = model(**options)[0]
        self.loss.backward()
        self.ran = {name for name, _ in ran}
        self.grads = {}
        for name, parameter in model.named_parameters():
            for wrapper in ("_checkpoint_wrapped_module.", "_orig_mod.", "module.", "base."):
                name = name.replace(wrapper, "")
            if parameter.grad is not None:
                self.grads[name] = parameter.grad.clone()

    def assert_same(self, other: Step, rtol: float = 1e-9) -> None:
        tolerance = {"rtol": rtol, "atol": rtol / 10}
        torch.testing.assert_close(self.loss, other.loss, **tolerance)
        assert self.grads.keys() == other.grads.keys()
        for name, grad in self.grads.items():
            torch.testing.assert_close(grad, other.grads[name], **tolerance, msg=name)


FAMILIES = ("bert", "marian", "torch.nn")
families = pytest.mark.parametrize("family", FAMILIES)


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    yield
    torch._dynamo.reset()


few = pytest.mark.parametrize(
    "family", [pytest.param(name, marks=[pytest.mark.slow] if name == "marian" else []) for name in FAMILIES]
)


@few
def test_compiles_as_one_graph_and_once(family):
    expected = Step(make(family, num_layers=1))
    model = accelerated(family, num_layers=1)
    Step(model).assert_same(expected)  # what was remembered of an eager call changes nothing
    counter = CompileCounter()
    compiled = torch.compile(model, backend=counter, fullgraph=True)
    Step(compiled).assert_same(expected)
    for _ in range(2):
        Step(compiled, **{name: tensor.clone() for name, tensor in batch().items()})
    assert counter.frame_count == 1, "a second call must not compile again"
    step = Step(model)
    step.assert_same(expected)
    assert PACKED in step.ran, "beside the compiled model the same one packs"


@few
def test_a_model_in_evaluation_compiles_as_one_graph(family):
    """The engine, which runs an encoder in evaluation without gradients, leaves the call to the modules."""
    expected, model = make(family, num_layers=1).eval(), accelerated(family, num_layers=1).eval()
    with torch.no_grad():
        loss = torch.compile(model, backend="eager", fullgraph=True)(**batch())[0]
        torch.testing.assert_close(loss, expected(**batch())[0], rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("family", ["bert", pytest.param("marian", marks=pytest.mark.slow)])
@pytest.mark.parametrize("how", ["compile()", "class"])
def test_layers_compiled_one_by_one(family, how, monkeypatch):
    expected = Step(make(family, num_layers=1))
    model = accelerated(family, num_layers=1)
    counter = CompileCounter()
    layer = model.bert.encoder.layer[0] if family == "bert" else model.model.encoder.layers[0]
    if how == "compile()":
        layer.compile(backend=counter, fullgraph=True)
    else:
        # Nothing of the layer itself tells: it is packed as ever, so what is compiled has to know.
        monkeypatch.setattr(type(layer), "forward", torch.compile(type(layer).forward, backend=counter))
    for _ in range(2):
        Step(model).assert_same(expected)
    assert counter.frame_count >= 1


@pytest.mark.parametrize("family, reentrant, dropout", covering(FAMILIES, [False, True], [0.0, 0.5]))
def test_a_checkpoint_around_the_whole(family, reentrant, dropout):
    """The recomputation drops the same elements and omits the same padding, because it calls the whole model."""

    class Whole(nn.Module):
        def __init__(self, base: nn.Module) -> None:
            super().__init__()
            self.base = base

        def forward(self, **options: Tensor) -> Any:
            begin = torch.ones((), dtype=torch.float64, requires_grad=True)
            return (checkpoint(lambda one: self.base(**options)[0] * one, begin, use_reentrant=reentrant),)

    expected = Step(accelerated(family, dropout=dropout)) if dropout else Step(make(family))
    step = Step(Whole(accelerated(family, dropout=dropout)))
    step.assert_same(expected)
    assert PACKED in step.ran


@pytest.mark.parametrize("family, reentrant", by_turns(["bert", "marian", "gpt2", "llama"], [False, True]))
def test_checkpoints_of_transformers(family, reentrant):
    def checkpointed(**options: Any) -> Any:
        model = accelerated(family, **options)
        model(**batch())  # it may have been called before
        model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        if reentrant:
            model.enable_input_require_grads()
        return model

    step = Step(checkpointed())
    step.assert_same(Step(make(family)), 1e-4 if family in small.CAUSAL else 1e-9)
    assert PACKED not in step.ran, "its layers are called again after the run has ended"
    # Dropout: without padding nothing is packed either way.
    expected = Step(accelerated(family, dropout=0.5), **batch(False))
    Step(checkpointed(dropout=0.5), **batch(False)).assert_same(expected)


@pytest.mark.parametrize("family, kind", [("bert", "BertForSequenceClassification"), ("llama", "LlamaModel")])
def test_a_model_that_checkpoints_itself_computes_padding(family, kind):
    """It would call its layers again after the call that omits padding."""
    model = accelerated(small.make(family, getattr(transformers, kind)).train())
    inputs = {"input_ids": IDS, "attention_mask": REAL.long()}
    for itself, training in ((False, True), (True, True), (True, False)):
        model.gradient_checkpointing = itself
        model.train(training)
        assert (PACKED in small.ran(lambda: model(**inputs))) == (not itself or not training)


CHECKPOINTED = {
    "layers": ("BertLayer", "MarianEncoderLayer", "TransformerEncoderLayer", "GPT2Block", "LlamaDecoderLayer"),
    "attentions": ("BertAttention", "MarianAttention", "MultiheadAttention", "GPT2Attention", "LlamaAttention"),
    "inner": ("BertSelfAttention", "Linear"),
}


def wrap(model: nn.Module, kinds: tuple[str, ...], wrapper: Callable[[nn.Module], nn.Module]) -> None:
    for name, child in list(model.named_children()):
        if type(child).__name__ in kinds:
            setattr(model, name, wrapper(child))
        else:
            wrap(child, kinds, wrapper)


@pytest.mark.parametrize("family, kinds", by_turns([*FAMILIES, "gpt2", "llama"], [*CHECKPOINTED]))
def test_checkpoint_wrappers_inside(family, kinds):
    expected = Step(make(family))
    model = accelerated(family)
    wrap(model, CHECKPOINTED[kinds], checkpoint_wrapper)
    # Causal models of transformers compute their loss, and Llama its norms, in fp32.
    Step(model).assert_same(expected, 1e-4 if family in ("gpt2", "llama") else 1e-9)


@pytest.mark.parametrize("family", [*FAMILIES, "gpt2", "llama"])
def test_autocast(family):
    """The error in bf16 is no larger than that of the original model."""
    # With one layer: below a second one, attention's gradients of these models are smaller than plain bf16's errors.
    exact = Step(make(family, num_layers=1))
    steps = []
    for model in (make(family, num_layers=1).float(), accelerated(family, num_layers=1).float()):
        with torch.autocast("cpu", torch.bfloat16):
            steps.append(Step(model))
    plain, ours = steps
    assert ours.loss.dtype == plain.loss.dtype and PACKED in ours.ran
    for name, grad in exact.grads.items():
        error, allowed = ((step.grads[name] - grad).norm() for step in (ours, plain))
        assert error <= 2 * allowed + 2**-8 * grad.norm() + 1e-6, name


@pytest.fixture
def one_process(tmp_path: Path) -> Iterator[None]:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize(
    "family, options", by_turns(FAMILIES, [{}, {"find_unused_parameters": True}, {"static_graph": True}]), ids=str
)
def test_ddp(family, options, one_process):
    expected = Step(make(family))
    before = nn.parallel.DistributedDataParallel(accelerated(family), **options)
    after = accelerated(nn.parallel.DistributedDataParallel(make(family), **options))
    for model in (before, after):
        for _ in range(2):
            step = Step(model)
            step.assert_same(expected)
            assert PACKED in step.ran


def shard(model: Any) -> Any:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (1,))
    for module in list(model.modules()):
        if type(module).__name__ in (*CHECKPOINTED["layers"], "MarianDecoderLayer"):
            fully_shard(module, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def whole(step: Step) -> Step:
    step.grads = {
        name: grad.full_tensor() if hasattr(grad, "full_tensor") else grad for name, grad in step.grads.items()
    }
    return step


@families
def test_fsdp2(family, one_process):
    expected = Step(make(family))
    before = shard(accelerated(family))
    after = shard(make(family))
    report = fastformer.report(fastformer.accelerate(after))
    assert any("FSDP" in reason and "is a subclass of" in reason for reason in report.left.values())
    for model in (before, after):
        whole(Step(model)).assert_same(expected)
    # A class that came on top of ours isn't taken away.
    kinds = [type(module) for module in before.modules()]
    with pytest.raises(ValueError):
        fastformer.restore(before)
    assert kinds == [type(module) for module in before.modules()]
    assert sorted(fastformer.restore(after)) == sorted(report.swapped)
    whole(Step(after)).assert_same(expected)


@pytest.mark.parametrize("family", ["bert", pytest.param("torch.nn", marks=pytest.mark.slow)])
def test_export(family):
    model = accelerated(family, num_layers=1).eval()
    with torch.no_grad():
        expected = model(**batch())[0]
        exported = torch.export.export(model, (), batch())
        torch.testing.assert_close(exported.module()(**batch())[0], expected)


COMPUTED = [
    *((family, "weight") for family in ("bert", "marian", "gpt2", "llama", "t5")), ("bert", "bias"), ("gpt2", "bias"),
]  # fmt: skip


@pytest.mark.parametrize("comes, family, what", by_turns(["before", "later"], COMPUTED))
def test_computed_weights_are_computed_as_often(family, what, comes):
    counts = []
    for accelerated in (False, True):
        model = small.make("t5") if family == "t5" else make(family)
        if accelerated and comes == "later":
            fastformer.accelerate(model)
        made: dict[str, Counted] = {}
        for name, module in list(model.named_modules()):
            is_known = isinstance(module, nn.Linear | nn.LayerNorm | Conv1D | LlamaRMSNorm | T5LayerNorm)
            if is_known and getattr(module, what, None) is not None:
                made[name] = Counted()
                parametrize.register_parametrization(module, what, made[name])
        if accelerated and comes == "before":
            fastformer.accelerate(model)
        for each in made.values():
            each.count = 0
        model(input_ids=IDS, attention_mask=REAL.long(), labels=LABELS)
        counts.append({name: each.count for name, each in made.items()})
    assert counts[1] == counts[0] and len(counts[0]) > 8
