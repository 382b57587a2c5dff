"""Models with experts: losses of routers, folders of transformers in every form, the engine, and what is refused."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import tokenizers
import torch
import transformers
from torch import Tensor

import fastformer
from fastformer.checkpoints import load_model
from fastformer.checkpoints.hf import DECODER_FORMS, FAMILIES
from fastformer.checkpoints.hf.common import Checkpoint
from fastformer.integrations import from_huggingface, to_huggingface
from fastformer.models import GPT, GPTConfig
from fastformer.nn import SequenceLayout
from tests.checkpoints.present import skip_before
from tests.covering import by_turns
from tests.integrations.decoders import CASES, VOCAB, Wide, gradients_of, ids_of
from tests.nn.comparing import assert_same

NAMES = (
    "mixtral window",
    "olmoe three of five",
    "qwen2_moe shared, one layer dense",
    "qwen3_moe every other layer",
    "granitemoe factors",
    "gpt_oss yarn",
)
names = pytest.mark.parametrize("name", NAMES)


@pytest.mark.parametrize("is_padded", [False, True], ids=["full", "padded"])
@names
def test_routers_learn_as_in_transformers(name: str, is_padded: bool) -> None:
    if name.startswith("granitemoe"):
        skip_before(5, 18, "loses the routers' logits of a Granite-MoE")
    case, (ids, labels) = CASES[name], ids_of(2, 13)
    theirs = case.make(is_exact=True, router_aux_loss_coef=0.7).train()
    ours = from_huggingface(theirs)
    assert isinstance(ours, GPT) and ours.training and ours.config.router_aux_loss_coef == 0.7
    mask, layout = torch.ones_like(ids), None
    if is_padded:
        mask[1, 5:], labels[1, 5:] = 0, -100
        layout = SequenceLayout.padded(torch.tensor([13, 5]), 13)
    with Wide():
        # transformers takes the labels of the ids, one position further.
        shifted = torch.nn.functional.pad(labels, (1, 0), value=-100)[:, :-1]
        shifted = torch.cat([shifted, labels[:, -1:]], 1)
        longer = torch.nn.functional.pad(ids, (0, 1), value=3), torch.nn.functional.pad(mask, (0, 1))
        expected = theirs(longer[0], attention_mask=longer[1], labels=shifted, output_router_logits=True)
        expected.loss.backward()
    layout = layout or SequenceLayout.padded(torch.tensor([13, 13]), 13)
    loss = ours.loss(ids, labels, layout=layout, reduction="mean")
    loss.backward()
    assert_same(loss, expected.loss, "loss", 1e-7)  # transformers counts in fp32
    count = int((labels != -100).sum())
    assert_same(ours.loss(ids, labels, layout=layout), loss * count, "sum of losses", 1e-9)
    assert ours.eval().loss(ids, labels, layout=layout, reduction="mean") < loss - 0.7
    gradients = gradients_of(ours, case)
    for parameter_name, parameter in theirs.named_parameters():
        assert parameter.grad is not None
        assert_same(gradients[parameter_name], parameter.grad, parameter_name, 1e-6)


def saved(folder: Path, name: str, **options: Any) -> Any:
    """Saves a model of transformers, and returns it."""
    model = CASES[name].make(**options)
    model.save_pretrained(folder)
    words = tokenizers.models.WordLevel({str(i): i for i in range(VOCAB)}, unk_token="3")
    tokenizers.Tokenizer(words).save(str(folder / "tokenizer.json"))
    model.config._experts_implementation = "eager"
    return model


@names
def test_folders_are_read_and_written_in_each_form(name: str, tmp_path: Path) -> None:
    theirs, (ids, _) = saved(tmp_path / "theirs", name), ids_of()
    expected = theirs(ids).logits
    ours = load_model(tmp_path / "theirs", ("GPT",))[0]
    torch.testing.assert_close(ours(ids), expected, rtol=1e-4, atol=1e-4)
    # The tensors of a model in memory, which hold all experts of a layer.
    weights = {each: tensor.clone() for each, tensor in theirs.state_dict().items()}
    assert any(tensor.dim() == 3 for tensor in weights.values())
    file = tmp_path / "theirs" / "model.safetensors"
    on_disk = safetensors.torch.load_file(file)
    is_granite = "granite" in name  # it has factors that ours lack
    is_whole = is_granite or "gpt_oss" in name  # it has a tensor for all experts on disk as well
    assert is_whole == any(tensor.dim() == 3 for tensor in on_disk.values())
    file.unlink()
    safetensors.torch.save_file(weights, file)
    fused = load_model(tmp_path / "theirs", ("GPT",))[0]
    assert all(map(torch.equal, fused.state_dict().values(), ours.state_dict().values()))
    to_huggingface(ours).save_pretrained(tmp_path / "ours")
    again = safetensors.torch.load_file(tmp_path / "ours" / "model.safetensors")
    assert again.keys() == on_disk.keys()
    torch.testing.assert_close(to_huggingface(ours)(ids).logits, expected, rtol=1e-4, atol=1e-4)
    if not is_granite:
        found = DECODER_FORMS[CASES[name].kind].from_model(ours)[1]
        assert {*on_disk} <= {*found} and all(torch.equal(found[each], on_disk[each]) for each in on_disk)
        assert all(torch.equal(again[each], on_disk[each]) for each in on_disk)
    ours.quantize("int4").save_pretrained(tmp_path / "int4")
    rounded = GPT.from_pretrained(tmp_path / "int4")
    assert torch.equal(rounded(ids), ours.quantize("int4")(ids))


def test_a_gpt_oss_without_a_number_of_experts_has_the_usual_one() -> None:
    theirs = CASES["gpt_oss few biases"].make(num_local_experts=128, intermediate_size=4)
    settings, state = theirs.config.to_dict(), theirs.state_dict()
    del settings["num_local_experts"]
    model = FAMILIES["gpt_oss"].to_model(Checkpoint(settings, state))
    ids, _ = ids_of(2, 9)
    torch.testing.assert_close(model(ids), theirs(ids).logits, rtol=1e-4, atol=1e-4)
    for wrong in (0, 3, "128", 2.5):
        with pytest.raises(ValueError, match="expert"):
            FAMILIES["gpt_oss"].to_model(Checkpoint({**settings, "num_local_experts": wrong}, state))


@pytest.mark.parametrize("name, precision", by_turns(NAMES, ["fp32", "bf16", "int8", "int4"]))
def test_the_engine_generates_the_models_own_tokens(name: str, precision: str) -> None:
    """Alone, beside others, and with any number of threads: a row's bits don't depend on the tokens of others."""
    model = from_huggingface(CASES[name].make(seed=4, eos_token_id=None))
    model = model.bfloat16() if precision == "bf16" else model
    model = model.quantize(precision) if precision.startswith("int") else model
    prompts = [row.tolist() for row in ids_of(9, 21)[0]]
    options: dict[str, Any] = {"max_new_tokens": 24, "precision": precision}
    found = model.generate(prompts, engine="cpp", **options)
    for row in (0, 4):
        assert torch.equal(model.generate(prompts[row : row + 1], engine="cpp", **options)[0], found[row])
    drafted = model.generate(prompts, engine="cpp", prompt_lookup_num_tokens=3, **options)
    assert torch.equal(drafted, found)
    if precision in ("fp32", "bf16"):
        expected = model.generate(prompts, engine="kv_cache", **options)
        assert (expected == found).double().mean() > (0.8 if precision == "bf16" else 0.99)
    else:  # activations are rounded as well
        with torch.inference_mode():
            logits = model(found[:, :-1])[:, -24:]
        chosen = logits.gather(-1, found[:, -24:, None]).squeeze(-1)
        assert (logits.amax(-1) - chosen).mean() < 0.1 * logits.std()


@names
def test_greedy_tokens_are_those_of_transformers(name: str, record_property: Any) -> None:
    """64 tokens of each prompt; where they differ first, two tokens are equally likely but for rounding."""
    theirs, (prompts, _) = CASES[name].make(seed=4, eos_token_id=None), ids_of(8, 21)
    model, exact = from_huggingface(theirs), from_huggingface(theirs).double()
    expected = theirs.generate(prompts, max_new_tokens=64, do_sample=False, attention_mask=torch.ones_like(prompts))
    found = model.generate(prompts, max_new_tokens=64, engine="cpp", precision="fp32")
    assert found.shape == expected.shape == (8, 85) and len({*found[:, 21:].flatten().tolist()}) > 10
    different = [(row, int(place)) for row in range(8) for place in (found[row] != expected[row]).nonzero()[:1]]
    record_property("different", len(different))
    assert len(different) <= 1
    for row, place in different:
        logits = exact(expected[row : row + 1, :place])[0, -1]
        assert (logits[found[row, place]] - logits[expected[row, place]]).abs() < 1e-5 * logits.std()


def test_the_threads_of_a_step_change_no_bit() -> None:
    model, prompts = from_huggingface(CASES[NAMES[2]].make(seed=4)), ids_of(9, 21)[0]
    found = []
    threads = torch.get_num_threads()
    try:
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            found.append(model.generate(prompts, max_new_tokens=8, engine="cpp"))
    finally:
        torch.set_num_threads(threads)
    assert torch.equal(found[0], found[1]) and torch.equal(found[0], found[2])


def _settings(folder: Path, **changes: Any) -> None:
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def _tensors(folder: Path, change: Any, **settings: Any) -> None:
    _settings(folder, **settings)
    file = folder / "model.safetensors"
    state = safetensors.torch.load_file(file)
    change(state)
    file.unlink()
    safetensors.torch.save_file({name: tensor.contiguous() for name, tensor in state.items()}, file)


def _uneven(state: dict[str, Tensor]) -> None:
    """Moves a row from an expert's gate to the matrix beside it: all rows together still are as many."""
    place = "model.layers.0.block_sparse_moe.experts.1"
    gate, up = state[f"{place}.w1.weight"], state[f"{place}.w3.weight"]
    state[f"{place}.w1.weight"], state[f"{place}.w3.weight"] = gate[1:], torch.cat([up, gate[:1]])


