"""LoRA adapters of requests: each is the model whose matrices contain it, whatever the requests beside it."""

from __future__ import annotations

import copy
import importlib.util
import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from fastformer.checkpoints.hf.adapters import load_adapter
from fastformer.generation import Generator, generate
from fastformer.generation.config import GenerationConfig
from fastformer.generation.engines import Prompt
from fastformer.generation.engines.cpp import CppEngine
from fastformer.generation.request_builder import RequestBuilder
from fastformer.integrations import from_huggingface
from tests.generation.lora_folders import linears, merged, write_adapter
from tests.generation.small import needs_cpp
from tests.integrations.decoders import CASES, VOCAB, Case

pytestmark = needs_cpp
FAMILIES = {case.kind: case for case in CASES.values()}


@pytest.fixture(scope="module")
def llama() -> Any:
    return FAMILIES["llama"].make(head_dim=8, hidden_size=48, num_key_value_heads=2, intermediate_size=72)


@pytest.fixture(scope="module")
def folders(llama: Any, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("adapters")
    every = linears(llama)
    return {
        "all": write_adapter(folder / "all", llama, every, seed=1),
        "large": write_adapter(folder / "large", llama, linears(llama, "q_proj", "v_proj"), seed=2, r=20, lora_alpha=9),
        "patterns": write_adapter(
            folder / "patterns", llama, linears(llama, "k_proj", "down_proj", "up_proj"), seed=3, use_rslora=True,
            rank_pattern={"down_proj": 2}, alpha_pattern={"layers.0.self_attn.k_proj": 2.5},
        ),
        "one": write_adapter(folder / "one", llama, [every[3]], seed=4, target_modules=r".*layers\.0.*o_proj"),
    }  # fmt: skip


def logits_of(
    model: Any, ids: list[int], adapter: Any = None, begun: int = 11, precision: str | None = None
) -> torch.Tensor:
    """Returns the engine's logits behind each of the ids from `begun` on, beside a row without an adapter."""
    engine = CppEngine(model, precision=precision)
    batch = engine.open(2, 200)
    batch.prefill([Prompt(None, ids[: begun + 1], adapter), Prompt(None, ids[: begun + 1])])
    return torch.stack([batch.logits([token, token])[0] for token in ids[begun:]])


@pytest.mark.parametrize("kind", FAMILIES)
@torch.no_grad()
def test_a_family_computes_as_peft_does_or_the_model_that_contains_the_adapter(kind, tmp_path):
    case: Case = FAMILIES[kind]
    model = case.make()
    modules = [name for name in linears(model) if "shared_expert" not in name and ".router." not in name]
    folder = write_adapter(tmp_path / "adapter", model, modules, alpha_pattern={modules[0]: 11}, use_rslora=True)
    converted = from_huggingface(model)
    ids = torch.randint(3, VOCAB, (1, 21), generator=torch.Generator().manual_seed(7))
    exact = merged(copy.deepcopy(model).double(), folder)(ids).logits[0, 11:]
    plain = merged(model, folder)(ids).logits[0, 11:]
    found = logits_of(converted, ids[0].tolist(), load_adapter(folder, converted))
    assert (exact - model(ids).logits[0, 11:]).abs().max() > 0.5
    assert_close(found, plain, exact)
    # peft takes the gates of Trinity's attention for a part of its experts, and refuses them.
    if importlib.util.find_spec("peft") is not None and case.kind != "afmoe":
        from peft import PeftModel

        whole = PeftModel.from_pretrained(copy.deepcopy(model), folder)
        assert_close(found, whole(ids).logits[0, 11:], exact)


def assert_close(found: torch.Tensor, plain: torch.Tensor, exact: torch.Tensor) -> None:
    """Asserts that the error is of the size of another order of fp32's sums: at most four times that of plain code."""
    error, allowed = (found - exact).abs().max(), (plain - exact).abs().max()
    assert error <= 4 * allowed + 4 * torch.finfo(torch.float32).eps * exact.abs().max(), (error, allowed)


@pytest.mark.parametrize("precision", ["bf16", "int8", "int4"])
@torch.no_grad()
def test_an_adapter_is_as_precise_as_the_weights(precision, llama, folders):
    """The model has no matrices of its own, which would hide the error. Some ranks are a thousandth of others."""
    model, ids = from_huggingface(llama), [3 + (7 * i) % (VOCAB - 3) for i in range(30)]
    adapter = load_adapter(folders["all"], model)
    for name, (a, _) in adapter.factors.items():
        a *= torch.logspace(-3, 0, len(a))[:, None]
        model.get_parameter(name).zero_()
    whole = copy.deepcopy(model)
    for name, (a, b) in adapter.factors.items():
        whole.get_parameter(name).add_(b @ a)
    exact = copy.deepcopy(whole).double()(torch.tensor([ids]))[0, 11:]
    found = logits_of(model, ids, adapter, precision=precision)
    rounded = logits_of(whole, ids, precision=precision)
    error, allowed = ((x - exact).square().mean().sqrt() for x in (found, rounded))
    assert error <= 1.25 * allowed


@pytest.mark.parametrize("precision", ["fp32", "bf16", "int8", "int4"])
def test_requests_of_a_batch_are_those_alone(precision, llama, folders):
    model, names = from_huggingface(llama), [*folders, None]
    rows = [[3 + (7 * i + j * j) % (VOCAB - 3) for j in range(2 + 3 * i)] for i in range(16)]
    options = {"max_new_tokens": 12, "eos_token_id": None}
    together = Generator(model, precision=precision, adapters=folders)
    builder_rows = [(row, names[i % len(names)]) for i, row in enumerate(rows)]
    found = batch_of(together, builder_rows, **options)
    for (row, name), tokens in zip(builder_rows, found, strict=True):
        alone = Generator(model, precision=precision, adapters=folders)
        assert tokens == [*alone.stream(row, adapter=name, **options)], (name, row)
    base = batch_of(together, [(row, None) for row, _ in builder_rows], **options)
    changed = [name for (_, name), tokens, before in zip(builder_rows, found, base, strict=True) if tokens != before]
    assert {*changed} == {*folders}, "each adapter changes some text, and no text without one changes"


def batch_of(generator: Generator, rows: list[tuple[list[int], str | None]], **options: Any) -> list[list[int]]:
    """Returns the new tokens of requests that are decoded together, each with its adapter."""
    requests = []
    for row, name in rows:
        config = GenerationConfig(adapter=name, **options)
        builder = RequestBuilder(generator.model, config, log_probs=False, engine=generator._engine)
        requests.append(builder.build(builder.check(row)))
    generator._session.run(requests)
    return [request.results[0].tokens for request in requests]


def test_a_prompt_that_was_read_is_reused_for_the_same_adapter_alone(llama, folders):
    generator = Generator(from_huggingface(llama), adapters=folders)
    prompt, options = [3 + i % 50 for i in range(40)], {"max_new_tokens": 6, "eos_token_id": None}
    expected = {}
    for name in (None, "all", "one"):
        before = generator.stats().cached_tokens
        expected[name] = [*generator.stream(prompt, adapter=name, **options)]
        assert generator.stats().cached_tokens == before
    for name, tokens in expected.items():
        before = generator.stats().cached_tokens
        assert [*generator.stream(prompt, adapter=name, **options)] == tokens
        assert generator.stats().cached_tokens == before + 32
    alike = batch_of(generator, [(prompt, None), (prompt, "all"), (prompt, "one"), (prompt, "all")], **options)
    assert alike == [expected[None], expected["all"], expected["one"], expected["all"]]


@pytest.mark.parametrize(
    "options",
    [
        {"num_beams": 3, "num_return_sequences": 2},
        {"do_sample": True, "seed": 3, "num_return_sequences": 3},
        {"prompt_lookup_num_tokens": 6, "repetition_penalty": 1.1},
        {"window": "slide", "max_new_tokens": 120},
        {"draft_model": True},
    ],
    ids=lambda options: next(iter(options)),
)
def test_every_way_to_decode_reads_the_adapter(options, llama, folders):
    model, options = from_huggingface(llama), {"max_new_tokens": 20, "eos_token_id": None, **options}
    draft = {"draft_model": model} if options.pop("draft_model", False) else {}
    generator = Generator(model, adapters=folders, **draft)
    prompt = [5, 9, 11, 5, 9, 11, 5, 9]
    dense = generate(from_huggingface(merged(llama, folders["all"])), [prompt], **options)
    assert torch.equal(generator.generate([prompt], adapter="all", **options), dense)
    assert not torch.equal(generator.generate([prompt], **options), dense)


def test_an_adapter_stays_when_weights_change_and_can_be_replaced(llama, folders):
    model = from_huggingface(llama)
    generator = Generator(model, adapters={"a": folders["all"]})
    options = {"max_new_tokens": 10, "eos_token_id": None}
    first = generator.generate([[5, 6, 7]], adapter="a", **options)
    with torch.no_grad():
        model.decoder.layers[1].linear2.weight *= -1
    changed = copy.deepcopy(llama)
    with torch.no_grad():
        changed.model.layers[1].mlp.down_proj.weight *= -1
    expected = generate(from_huggingface(merged(changed, folders["all"])), [[5, 6, 7]], **options)
    assert torch.equal(generator.generate([[5, 6, 7]], adapter="a", **options), expected)
    assert not torch.equal(first, expected)
    generator.load_adapter("a", folders["large"])
    expected = generate(from_huggingface(merged(changed, folders["large"])), [[5, 6, 7]], **options)
    assert torch.equal(generator.generate([[5, 6, 7]], adapter="a", **options), expected)
    with pytest.raises(ValueError, match="'b'"):
        generator.generate([[5, 6, 7]], adapter="b", **options)
    with pytest.raises(ValueError, match="'a'"):
        generate(model, [[5, 6, 7]], adapter="a", **options)
    with pytest.raises(ValueError, match="'cpp'"):
        Generator(model, engine="kv_cache", adapters=folders)


def test_an_adapter_that_no_request_uses_does_not_keep_old_weights_in_memory(llama, folders):
    model = from_huggingface(llama)
    engine = CppEngine(model)
    engine.add_adapter("a", load_adapter(folders["all"], model))
    old = engine.prepacked()
    with torch.no_grad():
        model.decoder.layers[1].linear2.weight *= -1
    assert engine.prepacked() is not old
    assert sys.getrefcount(old) == 2, "only this function holds it"


@pytest.mark.parametrize("kind", ["llama", "granite", "ernie4_5"])
def test_a_run_folder_names_the_family(kind, tmp_path):
    """Granite has factors that are multiplied into the weights, and ERNIE another order of rows."""
    theirs = FAMILIES[kind].make()
    folder = write_adapter(tmp_path / "adapter", theirs, linears(theirs))
    model = from_huggingface(theirs)
    expected = load_adapter(folder, model).factors
    model.quantize("int8").save_pretrained(tmp_path / "run")
    model = type(model).from_pretrained(tmp_path / "run")
    found = load_adapter(folder, model).factors
    assert found.keys() == expected.keys()
    assert all(torch.equal(a, b) for name in found for a, b in zip(found[name], expected[name], strict=True))
    model.source_settings = None  # one that fastformer trained: its adapters are read as Llama's are
    if kind == "granite":
        with pytest.raises(ValueError, match="Granite"):
            load_adapter(folder, model)
    else:
        found = load_adapter(folder, model).factors
        assert all(torch.equal(a[0], b[0]) for a, b in zip(found.values(), expected.values(), strict=True))
        same = [torch.equal(a[1], b[1]) for a, b in zip(found.values(), expected.values(), strict=True)]
        assert all(same) == (kind == "llama")


@pytest.mark.parametrize("source", ["llama", {}, {"model_type": 3}, {"model_type": "unheard-of"}])
def test_a_run_folder_with_another_source_is_refused(source, llama, folders, tmp_path):
    model = from_huggingface(llama)
    model.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "source": source}))
    with pytest.raises(ValueError, match="source|unheard-of"):
        load_adapter(folders["all"], type(model).from_pretrained(tmp_path))


A = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"
B = "base_model.model.model.layers.1.mlp.down_proj.lora_B.weight"
BAD: dict[str, tuple[str, dict[str, Any], Any]] = {
    "DoRA": ("use_dora", {"use_dora": True}, None),
    "a bias": ("bias", {"bias": "all"}, None),
    "whole modules": ("modules_to_save", {"modules_to_save": ["lm_head"]}, None),
    "another method": ("IA3", {"peft_type": "IA3"}, None),
    "another task": ("SEQ_CLS", {"task_type": "SEQ_CLS"}, None),
    "changed base weights": ("pissa", {"init_lora_weights": "pissa"}, None),
    "an unknown setting": ("some_new_way", {"some_new_way": {"x": 1}}, None),
    "a target that the model lacks": ("c_attn", {"target_modules": ["q_proj", "c_attn"]}, None),
    "the head": ("lm_head", {"target_modules": ["q_proj", "lm_head"]}, None),
    "targets without tensors": ("lora_A and lora_B", {"target_modules": "all-linear"}, lambda s: drop(s, "k_proj")),
    "another rank": ("rank 5", {"r": 5}, None),
    "a rank by name": ("rank 4", {"rank_pattern": {"layers.0.*q_proj": 4}}, None),
    "one rank of two": (r"\(3, 48\) and \(48, 2\)", {}, lambda s: s.update({A.replace("_A", "_B"): torch.ones(48, 2)})),
    "no B": ("lora_B", {}, lambda s: s.pop(A.replace("_A", "_B"))),
    "NaN": ("NaN", {}, lambda s: s[B].fill_(float("nan"))),
    "other inputs": ("40", {}, lambda s: s.update({A: torch.ones(3, 40)})),
    "other outputs": ("47", {}, lambda s: s.update({B: torch.ones(47, 3)})),
    "another architecture": ("transformer.h.0", {}, lambda s: s.update(
        {f"base_model.model.transformer.h.0.attn.c_attn.lora_{x}.weight": torch.ones(3, 3) for x in "AB"})),
    "another tensor": ("lm_head", {}, lambda s: s.update({"base_model.model.lm_head.weight": torch.ones(3, 3)})),
    "a vector": ("shape", {}, lambda s: s.update({A: torch.ones(3)})),
    "integers": ("int64", {}, lambda s: s.update({A: torch.ones(3, 48, dtype=torch.int64)})),
    "no number": ("lora_alpha", {"lora_alpha": "6"}, None),
    "no rank": ("r", {"r": 0}, None),
    "a pattern that is none": ("alpha_pattern", {"alpha_pattern": {"[": 2}}, None),
    "a slow pattern": ("alpha_pattern", {"alpha_pattern": {"(.*)*x": 2}}, None),
    "patterns of another type": ("rank_pattern", {"rank_pattern": [1]}, None),
    "no targets": ("target_modules", {"target_modules": None}, None),
}  # fmt: skip


