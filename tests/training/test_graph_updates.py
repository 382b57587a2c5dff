"""Updates as graphs give the same weights as plain ones, from one replay each, without Python in between.

On CPU tensors a tape stands for the graph (tests/tape.py): it replays operations alone, and nothing in it may wait for
a device.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from fastformer.checkpoints.training_state import checkpoints, latest_checkpoint, load_checkpoint
from fastformer.data import Batch, Example, collate
from fastformer.graphs import CaptureError, Graph
from fastformer.models import GPT, Transformer
from fastformer.training import TrainConfig, Trainer, start
from fastformer.training import graph_updates as module
from fastformer.training import trainer as trainer_module
from fastformer.training.evaluate import model_loss
from fastformer.training.graph_updates import Size, pad_batch, round_up, size_of, wants_graphs
from fastformer.training.run_config import load_config
from fastformer.training.schedule import rate_of
from fastformer.training.trainer import DivergedError
from tests.no_sync import HostSync
from tests.tape import TapeGraphs
from tests.training.tiny import (
    SIZES,
    assert_same_lines,
    broken_from,
    changed,
    crash_at,
    lines,
    losses,
    on_padded_batches,
    weights,
)

KEYS = ("step", "loss", "lr", "grad_norm", "padding", "nll")


@pytest.fixture(autouse=True)
def on_a_tape(monkeypatch) -> None:
    monkeypatch.setenv("FASTFORMER_CPU_GRAPHS", "1")
    monkeypatch.setattr(trainer_module, "Graphs", TapeGraphs)
    # A graph takes its rate as fp32; with such rates the ordinary trainer comes to the same bits.
    monkeypatch.setattr(trainer_module, "rate_of", lambda *given: float(torch.tensor(rate_of(*given))))


@pytest.fixture
def graphs(config) -> TrainConfig:
    return changed(config, cuda_graphs=True)


def stand_in(trainer: Trainer) -> TapeGraphs:
    return trainer.graphs.graphs  # type: ignore[return-value]


# Sizes.


def test_rounding_wastes_at_most_a_sixteenth_and_gives_few_sizes() -> None:
    numbers = range(1, 20_000)
    rounded = [round_up(n, 5) for n in numbers]
    assert all(up - n >= 0 and (up - n < 8 or up / n < 1 + 1 / 16) for n, up in zip(numbers, rounded, strict=True))
    assert all(up % 8 == 0 and round_up(up, 5) == up for up in rounded)
    assert len(set(rounded) & set(range(8192, 16384))) == 16
    assert rounded == sorted(rounded)
    assert [round_up(n, 1) for n in (1, 8, 9, 16, 17, 64, 65)] == [8, 8, 16, 16, 32, 64, 128]
    assert [round_up(n, 3) for n in (64, 65, 80, 81, 290)] == [64, 80, 80, 96, 320]


def batch_of(*lengths: tuple[int, int]) -> Batch:
    """Makes packed examples of (source, target) lengths; a source of 0 is a language model's."""
    generator = torch.Generator().manual_seed(0)

    def ids(count: int) -> list[int]:
        return torch.randint(3, 40, (count,), generator=generator).tolist()

    return collate([Example(ids(m), ids(n)) for m, n in lengths], packed=True)


def test_the_size_of_an_update() -> None:
    first, second = batch_of((130, 9), (30, 5)), batch_of((3, 200), (2, 1), (4, 4), (9, 80))
    assert size_of([first], 400, 512) == Size(160, 16, 8, 256)
    assert size_of([first, second], 400, 512) == Size(160, 288, 8, 256)
    assert size_of([second], 400, 230) == Size(24, 288, 8, 230)  # never beyond the model's positions
    long = batch_of((3, 530))
    assert size_of([long], 4096, 2048) == Size(8, 544, 8, 1024)
    assert size_of([long], 531, 2048) == Size(8, 536, 8, 1024)  # never beyond a full batch, in eights
    assert size_of([batch_of((0, 11))], 64, 64) == Size(0, 16, 8, 16)  # the last token is only predicted
    assert size_of([batch_of(*[(1, 1)] * 33)], 64, 64).sequences == 40