def _lying(state: dict[str, Tensor]) -> None:
    """Adds a tensor of many experts, which has no bytes."""
    state["model.layers.0.mlp.experts.gate_up_proj"] = torch.empty(2**17, 0, 24)


BAD: dict[str, tuple[Any, str]] = {
    "more experts than there are": (lambda f: _settings(f, num_experts_per_tok=6), "num_experts_per_tok"),
    "no expert": (lambda f: _settings(f, num_experts_per_tok=0), "num_experts_per_tok"),
    "more experts than tensors": (lambda f: _settings(f, num_local_experts=2**30), "experts"),
    "a missing expert": (lambda f: _tensors(f, lambda s: s.pop(f"{_PLACE}.experts.3.w2.weight")), r"experts\.3\.w2"),
    "a missing router": (lambda f: _tensors(f, lambda s: s.pop(f"{_PLACE}.gate.weight")), r"moe\.gate"),
    "fewer experts than tensors": (lambda f: _settings(f, num_local_experts=4), r"experts\.4\.w"),
    "uneven matrices": (lambda f: _tensors(f, _uneven), "shape"),
    "a shape that lies": (lambda f: _tensors(f, _lying, num_local_experts=2**17), "gate_up_proj"),
    "noise of the router": (lambda f: _settings(f, router_jitter_noise=0.1), "router_jitter_noise"),
    "an unknown option": (lambda f: _settings(f, router_scoring_func="sigmoid"), "router_scoring_func"),
}
_PLACE = "model.layers.0.block_sparse_moe"


