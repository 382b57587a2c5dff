"""Texts and pairs that a chat template writes, compared with sentence-transformers."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import fastformer
from tests.checks import assert_accurate
from tests.encoding.folders import D_MODEL, MANY
from tests.encoding.test_decoders import decoder

library = pytest.importorskip("sentence_transformers", reason="not installed: pip install sentence-transformers")

PAIRS = [("a bird sings", text) for text in MANY if text]
ANSWER = "{% if add_generation_prompt %}answer : {% if thinks %}slow{% endif %}{% endif %}"
# As in Qwen3-Reranker: the prompt, the query, the document, and the beginning of an answer.
FLAT = (
    "[CLS]{{ messages | selectattr('role', 'eq', 'system') | map(attribute='content') | first | default('the') }} "
    "query : {{ messages | selectattr('role', 'eq', 'query') | map(attribute='content') | first }} "
    "and {{ messages | selectattr('role', 'eq', 'document') | map(attribute='content') | first }} [SEP]" + ANSWER
)
PARTS = (
    "[CLS]{% for message in messages %}{{ message.role }} : {{ message.content[0].text }} [SEP]{% endfor %}" + ANSWER
)


def logit_score(*tokens: int) -> Any:
    from sentence_transformers.cross_encoder.modules import LogitScore

    return LogitScore(*tokens)


def rename_words(folder: Path, names: dict[str, str]) -> None:
    """Gives words of the vocabulary other names."""
    file = folder / "tokenizer.json"
    text = file.read_text()
    for old, new in names.items():
        text = text.replace(f'"{old}":', f'"{new}":')
    file.write_text(text)


def saved(
    folder: Path, task: str, behind: Any, template: str | None, kind: str = "Qwen3ForCausalLM", **options: Any
) -> Any:
    """Returns a model of sentence-transformers and the folder that it writes."""
    from sentence_transformers.base.modules import Transformer

    sizes = options.pop("sizes", {})
    decoder(folder / "plain", kind, (), **sizes)
    rename_words(folder / "plain", {"b": "0", "c": "4"})  # the texts by which sentence-transformers finds an ending
    if template is not None:
        (folder / "plain" / "chat_template.jinja").write_text(template)
    made = options.pop("makes", library.CrossEncoder)
    given = {name: options.pop(name) for name in ("prompts",) if name in options}
    parts = [Transformer(str(folder / "plain"), transformer_task=task, **options), behind]
    model = made(modules=parts, device="cpu", **given)
    model.save_pretrained(str(folder / "saved"))
    return model, folder / "saved"


def close(ours: Any, plain: Any, exact: Any) -> None:
    assert_accurate(torch.as_tensor(ours).float(), torch.as_tensor(plain).float(), torch.as_tensor(exact).double())


@pytest.mark.parametrize(
    ("max_len", "template", "variables"),
    [
        pytest.param(max_len, template, variables, marks=() if max_len == usual else pytest.mark.slow)
        for usual, template, variables in (
            (18, FLAT, {"add_generation_prompt": True, "thinks": True}),
            (24, FLAT, {}),
            (18, PARTS, {"add_generation_prompt": True}),
            (18, PARTS, {"add_generation_prompt": True, "restore_suffix": False}),
        )
        for max_len in (24, 18)
    ],
    ids=lambda value: value if isinstance(value, int) else "",
)
def test_a_generative_reranker_scores_pairs(
    template: str, variables: dict[str, Any], max_len: int, tmp_path: Path
) -> None:
    """Tests pairs with a prompt and without one, some of which are cut."""
    score = logit_score(8, 9)
    options = {"processing_kwargs": {"chat_template": variables}, "max_seq_length": max_len}
    plain, folder = saved(tmp_path, "text-generation", score, template, prompts={"web": "slow river"}, **options)
    exact, ours = copy.deepcopy(plain).double(), fastformer.CrossEncoder(folder)
    accelerated = fastformer.accelerate(copy.deepcopy(plain))
    for prompt in (None, "web"):
        due, wide, *results = (
            each.predict(PAIRS, prompt_name=prompt, activation_fn=torch.nn.Identity())
            for each in (plain, exact, ours, accelerated)
        )
        for result in results:
            close(result, due, wide)
    assert 0 < ours.num_cut < 2 * len(PAIRS) or max_len == 24
    again = pickle.loads(pickle.dumps(ours))
    np.testing.assert_array_equal(again.predict(PAIRS), ours.predict(PAIRS))


def test_an_embedder_writes_its_texts_as_messages(tmp_path: Path) -> None:
    from sentence_transformers.sentence_transformer.modules import Pooling

    options = {"processing_kwargs": {"chat_template": {"add_generation_prompt": True}}, "max_seq_length": 9}
    plain, folder = saved(
        tmp_path, "feature-extraction", Pooling(D_MODEL, "lasttoken"), PARTS, "Qwen3Model",
        makes=library.SentenceTransformer, prompts={"query": "slow river"}, **options,
    )  # fmt: skip
    exact, ours = copy.deepcopy(plain).double(), fastformer.Encoder(folder)
    for name in ("encode", "encode_query"):
        close(*(getattr(model, name)(MANY) for model in (ours, plain, exact)))


def test_a_language_model_without_modules_ranks_by_yes_and_no(tmp_path: Path) -> None:
    """Tests the folder of a reranker that transformers saved, with a template of the caller and without a template."""
    decoder(tmp_path, ends=())
    rename_words(tmp_path, {"birds": "yes", "hill": "no", "b": "0", "c": "4"})
    for template in (None, FLAT):
        options: dict[str, Any] = {} if template is None else {"processor_kwargs": {"chat_template": template}}
        plain = library.CrossEncoder(str(tmp_path), device="cpu", **options)
        exact, ours = copy.deepcopy(plain).double(), fastformer.CrossEncoder(tmp_path, chat_template=template)
        close(*(each.predict(PAIRS[:40]) for each in (ours, plain, exact)))
    (tmp_path / "chat_template.jinja").write_text("{{ messages[0].content }}")
    with pytest.raises(ValueError, match="document"):
        fastformer.CrossEncoder(tmp_path).predict(PAIRS)
    (tmp_path / "chat_template.jinja").write_text(FLAT + "{{ task }}")
    with pytest.raises(ValueError, match="task"):
        fastformer.CrossEncoder(tmp_path)
    rename_words(tmp_path, {"yes": "nay"})
    (tmp_path / "chat_template.jinja").unlink()
    with pytest.raises(ValueError, match="yes"):
        fastformer.CrossEncoder(tmp_path)


def test_logits_with_a_cap_are_compared_with_it(tmp_path: Path) -> None:
    sizes = {"final_logit_softcapping": 2.0, "tie_word_embeddings": True}
    plain, folder = saved(
        tmp_path, "text-generation", logit_score(8, 9), None, "Gemma2ForCausalLM", sizes=sizes,
        model_kwargs={"attn_implementation": "eager"},  # before 5.22 the usual one has no cap
    )  # fmt: skip
    activation, ours = torch.nn.Identity(), fastformer.CrossEncoder(folder)
    due = plain.predict(PAIRS, activation_fn=activation)  # in fp64, transformers' Gemma 2 computes NaN
    np.testing.assert_allclose(ours.predict(PAIRS, activation_fn=activation), due, rtol=1e-4, atol=1e-5)