def test_added_padding_belongs_to_no_sequence_and_no_loss() -> None:
    batch = batch_of((5, 3), (7, 9))
    padded = pad_batch(batch, Size(16, 24, 4, 32), pad=2)
    assert padded.source.tolist() == [*batch.source.tolist(), 2, 2, 2, 2]
    assert padded.target_in.tolist() == [*batch.target_in.tolist(), *[2] * 12]
    assert padded.target_out.tolist() == [*batch.target_out.tolist(), *[-100] * 12]
    assert padded.source_layout.cu_seqlens.tolist() == [0, 5, 12, 12, 12]
    assert padded.target_layout.seqlens.tolist() == [3, 9, 0, 0]
    assert padded.target_layout.positions.tolist()[:12] == batch.target_layout.positions.tolist()
    assert padded.target_layout.positions.max() < 32 and padded.target_layout.max_seqlen == 32
    assert (padded.num_tokens, padded.num_slots) == (24, 40)
    alone = pad_batch(batch_of((0, 4)), Size(0, 8, 2, 8), pad=0)
    assert alone.source is None and alone.target_layout.cu_seqlens.tolist() == [0, 3, 3]


MODELS: dict[str, Callable[[], nn.Module]] = {
    "translator": lambda: Transformer.from_preset("tiny", vocab_size=40, **SIZES),
    "post-norm": lambda: Transformer.from_preset("tiny", vocab_size=40, norm_first=False, **SIZES),
    "gpt": lambda: GPT.from_preset("tiny", vocab_size=40, d_model=16, num_heads=2, num_layers=1, dropout=0.2),
    "rotary": lambda: GPT.from_preset(
        "llama-small", vocab_size=40, d_model=16, num_heads=2, num_layers=1, attention_dropout=0.25
    ),
}


@pytest.mark.parametrize("name", MODELS)
def test_padding_changes_neither_loss_nor_gradients(name: str) -> None:
    torch.manual_seed(0)
    model = MODELS[name]().double().train()
    batch = batch_of(*(((0, 9), (0, 31), (0, 2)) if isinstance(model, GPT) else ((9, 4), (1, 31), (17, 2))))
    size = Size(0 if batch.source is None else 56, 64, 8, 64)
    found = []
    for one in (batch, pad_batch(batch, size, pad=0)):
        torch.manual_seed(1)  # the same elements are dropped
        model.zero_grad()
        loss = model_loss(model, one, label_smoothing=0.1)
        loss.backward()
        found.append([loss.detach(), *(p.grad.clone() for p in model.parameters())])
    for plain, padded in zip(*found, strict=True):
        assert (plain - padded).abs().max() <= 1e-12 * plain.abs().max()


# The same run.


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"ema": 0.9, "accumulate": 2, "label_smoothing": 0.1},
        {"precision": "bf16", "weight_decay": 0.1},
        {"schedule": "cosine", "clip": 0.0, "model": "gpt"},
    ],
    ids=["plain", "average-accumulate", "bf16", "gpt"],
)
def test_graphs_give_the_weights_of_the_ordinary_trainer(graphs, tmp_path, changes) -> None:
    if changes.get("model") == "gpt":
        (tmp_path / "text").write_text("".join(f"{i} is {i * 7}\n" for i in range(300)))
        changes = changes | {
            "train_tsv": None, "val_tsv": None, "train_text": str(tmp_path / "text"), "seqlen": 15,
            "settings": {"d_model": 16, "num_layers": 1, "num_heads": 2, "dropout": 0.1},
        }  # fmt: skip
    graphs = changed(graphs, log_every=3 if "ema" in changes else 1, steps=14, **changes)
    plain = on_padded_batches(start(changed(graphs, cuda_graphs=False), tmp_path / "plain"))
    plain.train()
    captured = start(graphs, tmp_path / "graphs")
    captured.train()
    counts = stand_in(captured)
    assert counts.warm_ups + counts.replays == 14 and counts.replays > counts.captures >= 1
    assert torch.equal(weights(captured), weights(plain))
    if plain.ema is not None:
        for name, average in plain.ema.state_dict().items():
            assert torch.equal(average, captured.ema.state_dict()[name]), name
    assert_same_lines(tmp_path / "graphs", tmp_path / "plain", *KEYS)
    assert 0.0 < lines(tmp_path / "graphs", "train")[0]["padding"] < 0.5


def test_a_killed_run_resumes_bit_for_bit(graphs, tmp_path) -> None:
    config = changed(graphs, ema=0.9, log_every=3, save_every=9, accumulate=2, steps=16)
    whole = start(config, tmp_path / "whole")
    whole.train()
    trainer = start(config, tmp_path / "parts")
    crash_at(trainer, 13)
    resumed = start(config, tmp_path / "parts", resume=True)
    assert resumed.step == 9 and resumed.optimization.rate == lines(tmp_path / "parts", "train")[2]["lr"]
    resumed.train()
    assert torch.equal(weights(whole), weights(resumed))
    assert torch.equal(whole.ema.module.output_weight, resumed.ema.module.output_weight)
    assert_same_lines(tmp_path / "parts", tmp_path / "whole", *KEYS)