@pytest.mark.parametrize("what", BAD)
def test_bad_folders_are_refused_by_name(what: str, tmp_path: Path) -> None:
    saved(tmp_path, NAMES[0])
    change, named = BAD[what]
    change(tmp_path)
    with pytest.raises(ValueError, match=named):
        load_model(tmp_path, ("GPT",))


@pytest.mark.parametrize(
    "options",
    [
        {"num_experts": 2, "num_experts_per_tok": 3},
        {"shared_expert_d_ff": 8},
        {"num_experts": 2, "sparse_layers": (True,)},
    ],
)
def test_bad_configs_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=[*options][-1]):
        GPTConfig(20, num_layers=2, **options)


@names
def test_accelerate_keeps_what_routers_tell(name: str) -> None:
    if name.startswith("granitemoe"):
        skip_before(5, 18, "loses the routers' logits of a Granite-MoE")
    plain, (ids, labels) = CASES[name].make(), ids_of()
    if not name.startswith("gpt_oss"):  # whose sinks "sdpa" lacks
        plain.config._attn_implementation = "sdpa"
    fast = fastformer.accelerate(copy.deepcopy(plain))
    mask = torch.ones_like(ids)
    mask[1, 12:] = 0
    options = {"attention_mask": mask, "labels": labels, "output_router_logits": True}
    for mode in (True, False):
        expected, found = plain.train(mode)(ids, **options), fast.train(mode)(ids, **options)
        torch.testing.assert_close(found.loss, expected.loss)
        torch.testing.assert_close(found.aux_loss, expected.aux_loss)
    assert torch.equal(fast.generate(ids, max_new_tokens=8), plain.generate(ids, max_new_tokens=8))
    assert "engine" in str(fastformer.report(fast))


