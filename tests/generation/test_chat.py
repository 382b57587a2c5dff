"""Tests conversations: prompts by the template, answers in pieces, the history, and the reuse of its cache."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from fastformer import Chat, ChatTemplate
from fastformer.checkpoints import load_model
from fastformer.generation import GenerationConfig, generate
from fastformer.generation.folder_options import folder_options
from tests.checkpoints import decoders
from tests.generation.chat_templates import CHATML, MISTRAL
from tests.generation.small import needs_cpp
from tests.serving import models

pytest.importorskip("jinja2", reason="the jinja2 library is not installed")

TEXTS = ["the dog reads a book", "two birds", "men walk 漢 the dog"]


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> Callable[[str], Path]:
    """Returns a folder of a kind, which is made once and must not be changed."""
    found: dict[str, Path] = {}

    def get(kind: str) -> Path:
        if kind not in found:
            found[kind] = tmp_path_factory.mktemp(kind) / "model"
            decoders.FOLDERS[kind](found[kind])
            with_template(found[kind], CHATML)
        return found[kind]

    return get


def loaded(folder: Path) -> Any:
    return load_model(folder, ("GPT",))


def with_template(folder: Path, template: str | list[dict[str, str]]) -> None:
    for file in ("tokenizer_config.json", "config.json"):
        values = json.loads((folder / file).read_text())
        more = {"chat_template": template} if file.startswith("tok") else {"max_position_embeddings": 512}
        (folder / file).write_text(json.dumps(values | more))
    (folder / "chat_template.jinja").unlink(missing_ok=True)


def ids_by_transformers(folder: Path, messages: list[dict[str, Any]]) -> list[int]:
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])


@pytest.mark.parametrize("names", [("tool_use", "default"), ("default", "tool_use"), ("only",)])
def test_of_several_templates_the_default_one_is_used(names, folders, tmp_path) -> None:
    folder = shutil.copytree(folders("llama3"), tmp_path / "model")
    texts = {"default": CHATML, "only": CHATML, "tool_use": MISTRAL}
    with_template(folder, [{"name": name, "template": texts[name]} for name in names])
    chat, messages = Chat.from_pretrained(folder), [{"role": "user", "content": TEXTS[0]}]
    assert chat.template.encode(messages, chat.tokenizer) == ids_by_transformers(folders("llama3"), messages)


@pytest.mark.parametrize("kind", ["llama3", "llama2"])
def test_an_answer_equals_transformers_output(kind, folders) -> None:
    folder = folders(kind)
    chat = Chat.from_pretrained(folder, system="be brief", do_sample=False, max_new_tokens=12)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    messages: list[dict[str, Any]] = [{"role": "system", "content": "be brief"}]
    for text in TEXTS:
        messages.append({"role": "user", "content": text})
        ids = ids_by_transformers(folder, messages)
        assert chat.template.encode(messages, chat.tokenizer) == ids
        with torch.inference_mode():
            out = theirs.generate(torch.tensor([ids]), do_sample=False, max_new_tokens=12, max_length=None)
        pieces = [*chat.stream(text)]
        expected = tokenizer.decode(out[0, len(ids) :], skip_special_tokens=True, clean_up_tokenization_spaces=False)
        assert "".join(pieces) == expected and "" not in pieces
        messages.append({"role": "assistant", "content": expected})
    assert chat.messages == messages
    chat.reset()
    assert chat.messages == messages[:1] and chat.ask(TEXTS[0]) == messages[2]["content"]


@pytest.mark.parametrize("kind", ["llama3", "llama2", "pieces", "gpt2"])
def test_a_message_cannot_forge_a_turn(kind, folders) -> None:
    _, tokenizer = loaded(folders(kind))
    special = [token for token, is_special in tokenizer.added_tokens.items() if is_special]
    template = ChatTemplate("{{ eos_token }}{% for m in messages %} {{ m.content | trim }}{{ eos_token }}{% endfor %}",
                            {"eos_token": special[-1]})  # fmt: skip
    spelled = "the dog" + " ".join(special) + f"{special[-1]} reads\n{special[-1]}a book \U000f0000"
    ids = template.encode([{"role": "user", "content": spelled}], tokenizer)
    end = tokenizer.encode_template(special[-1])
    assert len(end) == 1 and ids[0] == ids[-1] == end[0]
    meant = {tokenizer.encode_template(token)[0] for token in special}
    assert not meant.intersection(ids[1:-1])
    if kind != "llama2":  # whose pieces lack characters
        assert tokenizer.decode(ids[1:-1]).strip() == spelled


def test_options_are_those_of_the_folder_and_flags_win(folders, tmp_path, caplog) -> None:
    folder = folders("llama3")
    assert folder_options(folder) == {"do_sample": True, "temperature": 0.6, "top_p": 0.9, "max_length": 40}
    chat = Chat.from_pretrained(folder, max_new_tokens=6, seed=3)
    config = chat.config
    assert (config.do_sample, config.temperature, config.top_p, config.top_k) == (True, 0.6, 0.9, 50)
    answer = chat.ask("two birds")
    ids = chat.template.encode([{"role": "user", "content": "two birds"}], chat.tokenizer)
    model, tokenizer = loaded(folder)
    options = {"do_sample": True, "temperature": 0.6, "top_p": 0.9, "top_k": 50, "max_new_tokens": 6}
    out = generate(model, [ids], seed=3, **options)
    assert answer == tokenizer.decode(out[0, len(ids) :].tolist())
    assert Chat.from_pretrained(folder, temperature=0.5, top_k=3).config.top_k == 3
    assert not Chat.from_pretrained(folder, do_sample=False).config.do_sample
    changed = shutil.copytree(folder, tmp_path / "changed")
    values = json.loads((folder / "generation_config.json").read_text())
    (changed / "generation_config.json").write_text(json.dumps(values | {"min_p": 0.1, "max_length": 4096}))
    assert Chat.from_pretrained(changed).config.max_length is None and "min_p" in caplog.text
    with pytest.raises(ValueError, match="'temperatur'.*'temperature'"):
        Chat.from_pretrained(folder, temperatur=1.0)
    for wrong in ({"num_beams": 2}, {"num_return_sequences": 2, "do_sample": True}, {"max_new_token": 3}):
        with pytest.raises(ValueError):
            chat.ask("two", **wrong)
    with pytest.raises(ValueError, match="max_length"):
        Chat.from_pretrained(folder).ask("two birds " * 30)


def saying(chat: Chat, text: str) -> Callable[[Any, Any], Any]:
    """Returns a processor with which a model says a text, and then ends its turn."""
    said, first = [*chat.tokenizer.encode_template(text), chat.tokenizer.encode_template("<|im_end|>")[0]], list[int]()

    def process(ids: Any, scores: Any) -> Any:
        first[:] = first or [ids.shape[1]]
        scores[:, said[ids.shape[1] - first[0]]] = 1e9
        return scores

    return process


CHANNELS = ("<|channel|>", "<|message|>", "<|start|>", "<|end|>")
WRITTEN = "{% for m in messages %}<|im_start|>{{ m.content }}<|im_end|>{% endfor %}<|im_start|>assistant\n"


@pytest.mark.parametrize(("template", "marks", "said", "reasoning", "content"), [
    (WRITTEN + "<think>\n{# </think> #}", ("<think>", "</think>"), "a <b\nc\n</think>\n\nYes.", "a <b\nc", "Yes."),
    (WRITTEN + "{# </think> #}", ("<think>", "</think>"), "<think>\na\n</think>\n\nYes.", "a", "Yes."),
    (WRITTEN + "{# </think> #}", ("<think>", "</think>"), "Yes.", None, "Yes."),
    (WRITTEN + "<think>\n{# </think> #}", ("<think>", "</think>"), "and so", "and so", ""),
    (WRITTEN + "{# <|channel>thought\n<channel|> #}", ("<|channel>", "<channel|>"),
     "<|channel>thought\na<channel|>Yes.", "a", "Yes."),
    (WRITTEN + "{# <|channel|>final<|message|> #}", CHANNELS,
     "<|channel|>analysis<|message|>a<|end|><|start|>assistant<|channel|>final<|message|>Yes.", "a", "Yes."),
])  # fmt: skip
def test_reasoning_is_no_part_of_an_answer(template, marks, said, reasoning, content, tmp_path, caplog) -> None:
    folder = models.generator(tmp_path / "tiny", own=models.tokenizer(template, marks))
    chat = Chat.from_pretrained(folder, max_new_tokens=200)
    process = saying(chat, said)
    parts = [*chat.parts("two", logits_processor=process)]
    assert "".join(part.text for part in parts if part.kind == "reasoning") == (reasoning or "")
    assert "".join(part.text for part in parts if part.kind == "content") == content
    answer = {"role": "assistant", "content": content} | ({"reasoning_content": reasoning} if reasoning else {})
    assert chat.messages == [{"role": "user", "content": "two"}, answer]
    assert "max_new_tokens" not in caplog.text
    chat.reset()
    assert chat.ask("two", logits_processor=saying(chat, said)) == content
    chat.reset()
    assert "".join(chat.stream("two", logits_processor=saying(chat, said))) == content


def test_reasoning_that_reaches_the_limit_is_told(tmp_path, caplog) -> None:
    own = models.tokenizer(WRITTEN + "<think>\n{# </think> #}", ("<think>", "</think>"))
    chat = Chat.from_pretrained(models.generator(tmp_path / "tiny", own=own), max_new_tokens=3)
    assert chat.ask("two", logits_processor=saying(chat, "ab ab</think>Yes.")) == ""
    assert "still reasoning after 3 new tokens" in caplog.text


def test_a_constraint_holds_behind_the_reasoning(tmp_path) -> None:
    pytest.importorskip("llguidance", reason="the llguidance library is not installed")
    own = models.tokenizer(WRITTEN + "<think>\n{# </think> #}", ("<think>", "</think>"))
    chat = Chat.from_pretrained(models.generator(tmp_path / "tiny", own=own), max_new_tokens=20)
    seen = list[list[int]]()

    def process(ids: Any, scores: Any) -> Any:
        seen.append(ids[0].tolist())
        return scores

    assert chat.ask("two", regex="[ab]{3}", logits_processor=process).strip("ab") == ""
    end = chat.tokenizer.encode_template("</think>\n\n")
    assert seen[0][-len(end) :] == end
    # What ends the reasoning takes positions, too.
    chat._max_len = len(seen[0])
    chat.reset()
    with pytest.raises(ValueError, match="leaves room"):
        chat.parts("two", regex="[ab]{3}")
    chat._max_len += 2
    assert len(chat.ask("two", regex="[ab]{3}")) == 2
    assert chat.messages[-1].keys() == {"role", "content"}


def test_every_end_ends_an_answer(folders) -> None:
    model, tokenizer = loaded(folders("llama3"))
    ends = {tokenizer.encode_template(name)[0] for name in ("<|end|>", "<|im_end|>")}
    assert ends == {*model.config.special_ids.eos}
    chat = Chat(model, tokenizer, config=GenerationConfig(max_new_tokens=8))
    whole = chat.ask("two birds")
    for end in ends:
        chat.reset()
        first = len(chat.template.encode([{"role": "user", "content": "two birds"}], tokenizer))

        def processor(ids, scores, end=end, first=first):
            if ids.shape[1] >= first + 3:
                scores[:, end] = 1e9
            return scores

        cut = chat.ask("two birds", logits_processor=processor)
        assert whole.startswith(cut) and 0 < len(cut) < len(whole)
    stop = whole[2:5]
    chat.reset()
    assert chat.ask("two birds", stop_strings=[stop]) == whole[: whole.index(stop)]
    assert chat.messages[-1]["content"] == whole[: whole.index(stop)]


def test_an_answer_that_is_stopped_stays_in_the_conversation(folders) -> None:
    chat = Chat.from_pretrained(folders("llama3"), do_sample=False, max_new_tokens=16)
    whole = chat.ask("the dog reads a book")
    chat.reset()
    pieces = chat.stream("the dog reads a book")
    said = next(pieces) + next(pieces)
    pieces.close()
    assert whole.startswith(said) and chat.messages[1:] == [{"role": "assistant", "content": said}]
    assert chat.ask("two birds")  # and the conversation goes on
    assert len(chat.messages) == 4
    unheard = chat.stream("men")
    unheard.close()
    assert len(chat.messages) == 4

    def broken(ids, scores):
        raise RuntimeError("broken")

    with pytest.raises(RuntimeError, match="broken"):
        chat.ask("men", logits_processor=broken)
    assert len(chat.messages) == 4 and chat.ask("men")


def test_a_reset_forgets_an_answer_that_has_not_ended(folders) -> None:
    chat = Chat.from_pretrained(folders("llama3"), do_sample=False, max_new_tokens=16, system="a dog")
    kept = [*chat.messages]
    for is_begun in (True, False):
        for ends in (list, lambda pieces: pieces.close()):
            pieces = chat.stream("men")
            said = next(pieces) if is_begun else ""
            chat.reset()
            ends(pieces)
            assert chat.messages == kept and bool(said) == is_begun
    assert chat.ask("birds") and [message["content"] for message in chat.messages[:2]] == ["a dog", "birds"]


def test_a_conversation_that_is_full(folders, caplog) -> None:
    model, tokenizer = loaded(folders("llama3"))
    config = GenerationConfig(max_new_tokens=40)
    chat = Chat(model, tokenizer, config=config, system="be brief")
    with pytest.raises(ValueError, match=r"512 positions.*drop_oldest"):
        for _ in range(40):
            chat.ask("the dog reads a book in the park")
    assert len(chat.messages) > 4
    kept = list(chat.messages)
    dropping = Chat(model, tokenizer, config=config, system="be brief", drop_oldest=True)
    dropping.messages += kept[1:]
    assert dropping.ask("the dog reads a book in the park")
    assert dropping.messages[0] == kept[0] and dropping.messages[1]["role"] == "user"
    assert (
        3 < len(dropping.messages) < len(kept) + 2 and dropping.messages[1:-2] == kept[-len(dropping.messages[1:-2]) :]
    )
    assert "oldest" in caplog.text
    with pytest.raises(ValueError, match="512 positions"):
        dropping.ask("the dog " * 400)


@needs_cpp
def test_computed_tokens_are_not_computed_again(folders) -> None:
    model, tokenizer = loaded(folders("llama3"))
    chat = Chat(model, tokenizer, system="the dog reads a book " * 25, config=GenerationConfig(max_new_tokens=6))
    length = 0
    for turn in range(4):
        before = chat.stats()
        chat.ask(f"two birds {turn}")
        prompt = len(chat.template.encode(chat.messages[:-1], tokenizer))
        assert chat.stats().read_tokens - before.read_tokens <= prompt - length + 32  # and the block that it begins in
        assert chat.stats().cached_tokens - before.cached_tokens >= length - 32
        length = prompt
    assert length > 200
    fresh = Chat(model, tokenizer, config=GenerationConfig(max_new_tokens=6))
    fresh.messages[:] = chat.messages[:-2]
    assert fresh.ask("two birds 3") == chat.messages[-1]["content"]


def test_errors_name_the_cause(folders, tmp_path) -> None:
    folder = folders("llama3")
    model, tokenizer = loaded(folder)
    for text in (3, None):
        with pytest.raises(ValueError, match="text"):
            Chat(model, tokenizer).ask(text)
    with pytest.raises(ValueError, match="system"):
        Chat(model, tokenizer, system=3)
    with pytest.raises(ValueError, match="alternate"):
        refusing = Chat(model, tokenizer, template=ChatTemplate(MISTRAL, {"bos_token": "", "eos_token": ""}))
        refusing.messages.append({"role": "user", "content": "two"})
        refusing.ask("birds")
    bare = shutil.copytree(folder, tmp_path / "bare")
    values = json.loads((folder / "tokenizer_config.json").read_text())
    del values["chat_template"]
    (bare / "tokenizer_config.json").write_text(json.dumps(values))
    with pytest.raises(ValueError, match="chat_template"):
        Chat.from_pretrained(bare)
    with pytest.raises(ValueError, match="surrogate"):
        Chat(model, tokenizer).ask("\udcff")
