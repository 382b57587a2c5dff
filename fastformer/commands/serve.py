"""`fastformer serve`."""

from __future__ import annotations

import ipaddress
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, fields
from typing import Annotated, Any, TypeVar, get_type_hints

from jsonargparse import ArgumentParser

from fastformer.commands._options import add_fields, add_options
from fastformer.generation.config import CacheDtype, GenerationConfig, Precision
from fastformer.settings import Positive, Range, check_settings, check_value, suggestion

# The decoding options that a request may override.
_OPTIONS = ("num_beams", "length_penalty", "repetition_penalty", "no_repeat_ngram_size", "prompt_lookup_num_tokens")
_Section = TypeVar("_Section")


@dataclass(frozen=True)
class Listening:
    """The address of the server, the clients that it accepts, and the computation of its model. Each field is a flag.

    Attributes:
        host: the address to listen on; beyond this machine only with keys, or with --no_auth
        port: the port to listen on; 0 uses a free one
        keys_file: a file with the keys of clients, one a line
        no_auth: listen beyond this machine without keys
        metrics_public: answer /metrics without a key
        page_public: serve the page at / without a key; the page asks for one itself
        origins: the origins of web pages whose scripts may use this server, separated by commas; * is all
        hosts: the names by which clients may call the server, separated by commas; * is all. By default all names, but
            only localhost and addresses on a server without keys that other machines can't reach
        access_log: write a line of JSON for each request to standard error, without its texts
        device: such as auto (a GPU if there is one), cpu, cuda or cuda:1
        precision: convert the weights to this (auto runs int8 and int4 on a CPU); by default they stay as they were
        engine: the decoding engine; by default the fastest that can decode the model
        cache_dtype: int8 rounds the keys and values of decoding, for half of their memory; see generate
        source_lang: the default language of texts; for a model of one pair of languages, its code
        target_lang: the default language of translations; for a model of one pair of languages, its code
        draft: the folder of a smaller language model with the same tokenizer, which drafts tokens for this one
        adapter: NAME=FOLDER, a LoRA adapter that requests choose as the model NAME; repeat the flag for several
        calibration: texts, one a line, or a .npy file of embeddings or of ranges (2, dim), from which an encoder rounds
            its embeddings for requests that ask for int8 or uint8
        max_batch_size: the most rows that are decoded together; by default 512, on a GPU 1,024
        max_batch_bytes: memory for the caches of those rows; by default 512 MiB, on a GPU a quarter of the free memory
    """

    host: str = "127.0.0.1"
    port: Annotated[int, Range(0, 65535)] = 8000
    keys_file: str | None = None
    no_auth: bool = False
    metrics_public: bool = False
    page_public: bool = False
    origins: str | None = None
    hosts: str | None = None
    access_log: bool = True
    device: str = "auto"
    precision: Precision | None = None
    engine: str | None = None
    cache_dtype: CacheDtype | None = None
    source_lang: str | None = None
    target_lang: str | None = None
    draft: str | None = None
    adapter: list[str] | None = None
    calibration: str | None = None
    max_batch_size: Positive | None = None
    max_batch_bytes: Positive | None = None

    def __post_init__(self) -> None:
        check_settings(self)


def add_settings(parser: ArgumentParser) -> dict[str, Any]:
    """Adds to the command's parser the flags of `Listening`, a flag for each limit, and those of decoding."""
    hints: dict[str, Any] = {}
    for section in _sections():
        hints |= add_fields(parser, section, [field.name for field in fields(section)])
    return hints | add_options(parser, _OPTIONS)