def test_a_restored_trainer_drops_its_graphs(graphs, tmp_path) -> None:
    trainer = start(changed(graphs, save_every=6), tmp_path / "run")
    trainer.train()
    first = weights(trainer)
    trainer.load_state_dict(load_checkpoint(checkpoints(tmp_path / "run")[0]))
    assert trainer.step == 6
    # The optimizer's state stands elsewhere now, and PyTorch captures none but one that says that it can be.
    assert all(group["capturable"] for group in trainer.optimizer.param_groups)
    trainer.train()
    assert trainer.step == 12 and torch.equal(weights(trainer), first)


def test_a_checkpoint_does_not_depend_on_graphs(graphs, tmp_path) -> None:
    def shape(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: shape(item) for key, item in value.items() if key not in ("config", "seconds")}
        if isinstance(value, list):
            return [shape(item) for item in value]
        return (value.dtype, value.shape) if isinstance(value, Tensor) else type(value)

    config = changed(graphs, ema=0.9, steps=4)
    start(config, tmp_path / "graphs").train()
    start(changed(config, cuda_graphs=False), tmp_path / "plain").train()
    states = [latest_checkpoint(tmp_path / run)[1] for run in ("graphs", "plain")]
    assert shape(states[0]) == shape(states[1])
    for state in states:
        (group,) = state["optimizer"]["param_groups"]
        assert group["lr"] == float(torch.tensor(rate_of(config, 4, 16)))
        assert group["capturable"] is False and state["ema"]["n_averaged"] == 4
    # Each goes on as the other.
    on = start(changed(config, steps=8), tmp_path / "plain", resume=True)
    on.train()
    off = on_padded_batches(start(changed(config, cuda_graphs=False, steps=8), tmp_path / "graphs", resume=True))
    off.train()
    assert stand_in(on).replays > 0 and off.graphs is None
    assert len(losses(tmp_path / "plain")) == len(losses(tmp_path / "graphs")) == 8
    assert load_config(tmp_path / "plain").cuda_graphs and not load_config(tmp_path / "graphs").cuda_graphs


# One launch.


class Touches(TorchDispatchMode):
    """Records the operations that read or write one of some tensors."""

    def __init__(self, tensors: list[Tensor]) -> None:
        super().__init__()
        self.places = {tensor.untyped_storage().data_ptr() for tensor in tensors}
        self.found: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        touched = [t for t in torch.utils._pytree.tree_leaves((args, result)) if isinstance(t, Tensor)]
        if self.places & {tensor.untyped_storage().data_ptr() for tensor in touched}:
            self.found.append(str(func.overloadpacket))
        return result


def standing(trainer: Trainer) -> list[Tensor]:
    """Returns everything that is on the device between two updates."""
    states = [value for state in trainer.optimizer.state.values() for value in state.values()]
    inputs = [slot.inputs.buffer for slot in trainer.graphs.slots.values()]
    averages = [] if trainer.ema is None else list(trainer.ema.module.parameters())
    noted = [trainer.loss, trainer.norm, trainer.finite, trainer.meter.loss]
    return [*trainer.model.parameters(), *trainer.model.buffers(), *states, *inputs, *averages, *noted]


def test_a_captured_update_is_one_copy_and_one_replay(graphs, tmp_path) -> None:
    trainer = start(changed(graphs, ema=0.9, steps=30), tmp_path / "run")
    trainer.model.train()
    batches = trainer.updates()
    group = next(batches)
    for _ in range(2):  # one that compiles what there is to compile, one that captures
        trainer.update(group)
        trainer.position.step += 1
    counts, before = stand_in(trainer), [tensor.data_ptr() for tensor in standing(trainer)]
    assert (counts.warm_ups, counts.captures, counts.replays) == (1, 1, 1)
    (slot,) = trainer.graphs.slots.values()
    replayed = []
    slot.graph.replay = lambda: replayed.append(True)
    with Touches(standing(trainer)) as touches:
        for _ in range(3):
            trainer.update(group)
            trainer.position.step += 1
    assert replayed == [True] * 3 and touches.found == ["aten.copy_"] * 3
    del slot.graph.replay
    trainer.update(group)
    assert [tensor.data_ptr() for tensor in standing(trainer)] == before
    assert all(parameter.grad is None for parameter in trainer.model.parameters())


