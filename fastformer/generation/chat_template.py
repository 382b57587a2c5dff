"""`ChatTemplate`: converts the messages of a chat to the text and ids that a model was trained to continue."""

from __future__ import annotations

import functools
import unicodedata
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

if TYPE_CHECKING:
    import jinja2

    from fastformer.generation.chat_text import Text

Message: TypeAlias = Mapping[str, Any]  # "role" and "content", and any other keys that a template reads

_MAX_SOURCE = 1_000_000  # characters in a template
_MAX_DEPTH = 50  # levels of nesting in a message
# The roles of a message that a template may write into a control token, as in "<|user|>". Others are a message's text.
_ROLES = (
    "assistant", "context", "developer", "document", "environment", "function", "ipython", "model", "observation",
    "system", "tool", "tool_call", "tool_response", "user",
)  # fmt: skip


class TemplateTokenizer(Protocol):
    """The tokenizer methods that a template uses; the tokenizers of language models' folders have them."""

    @property
    def chat(self) -> Mapping[str, str]:
        """The template, and the special tokens by the names that it uses; see `data.tokenizer.CHAT_NAMES`."""

    @property
    def added_tokens(self) -> Mapping[str, bool]:
        """The tokens that are recognised as a whole in a text, and whether each of them is special."""

    def encode_template(
        self, text: str, written: bytes | None = None, controls: frozenset[str] = frozenset()
    ) -> list[int]:
        """Returns the ids of a text, without adding BOS.

        Args:
            text: the text.
            written: for each character 1 if the template wrote it, else 0; None: it wrote all of them.
            controls: the added tokens that only characters of the template can spell.
        """