def test_accelerate_runs_a_model_without_a_head() -> None:
    plain, (ids, _) = CASES[NAMES[2]].make().model, ids_of()
    fast = fastformer.accelerate(copy.deepcopy(plain))
    with torch.inference_mode():
        expected, found = (model(ids, use_cache=False) for model in (plain, fast))
        assert type(found) is type(expected) is transformers.modeling_outputs.MoeModelOutputWithPast
        torch.testing.assert_close(found[0], expected[0], rtol=1e-4, atol=1e-4)
        for model in (plain, fast):
            model.config.output_router_logits = True
        expected, found = (model(ids, use_cache=False) for model in (plain, fast))
    assert len(found.router_logits) == len(expected.router_logits) == 2


def chosen_by(model: Any) -> dict[str, Tensor]:
    """Returns the numbers by which a model chooses experts, by the places of their layers."""
    tensors = (*model.named_parameters(), *model.named_buffers())
    ends = ("choice_bias", "expert_bias", "correction_bias")
    return {name.split("layers.")[1].split(".")[0]: each.flatten() for name, each in tensors if name.endswith(ends)}


@pytest.mark.parametrize("kind", ["lfm2_moe", "glm4_moe", "afmoe", "ernie4_5_moe"])
def test_numbers_that_choose_experts_keep_their_bits(kind: str, tmp_path: Path) -> None:
    """They may be large and differ little, so that rounded to bf16 they would be one number."""
    theirs = CASES[f"{kind} one layer dense" if kind != "afmoe" else "afmoe windows"].make().bfloat16()
    for tensor in (*theirs.parameters(), *theirs.buffers()):
        tensor.requires_grad_(False)
    wide = {place: 30 + torch.randn(each.shape) / 100 for place, each in chosen_by(theirs).items()}
    for name, tensor in (*theirs.named_parameters(), *theirs.named_buffers()):
        if name.endswith(("expert_bias", "correction_bias")):
            tensor.data = wide[name.split("layers.")[1].split(".")[0]].view(tensor.shape)

    def assert_kept(model: Any) -> None:
        for place, each in chosen_by(model).items():
            torch.testing.assert_close(each.float(), wide[place], rtol=0, atol=0)

    ours = from_huggingface(theirs)
    assert (
        isinstance(ours, GPT) and ours.output_weight.dtype == torch.bfloat16 and chosen_by(ours).keys() == wide.keys()
    )
    ours.save_pretrained(tmp_path)
    loaded = GPT.from_pretrained(tmp_path)
    assert loaded.output_weight.dtype == torch.bfloat16
    for model in (ours, loaded, to_huggingface(ours), copy.deepcopy(ours).half(), copy.deepcopy(ours).double()):
        assert_kept(model)
    ids, _ = ids_of(2, 13)
    assert torch.equal(loaded(ids), ours(ids))