def test_each_size_is_captured_once_at_its_second_update(graphs, tmp_path) -> None:
    trainer = start(changed(graphs, steps=40), tmp_path / "run")
    seen: dict[Size, int] = {}
    update = trainer.update

    def counted(batches):
        before = stand_in(trainer).captures
        size = module.padded_size(batches[0])
        seen[size] = seen.get(size, 0) + 1
        result = update(batches)
        assert stand_in(trainer).captures - before == (seen[size] == 2)
        return result

    trainer.update = counted
    trainer.train()
    counts = stand_in(trainer)
    assert counts.warm_ups == len(seen) > 1 and counts.replays == 40 - len(seen) > len(seen)


def test_the_memory_of_graphs_is_limited(graphs, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(module, "MAX_GRAPHS", 1)
    config = changed(graphs, steps=12)
    trainer = start(config, tmp_path / "few")
    trainer.train()
    counts = stand_in(trainer)
    assert counts.captures == 1 and counts.warm_ups + counts.replays == 12 and counts.replays < 11
    plain = on_padded_batches(start(changed(config, cuda_graphs=False), tmp_path / "plain"))
    plain.train()
    assert torch.equal(weights(trainer), weights(plain))


def test_a_replay_that_gives_nan_is_noticed(graphs, tmp_path) -> None:
    whole = start(graphs, tmp_path / "whole")
    whole.train()
    trainer = start(changed(graphs, save_every=4), tmp_path / "run")
    broken_from(trainer, 9)
    with pytest.raises(DivergedError, match=r"\b10\b"):
        trainer.train()
    assert stand_in(trainer).replays > 0
    del trainer.update
    trainer.load_state_dict(load_checkpoint(checkpoints(tmp_path / "run")[-1]))
    trainer.train()
    assert torch.equal(weights(trainer), weights(whole))


# What can't be one.


def test_a_loss_that_reads_a_value_is_noticed(graphs, tmp_path) -> None:
    trainer = start(graphs, tmp_path / "run")
    model: Any = trainer.model
    loss = model.loss
    model.loss = lambda *given, **options: loss(*given, **options) * float(loss(*given, **options).item() > 0)
    with pytest.raises(HostSync):
        trainer.train()


def test_the_error_of_a_failed_capture_says_what_to_do(graphs, tmp_path, monkeypatch) -> None:
    refusal = CaptureError("operation not permitted when stream is capturing")
    monkeypatch.setattr(TapeGraphs, "capture", Mock(side_effect=refusal))
    with pytest.raises(CaptureError, match="cuda_graphs.*operation not permitted"):
        start(graphs, tmp_path / "run").train()


def test_by_default_a_gpu_captures_what_it_can(config, graphs, tmp_path) -> None:
    found = []
    for given in (config, graphs):
        trainer = start(given, tmp_path / str(given.cuda_graphs))
        trainer.train()
        assert stand_in(trainer).captures > 0
        found.append(weights(trainer))
    assert torch.equal(*found)


def test_a_run_that_cannot_be_captured_says_why_and_trains(config, tmp_path, caplog, monkeypatch) -> None:
    padded = on_padded_batches(start(changed(config, cuda_graphs=False), tmp_path / "plain"))
    padded.train()
    with caplog.at_level("INFO", logger="fastformer"):
        assert start(changed(config, batching="bucketed"), tmp_path / "bucketed").graphs is None
        hooked = start(config, tmp_path / "hooked")
        with hooked.model.decoder.layers[0].register_forward_hook(lambda *_: None):
            hooked.train()
        monkeypatch.setattr(TapeGraphs, "capture", Mock(side_effect=CaptureError("not permitted")))
        refused = start(config, tmp_path / "refused")
        refused.train()
    lines = [line for line in caplog.messages if line.startswith("updates run without CUDA graphs")]
    assert len(lines) == 3
    assert all(word in line for word, line in zip(("batching", "a hook", "not permitted"), lines, strict=True))
    assert hooked.step == refused.step == 12
    assert torch.equal(weights(refused), weights(padded))  # a layer with a hook draws other dropout


def test_a_capture_that_fails_behind_the_backward_pass_leaves_no_gradients(config, tmp_path, monkeypatch) -> None:
    def capture(self: TapeGraphs, function: Callable[[], None]) -> None:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(failing.world, "clip", Mock(side_effect=CaptureError("out of memory")))
            function()

    still = dict.fromkeys(("dropout", "attention_dropout", "activation_dropout"), 0.0)  # a failed capture would draw
    config = changed(config, settings=config.settings | still)
    due = on_padded_batches(start(changed(config, cuda_graphs=False), tmp_path / "plain"))
    due.train()
    monkeypatch.setattr(TapeGraphs, "capture", capture)
    failing = start(config, tmp_path / "failing")
    failing.train()
    assert torch.equal(weights(failing), weights(due))


def test_a_model_with_code_of_its_own_trains_without_graphs_by_default(graphs, tmp_path, caplog) -> None:
    class Scheduled(Transformer):
        """A graph would hold what its code did once."""

    trainer = start(changed(graphs, cuda_graphs="auto"), tmp_path)
    model = Scheduled(trainer.model.config)
    with caplog.at_level("INFO", logger="fastformer"):
        assert not wants_graphs(trainer.config, model, trainer.device, 1)
    assert wants_graphs(trainer.config, trainer.model, trainer.device, 1)
    assert any("Scheduled" in line for line in caplog.messages)


HOOKS: dict[str, Callable[[Trainer], Any]] = {
    "on decoder.layers.0": lambda t: t.model.decoder.layers[0].register_forward_hook(lambda *_: None),
    "on the model": lambda t: t.model.register_forward_pre_hook(lambda *_: None),
    "on encoder": lambda t: t.model.encoder.register_full_backward_hook(lambda *_: None),
    "on encoder.norm": lambda t: t.model.encoder.norm.register_full_backward_pre_hook(lambda *_: None),
    "on the gradient of embedding.weight": lambda t: t.model.embedding.weight.register_hook(lambda _: None),
    "on the gradient of encoder.norm.weight": lambda t: t.model.encoder.norm.weight.register_post_accumulate_grad_hook(
        lambda _: None
    ),
    "on the optimizer": lambda t: t.optimizer.register_step_post_hook(lambda *_: None),
    "on all modules": lambda t: nn.modules.module.register_module_forward_hook(lambda *_: None),
}


@pytest.mark.parametrize("where", HOOKS)
def test_a_hook_is_refused_because_no_replay_would_run_it(graphs, tmp_path, where) -> None:
    trainer = start(changed(graphs, steps=2), tmp_path / "run")
    handle = HOOKS[where](trainer)
    try:
        with pytest.raises(ValueError, match=f"hook {where}"):
            trainer.train()
        assert trainer.step == 0
    finally:
        handle.remove()
    trainer.train()


@pytest.mark.parametrize("where", HOOKS)
def test_a_hook_that_comes_after_a_capture_is_refused_before_the_next_replay(graphs, tmp_path, where) -> None:
    trainer = start(graphs, tmp_path / "run")
    capture = stand_in(trainer).capture
    handles: list[Any] = []

    def hooking(function: Callable[[], None]) -> Graph:
        graph = capture(function)
        if not handles:
            handles.append(HOOKS[where](trainer))
        return graph

    stand_in(trainer).capture = hooking  # type: ignore[assignment]
    try:
        with pytest.raises(ValueError, match=f"hook {where}"):
            trainer.train()
    finally:
        handles[0].remove()


@pytest.mark.parametrize(("name", "value"), [("batching", "bucketed"), ("precision", "fp16"), ("checkpointing", True)])
def test_settings_that_exclude_graphs(graphs, name, value) -> None:
    with pytest.raises(ValueError, match=rf"\b{name}\b.*\bcuda_graphs\b"):
        changed(graphs, **{name: value})


def test_on_a_cpu_graphs_are_refused_before_anything_is_read(config, tmp_path, monkeypatch, ran) -> None:
    monkeypatch.delenv("FASTFORMER_CPU_GRAPHS")
    with pytest.raises(ValueError, match=r"\bcuda_graphs\b.*\bcpu\b"):
        start(changed(config, cuda_graphs=True, train_tsv="nowhere"), tmp_path / "run")
    assert not (tmp_path / "run").exists()
    flags = ["--task", "numbers", "--batching", "packed", "--device", "cpu", "--cuda_graphs"]
    assert "cuda_graphs" in ran("train", str(tmp_path / "run"), *flags, code=1).err
    trainer = start(config, tmp_path / "plain")
    with pytest.raises(ValueError, match=r"\bcuda_graphs\b"):
        Trainer(changed(config, cuda_graphs=True), tmp_path / "x", trainer.model, trainer.data, torch.device("cpu"))