class ChatTemplate:
    """A chat template: a jinja2 program that comes with a model, and writes the messages of a chat as its prompt.

        template = ChatTemplate.of(tokenizer)
        text = template.render([{"role": "user", "content": "Hello!"}])
        ids = template.encode([{"role": "user", "content": "Hello!"}], tokenizer)

    The result is the same as that of transformers' `apply_chat_template`. The template runs in jinja2's sandbox, with
    bounds on time and memory (`chat_sandbox`): it can read only its arguments, and can't run for ever.

    Args:
        source: the template.
        tokens: the special tokens, by the names that the template uses: "bos_token", ...
        name: the name of the template in messages.

    Raises:
        ImportError: jinja2 is not installed.
        ValueError: the source isn't a text, is very long, or isn't a valid jinja2 template.
    """

    def __init__(
        self, source: str, tokens: Mapping[str, str] | None = None, *, name: str = "the chat template"
    ) -> None:
        if not isinstance(source, str) or len(source) > _MAX_SOURCE:
            got = f"{len(source):,} characters" if isinstance(source, str) else type(source).__name__
            raise ValueError(f"expected {name} to be a text of at most {_MAX_SOURCE:,} characters, got {got}")
        try:
            from fastformer.generation.chat_sandbox import Sandbox
        except ImportError as error:
            raise ImportError("chat templates need the jinja2 library: pip install 'fastformer[chat]'") from error
        self.source, self.tokens, self._name = source, dict(tokens or {}), name
        self._sandbox = Sandbox()
        self._template: jinja2.Template = self._guarded(lambda: self._sandbox.from_string(source))
        self._names: dict[str, Text] | None = None  # the special tokens as texts of the template
        self._controls: dict[frozenset[tuple[str, bool]], frozenset[str]] = {}

    def __reduce__(self) -> Any:
        return functools.partial(type(self), name=self._name), (self.source, self.tokens)

    @classmethod
    def of(cls, tokenizer: TemplateTokenizer) -> ChatTemplate:
        """Returns the template from the folder of a tokenizer.

        Raises:
            ImportError, ValueError: see the class; or the tokenizer has no template.
        """
        chat = getattr(tokenizer, "chat", None) or {}
        if "chat_template" not in chat:
            raise ValueError(
                "expected a model that was trained to chat, whose folder has a chat_template, got one without: see "
                "`fastformer generate`"
            )
        return cls(chat["chat_template"], {name: text for name, text in chat.items() if name != "chat_template"})

    def reads(self, name: str) -> bool:
        """Returns whether the template reads a variable of this name that it doesn't define itself."""
        from jinja2 import meta

        return name in meta.find_undeclared_variables(self._sandbox.parse(self.source))

    def render(
        self,
        messages: Iterable[Message],
        tools: Sequence[Mapping[str, Any]] | None = None,
        *,
        add_generation_prompt: bool = True,
        **variables: Any,
    ) -> str:
        """Renders a chat as text.

        Args:
            messages: mappings of strings, numbers, lists and mappings: {"role": "user", "content": "Hello!"}.
            tools: JSON schemas of functions that the model may call.
            add_generation_prompt: end with the beginning of an answer, which the model continues.
            variables: other variables that the template reads, such as documents or enable_thinking.

        Raises:
            ValueError: an item isn't a message; the template refuses the messages, fails, or exceeds a bound.
        """
        return str.__str__(self._render(messages, tools, add_generation_prompt=add_generation_prompt, **variables))

    def _render(
        self,
        messages: Iterable[Message],
        tools: Sequence[Mapping[str, Any]] | None,
        *,
        add_generation_prompt: bool,
        **variables: Any,
    ) -> Text:
        from fastformer.generation.chat_text import Text, as_texts

        values = as_texts(_plain(list(messages), "messages"))
        for place, message in enumerate(values):
            if not isinstance(message, dict):
                raise ValueError(f"expected messages[{place}] to be a mapping, got {message!r:.60}")
            if (role := message.get("role")) in _ROLES:
                message["role"] = Text.written(role)
            if (calls := message.get("tool_calls")) and (told := self._unread(calls)) is not None:
                begin, listed, end = told
                message["content"] = Text.written(begin) + listed + Text.written(end) + (message.get("content") or "")
        if self._names is None:
            self._names = {name: Text.written(token) for name, token in self.tokens.items()}
        given = {
            "tools": as_texts(_plain(tools, "tools")) if tools is not None else None,
            "documents": None,
            **(as_texts(_plain(variables, "variables")) if variables else {}),
        }
        names = {**self._names, "messages": values, "add_generation_prompt": bool(add_generation_prompt), **given}
        text: Text = self._guarded(lambda: self._sandbox.render(self._template, names))
        return text

    def _unread(self, calls: Sequence[Any]) -> tuple[str, str, str] | None:
        from fastformer.generation.tool_formats import unread_calls

        try:
            return unread_calls(self.source, calls)
        except (AttributeError, KeyError, TypeError) as error:
            raise ValueError(
                f"expected calls with the name and the arguments of a function, got {calls!r:.80}"
            ) from error

    def encode(
        self,
        messages: Iterable[Message],
        tokenizer: TemplateTokenizer,
        tools: Sequence[Mapping[str, Any]] | None = None,
        *,
        add_generation_prompt: bool = True,
        **variables: Any,
    ) -> list[int]:
        """Encodes a chat: control tokens that the template writes become their ids, and all messages become text.

        Control tokens are the special tokens, and other added tokens that the template writes to mark turns. Whatever
        the template does with a message, and whatever the tokenizer's normaliser does then, no character of a message
        becomes a part of a control token: a message can't end its turn and begin another. transformers encodes a
        message that spells a control token as the token.

        A role that templates know, such as "user", may be a part of a control token; any other is a message's text, as
        are the variables, which a template may print.

        Args:
            tokenizer: the tokenizer of the model.
            messages, tools, add_generation_prompt, variables: see `render`.

        Raises:
            ValueError: see `render`; or the tokenizer can't encode the text.
        """
        from fastformer.generation.chat_text import mask_of

        text = self._render(messages, tools, add_generation_prompt=add_generation_prompt, **variables)
        return tokenizer.encode_template(str.__str__(text), mask_of(text), self._controls_of(tokenizer))

    def _controls_of(self, tokenizer: TemplateTokenizer) -> frozenset[str]:
        """Returns the added tokens of a tokenizer that only the template can write."""
        known = frozenset(tokenizer.added_tokens.items())
        if known not in self._controls:
            named, literals = {*self.tokens.values()}, _folded("\0".join(self._sandbox.literals))
            self._controls[known] = frozenset(
                token for token, is_special in known if is_special or token in named or _writes(literals, token)
            )
        return self._controls[known]

    def end_ids(self, tokenizer: TemplateTokenizer, own: tuple[int, ...]) -> tuple[int, ...]:
        """Returns the ids that end an answer: the model's own, and the tokenizer's eos_token, if it is one token."""
        name = self.tokens.get("eos_token")
        ids = [] if name is None else tokenizer.encode_template(name)
        return tuple(dict.fromkeys((*own, *ids))) if len(ids) == 1 else own

    def _guarded(self, run: Callable[[], Any]) -> Any:
        """Runs jinja2. Its errors become a ValueError with one line that names the problem in the template."""
        import jinja2

        from fastformer.generation.chat_sandbox import TemplateRefusal
        from fastformer.generation.chat_text import BoundExceeded

        try:
            return run()
        except TemplateRefusal as error:
            raise ValueError(f"{self._name} refuses these messages: {error}") from error
        except jinja2.TemplateSyntaxError as error:
            raise ValueError(f"{self._name} is not a jinja2 template: {error.message} (line {error.lineno})") from error
        except BoundExceeded as error:
            raise ValueError(f"{self._name} was stopped: {error}") from error
        except RecursionError as error:
            raise ValueError(f"{self._name} was stopped: it calls itself too often") from error
        except Exception as error:  # a template may raise anything
            raise ValueError(f"{self._name} fails with these messages: {type(error).__name__}: {error}") from error


def _plain(value: Any, name: str, depth: int = 0) -> Any:
    """Copies JSON-like values, so that subclasses with methods of their own become Python's own types.

    Raises:
        ValueError: a value of another type, or too many levels.
    """
    if depth > _MAX_DEPTH:
        raise ValueError(f"expected {name} of at most {_MAX_DEPTH} levels, got more")
    if value is None or isinstance(value, bool):
        return value
    for kind in (str, int, float):
        if isinstance(value, kind):
            return kind.__str__(value) if kind is str else kind(value)
    if isinstance(value, Mapping):
        return {str(key): _plain(item, name, depth + 1) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item, name, depth + 1) for item in value]
    raise ValueError(f"expected {name} of strings, numbers, lists and mappings, got {type(value).__name__}")


def _folded(text: str) -> str:
    return unicodedata.normalize("NFKC", text).casefold()


def _writes(literals: str, token: str) -> bool:
    """Returns whether a template's literals spell a token that isn't a word or white space, with any role in it."""
    token = _folded(token)
    if not token.strip() or token.isalnum():
        return False
    ends = (token.split(role, 1) for role in _ROLES if role in token)
    return token in literals or any(begin and end and begin in literals and end in literals for begin, end in ends)