def serve(folder: str, *, config: str | None = None, **flags: Any) -> None:
    """Serves a model over HTTP, to many clients at once.

    The routes depend on the model: a translator has those of LibreTranslate and /v1/translate. If the server has keys,
    a request has one in the header "Authorization: Bearer KEY". The keys are in --keys_file or in the environment
    variable FASTFORMER_API_KEYS. On SIGTERM the server completes its running requests.

    Args:
        folder: a run folder, or a folder that transformers or sentence-transformers saved
        config: a YAML file with any of these flags, such as num_beams: 4; flags override it
        flags: the given flags: fields of `Listening` and `Limits`, and options of decoding
    """
    given = _given(config, flags)
    listening, limits = (_section(kind, given) for kind in _sections())
    keys = _keys(listening.host, listening.keys_file, listening.no_auth)

    from fastformer.serving import make_app, open_service
    from fastformer.serving.run import Server, bound

    sockets = bound(listening.host, listening.port)  # before the model, which may take minutes to load
    service = open_service(
        folder,
        precision=listening.precision,
        device=listening.device,
        engine=listening.engine,
        cache_dtype=listening.cache_dtype,
        limits=limits,
        options={name: given[name] for name in _OPTIONS if name in given},
        source_lang=listening.source_lang,
        target_lang=listening.target_lang,
        draft=listening.draft,
        adapters=_adapters(listening.adapter or ()),
        calibration=None if listening.calibration is None else _calibration(listening.calibration),
        max_batch_size=listening.max_batch_size,
        max_batch_bytes=listening.max_batch_bytes,
    )
    app = make_app(
        service,
        keys=keys,
        metrics_public=listening.metrics_public,
        page_public=listening.page_public,
        origins=_listed(listening.origins),
        hosts=_hosts(listening, keys),
        access_log=listening.access_log,
    )
    Server(app).run(sockets)


def _sections() -> tuple[type[Any], ...]:
    from fastformer.serving.limits import Limits

    return Listening, Limits


def _section(kind: type[_Section], given: Mapping[str, Any]) -> _Section:
    names = [field.name for field in fields(kind)]  # type: ignore[arg-type]
    return kind(**{name: given[name] for name in names if name in given})


def _hints() -> dict[str, Any]:
    """Returns the type of each flag, by its name."""
    of_options = get_type_hints(GenerationConfig, include_extras=True)
    hints = {name: hint for kind in _sections() for name, hint in get_type_hints(kind, include_extras=True).items()}
    return {**hints, **{name: of_options[name] for name in _OPTIONS}}


def _given(path: str | None, flags: dict[str, Any]) -> dict[str, Any]:
    """Returns the flags of the command line, merged over those of a YAML file.

    Raises:
        ValueError: the file does not exist, is no YAML, or has a name that is no flag or a value of another type.
    """
    hints = _hints()
    if path is None:
        _check_names(flags, hints)
        return flags
    from fastformer.training.yaml_file import read_yaml

    values = read_yaml(path)
    _check_names(values, hints, f"{path}: ")
    for name, value in values.items():
        check_value(f"{name} in {path}", value, hints[name])
    return _given(None, {**values, **flags})


def _check_names(names: Iterable[str], known: Collection[str], where: str = "") -> None:
    for name in names:
        if name not in known:
            raise ValueError(f"{where}expected names of flags, got {name!r}{suggestion(name, known)}")


def _keys(host: str, file: str | None, no_auth: bool) -> tuple[str, ...]:
    """Reads the clients' keys.

    Raises:
        ValueError: the host accepts other machines but there are no keys, or keys are given along with no_auth.
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


def _hosts(listening: Listening, keys: Collection[str]) -> list[str] | None:
    """Returns the names that requests may call; None: any.

    Without keys, a web page could read answers by a name of its own that it lets point to this machine.
    """
    if listening.hosts is None:
        return None if keys or not _is_loopback(listening.host) else []
    names = _listed(listening.hosts)
    return None if "*" in names else names


def _adapters(given: Iterable[str]) -> dict[str, str]:
    """Returns the folders of adapters by their names."""
    folders: dict[str, str] = {}
    for one in given:
        name, _, folder = one.partition("=")
        if not name or not folder:
            raise ValueError(f"expected --adapter NAME=FOLDER, got {one!r}")
        if name in folders:
            raise ValueError(f"expected each --adapter under a name of its own, got {name!r} twice")
        folders[name] = folder
    return folders


def _calibration(file: str) -> Any:
    """Returns the texts of a file, or the array of a .npy file.

    Raises:
        ValueError: the file doesn't exist, is damaged or empty, or has a bad line.
    """
    import tokenize
    import zipfile

    import numpy as np

    from fastformer.commands._lines import good_lines

    if not file.endswith(".npy"):
        return good_lines(file)
    try:
        array = np.load(file, allow_pickle=False)
        if not isinstance(array, np.ndarray):
            array.close()
            raise ValueError("it has several arrays, as an .npz file")
        return array
    except (OSError, ValueError, EOFError, zipfile.BadZipFile, tokenize.TokenError) as error:
        raise ValueError(f"expected --calibration as a .npy file of embeddings or ranges: {file}: {error}") from error


def _listed(text: str | None) -> list[str]:
    return [one.strip() for one in (text or "").split(",") if one.strip()]


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:  # a host name
        return host.lower() == "localhost"