def drop(state: dict[str, Any], end: str) -> None:
    for name in [name for name in state if f".{end}." in name]:
        del state[name]


@pytest.mark.parametrize("name", BAD)
def test_a_folder_that_does_not_fit(name, llama, tmp_path):
    expected, settings, change = BAD[name]
    folder = write_adapter(tmp_path, llama, linears(llama), change=change or (lambda state: None))
    file = folder / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | settings))
    with pytest.raises(ValueError, match=expected):
        load_adapter(folder, from_huggingface(llama))


def test_a_folder_with_code_or_a_pickle(llama, folders, tmp_path):
    folder = write_adapter(tmp_path / "a", llama, linears(llama), auto_mapping={"base_model_class": "X"})
    (folder / "modeling.py").write_text("raise SystemExit('this ran')")
    (folder / "__init__.py").write_text("raise SystemExit('this ran')")
    load_adapter(folder, from_huggingface(llama))
    (folder / "adapter_model.safetensors").rename(folder / "elsewhere")
    torch.save({}, folder / "adapter_model.bin")
    with pytest.raises(ValueError, match=r"adapter_model\.safetensors.*code"):
        load_adapter(folder, from_huggingface(llama))
    save_file({}, folder / "adapter_model.safetensors")
    with pytest.raises(ValueError, match="none"):
        load_adapter(folder, from_huggingface(llama))
    (folder / "adapter_model.safetensors").write_bytes(b"\0" * 30)
    with pytest.raises(ValueError, match=r"adapter_model\.safetensors"):
        load_adapter(folder, from_huggingface(llama))
    with pytest.raises(ValueError, match=r"adapter_config\.json"):
        load_adapter(tmp_path / "missing", from_huggingface(llama))
