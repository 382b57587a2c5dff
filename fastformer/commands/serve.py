"""`fastformer serve`."""

from __future__ import annotations

import ipaddress
from dataclasses import fields
from typing import TYPE_CHECKING, Annotated, Any, get_type_hints

from jsonargparse import ArgumentParser

from fastformer.commands._options import add_options
from fastformer.generation.config import Precision
from fastformer.settings import Positive, Range, check_value, suggestion

if TYPE_CHECKING:
    from fastformer.serving.limits import Limits

# Of decoding, where a request doesn't say.
_OPTIONS = ("num_beams", "length_penalty", "repetition_penalty", "no_repeat_ngram_size")


def add_settings(parser: ArgumentParser) -> dict[str, Any]:
    """Gives the command's parser a flag for each limit, and those of decoding."""
    return {**_add_limits(parser), **add_options(parser, _OPTIONS)}


def serve(
    folder: str,
    *,
    host: str = "127.0.0.1",
    port: Annotated[int, Range(0, 65535)] = 8000,
    keys_file: str | None = None,
    no_auth: bool = False,
    metrics_public: bool = False,
    page_public: bool = False,
    origins: str | None = None,
    access_log: bool = True,
    device: str = "auto",
    precision: Precision | None = None,
    engine: str | None = None,
    source_lang: str | None = None,
    target_lang: str | None = None,
    max_batch_size: Positive | None = None,
    max_batch_bytes: Positive | None = None,
    config: str | None = None,
    **options: Any,
) -> None:
    """Serves a model over HTTP, to many clients at once.

    Which routes there are follows from the model: a translator has those of LibreTranslate and /v1/translate. A key, if
    there are any, comes as "Authorization: Bearer KEY"; keys stand in --keys_file or in the environment variable
    FASTFORMER_API_KEYS. SIGTERM lets what is under way end.

    Args:
        folder: of a run, or as transformers or sentence-transformers saves it
        host: the address to listen on; beyond this machine only with keys, or with --no_auth
        port: to listen on; 0 takes a free one
        keys_file: a file with the keys of clients, one a line
        no_auth: listen beyond this machine without keys
        metrics_public: answer /metrics without a key
        page_public: answer the page at / without a key, which asks for one itself
        origins: of web pages elsewhere whose scripts may use this server, separated by commas; * is all
        access_log: write a line of JSON for each request to standard error, without its texts
        device: auto (a GPU if there is one), cpu, cuda, cuda:1, ...
        precision: convert the weights to this; int8 and int4 are for a CPU; by default they stay as they were saved
        engine: how to decode; by default the fastest that can
        source_lang: the language of texts where a request doesn't say; of a model of one pair, its code
        target_lang: the language of translations, likewise
        max_batch_size: rows that are decoded together; by default 512, on a GPU 1,024
        max_batch_bytes: memory for the caches of those rows; by default 512 MiB, on a GPU a quarter of the free memory
        config: a YAML file with any of these flags, such as num_beams: 4; flags override it
        options: the limits, and the flags of decoding
    """
    flags = {name: value for name, value in locals().items() if name not in ("folder", "config", "options")}
    flags = _given(config, {**flags, **options})
    limits = _limits(flags)
    keys = _keys(flags["host"], flags["keys_file"], flags["no_auth"])

    from fastformer.devices import choose_device
    from fastformer.serving import make_app, open_service
    from fastformer.serving.run import Server

    service = open_service(
        folder,
        precision=flags["precision"],
        device=choose_device(flags["device"], flags["precision"]),
        engine=flags["engine"],
        limits=limits,
        options={name: flags[name] for name in _OPTIONS if name in flags},
        source_lang=flags["source_lang"],
        target_lang=flags["target_lang"],
        max_batch_size=flags["max_batch_size"],
        max_batch_bytes=flags["max_batch_bytes"],
    )
    app = make_app(
        service,
        keys=keys,
        metrics_public=flags["metrics_public"],
        page_public=flags["page_public"],
        origins=[origin.strip() for origin in (flags["origins"] or "").split(",") if origin.strip()],
        access_log=flags["access_log"],
    )
    Server(app, host=flags["host"], port=flags["port"]).run()


def _add_limits(parser: ArgumentParser) -> dict[str, Any]:
    from docstring_parser import parse as parse_docstring

    from fastformer.serving.limits import Limits

    hints = get_type_hints(Limits, include_extras=True)
    helps = {p.arg_name: " ".join((p.description or "").split()) for p in parse_docstring(Limits.__doc__ or "").params}
    for field in fields(Limits):
        parser.add_argument(f"--{field.name}", type=hints[field.name], default=field.default, help=helps[field.name])
    return hints


def _limits(flags: dict[str, Any]) -> Limits:
    from fastformer.serving.limits import Limits

    return Limits(**{field.name: flags[field.name] for field in fields(Limits) if field.name in flags})


def _given(path: str | None, flags: dict[str, Any]) -> dict[str, Any]:
    """The flags over what a YAML file says; a flag that has its default doesn't count as given.

    Raises:
        ValueError: no such file, no YAML, a name in it that is no flag, or a value of another type.
    """
    if path is None:
        return flags
    from fastformer.serving.limits import Limits
    from fastformer.training.yaml_file import read_yaml

    hints = {name: hint for name, hint in get_type_hints(serve, include_extras=True).items() if name in flags}
    hints |= get_type_hints(Limits, include_extras=True) | dict.fromkeys(_OPTIONS)
    values = read_yaml(path)
    for name, value in values.items():
        if name not in hints:
            raise ValueError(f"{path}: expected names of flags, got {name!r}{suggestion(name, hints)}")
        if name not in _OPTIONS:  # those are checked with the model
            check_value(f"{name} in {path}", value, hints[name])
    defaults = serve.__kwdefaults__ or {}
    return {**flags, **values, **{name: flag for name, flag in flags.items() if flag != defaults.get(name, _Missing)}}


class _Missing:
    """No flag is this."""


def _keys(host: str, file: str | None, no_auth: bool) -> tuple[str, ...]:
    """The keys of clients.

    Raises:
        ValueError: an address beyond this machine without keys; keys along with no_auth.
    """
    from fastformer.serving.gate import KEYS, read_keys

    keys = read_keys(file)
    if keys and no_auth:
        raise ValueError(f"expected keys or --no_auth, got both: the keys are those of --keys_file or {KEYS}")
    if not keys and not no_auth and not _is_loopback(host):
        raise ValueError(
            f"expected keys of clients before listening on {host}, which other machines can reach: give --keys_file or "
            f"the environment variable {KEYS}, or --no_auth to let everyone in"
        )
    return keys


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:  # a name
        return host.lower() == "localhost"
