"""The command `fastformer`: train, translate, generate, average, demo, doctor."""

from __future__ import annotations

import argparse
import functools
import logging
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, get_type_hints

SEARCH_FLAGS = (
    ("--num_beams", int, 1, "hypotheses that are followed; 1 is greedy"),
    ("--length_penalty", float, 0.6, "alpha of ((5 + length) / 6) ** alpha, for beams"),
    ("--max_new_tokens", int, None, "the longest output; by default the source's length + 100"),
    ("--repetition_penalty", float, 1.0, "above 1 discourages tokens that were there"),
    ("--no_repeat_ngram_size", int, 0, "no n-gram comes twice"),
)
SAMPLING_FLAGS = (
    ("--temperature", float, 1.0, "below 1 sharpens the distribution"),
    ("--top_k", int, 0, "draw from the k best tokens; 0 = all"),
    ("--top_p", float, 1.0, "draw from the smallest set that holds this probability"),
    ("--seed", int, None, "of the sampling"),
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command. Returns the exit code: 0, 1 for a user's error, 2 for a wrong flag, 130 after Ctrl-C."""
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stderr)
    words = [_underscored(word) for word in (sys.argv[1:] if arguments is None else arguments)]
    try:
        parser, parsers = _parsers()
        try:
            args = parser.parse_args(words)
        except argparse.ArgumentError as error:
            print(f"fastformer: {_explained(str(error), words, parsers)}", file=sys.stderr)
            return 2
        command = args.subcommand
        if command == "train":  # a flag that is given, be it as its default, wins over the YAML file
            args[command].given = parser.parse_args(words, defaults=False)[command]
        return COMMANDS[command](args[command])
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:  # `fastformer translate | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except (ValueError, OSError, RuntimeError, ImportError) as error:
        print(f"fastformer: {error}", file=sys.stderr)
        return 1


def _underscored(word: str) -> str:
    """--max-steps is --max_steps."""
    name, equals, value = word.partition("=")
    return "--" + name[2:].replace("-", "_") + equals + value if word.startswith("--") else word


def _explained(message: str, words: Sequence[str], parsers: dict[str, Any]) -> str:
    """What is wrong with the flags, with the nearest one that exists."""
    from fastformer.training.config import suggestion

    command = next((word for word in words if word in parsers), None)
    if command is None:
        return f"{message}{suggestion(words[0], parsers) if words else ''}; see `fastformer --help`"
    wrong = next((word for word in message.split() if word.startswith("--")), None)
    known = [option for action in parsers[command]._actions for option in action.option_strings]
    hint = suggestion(wrong.partition("=")[0], known) if wrong else ""
    return f"{message}{hint}; see `fastformer {command} --help`"


def _parsers() -> tuple[Any, dict[str, Any]]:
    """The parser, and that of each command."""
    try:
        from jsonargparse import ArgumentParser
    except ImportError as error:
        raise ImportError("the command needs jsonargparse: pip install 'fastformer[train]'") from error
    from fastformer.training.config import TrainConfig, descriptions

    make = functools.partial(ArgumentParser, exit_on_error=False)
    train = make(description="Trains on text files or on the built-in task; writes a run folder.")
    train.add_argument("run", type=str, help="the run folder")
    train.add_argument("--config", type=str, default=None, help="a YAML file with settings; flags override it")
    train.add_argument("--resume", action="store_true", help="go on with the run in the folder")
    types, texts = get_type_hints(TrainConfig), descriptions()
    for name, default in TrainConfig().to_dict().items():
        train.add_argument(f"--{name}", type=types[name], default=default, help=texts[name])

    translate = make(description="Translates a text, a file, or standard input line by line.")
    translate.add_argument("run", type=str, help="the run folder")
    translate.add_argument("text", type=str, nargs="?", default=None, help="what to translate")
    translate.add_argument("--file", type=str, default=None, help="a UTF-8 file, one sentence a line")
    translate.add_argument("--reference", type=str, default=None, help="its right translations: prints BLEU and chrF")
    translate.add_argument("--attention", type=str, default=None, help="draw what the translation looked at, as a PNG")
    _add(translate, SEARCH_FLAGS)

    generate = make(description="Continues a prompt with a language model.")
    generate.add_argument("run", type=str, help="the run folder")
    generate.add_argument("prompt", type=str, help="the text to continue")
    generate.add_argument("--greedy", action="store_true", help="the best token always, no sampling")
    _add(generate, SEARCH_FLAGS + SAMPLING_FLAGS)

    average = make(description="Averages the weights of a run's last checkpoints into its model.")
    average.add_argument("run", type=str, help="the run folder")
    average.add_argument("--last", type=int, default=5, help="how many checkpoints")

    demo = make(description="Trains a number translator on this machine and shows it.")
    demo.add_argument("--out", type=str, default="demo", help="the run folder; replaced if it is there")
    demo.add_argument("--seed", type=int, default=0, help="of data, weights and order")

    doctor = make(description="Versions, and which backend each op gets and why.")

    parsers = dict(zip(COMMANDS, (train, translate, generate, average, demo, doctor), strict=True))
    parser = make(prog="fastformer", description="Train, translate and measure fast Transformers.")
    commands = parser.add_subcommands()
    for name, command in parsers.items():
        commands.add_subcommand(name, command, help=command.description)
    return parser, parsers


def _add(parser: Any, flags: tuple) -> None:
    for name, kind, default, text in flags:
        parser.add_argument(name, type=kind if default is not None else kind | None, default=default, help=text)


def _chosen(args: Any, flags: tuple) -> dict[str, Any]:
    return {flag[0].removeprefix("--"): args[flag[0].removeprefix("--")] for flag in flags}


def _train(args: Any) -> int:
    from fastformer.training.build import changed_config, read_yaml, start
    from fastformer.training.config import TrainConfig

    values = read_yaml(args.config) if args.config else {}
    TrainConfig.from_dict(values)  # its mistakes are the file's, before flags hide them
    flags = {name: value for name, value in vars(args.given).items() if name in TrainConfig().to_dict()}
    if "settings" in flags:
        flags["settings"] = {**values.get("settings", {}), **flags["settings"]}
    config = changed_config(args.run, values | flags) if args.resume else TrainConfig.from_dict(values | flags)
    trainer = start(config, args.run, resume=args.resume)
    trainer.train()
    if trainer.interrupted:
        return 130
    print(
        f"the model is in {args.run}: fastformer {'generate' if config.model == 'gpt' else 'translate'} {args.run} ..."
    )
    return 0


def _translate(args: Any) -> int:
    from fastformer.data.text import read_lines, read_pairs
    from fastformer.generation import Translator, draw_attention
    from fastformer.training.build import load_model

    if args.attention and args.text is None:
        raise ValueError("expected a text to draw the attention of: fastformer translate RUN 'text' --attention F")
    if args.reference and args.file is None:
        raise ValueError("expected --file with --reference: its translations are compared with the reference")
    model, tokenizer = load_model(args.run, ("Transformer", "LSTMSeq2Seq"))
    translator, options = Translator(model, tokenizer), _chosen(args, SEARCH_FLAGS)
    if args.attention:
        source, target, weights = translator.attention(args.text)
        draw_attention(source, target, weights, args.attention, title=args.text)
        print(f"drew {args.attention}", file=sys.stderr)
    if args.text is not None:
        print(translator.translate([args.text], **options)[0])
    elif args.reference:
        pairs = read_pairs(args.file, args.reference)
        found = translator.translate([source for source, _ in pairs], **options)
        print("\n".join(found))
        _print_scores(found, [target for _, target in pairs])
    else:
        lines = _standard_input() if args.file is None else read_lines(args.file, allow_empty=True)
        # A person at a terminal gets each answer at once.
        read_ahead = 1 if args.file is None and sys.stdin.isatty() else 1000
        for translation in translator.stream(lines, read_ahead=read_ahead, **options):
            print(translation, flush=True)
    return 0


def _print_scores(found: list[str], references: list[str]) -> None:
    from fastformer.training.evaluate import corpus_scores

    for name, (score, signature) in corpus_scores(found, references).items():
        print(f"{name} {score:.2f}  {signature}", file=sys.stderr)


def _standard_input() -> Iterator[str]:
    """The lines of standard input, as they come."""
    from fastformer.data.text import split_lines

    for number, line in enumerate(sys.stdin.buffer, 1):
        yield from split_lines(line, "standard input", allow_empty=True, first=number)


def _generate(args: Any) -> int:
    import torch

    from fastformer.generation import generate
    from fastformer.training.build import load_model

    model, tokenizer = load_model(args.run, ("GPT",))
    ids = tokenizer.encode(args.prompt)
    if not ids:
        raise ValueError("expected a prompt of at least one token, got an empty one")
    options = _chosen(args, SEARCH_FLAGS)
    if not args.greedy and options["num_beams"] == 1:
        options |= {"do_sample": True, **_chosen(args, SAMPLING_FLAGS)}
    out = generate(model, torch.tensor([ids]), **options)
    assert isinstance(out, torch.Tensor)
    print(tokenizer.decode(out[0].tolist()))
    return 0


def _average(args: Any) -> int:
    from fastformer.training.build import load_model
    from fastformer.training.checkpoint import average_weights, checkpoints

    if args.last < 1:
        raise ValueError(f"expected --last of at least 1, got {args.last}")
    found = checkpoints(Path(args.run))[-args.last :]
    model, tokenizer = load_model(args.run)
    model.load_state_dict(average_weights(found))
    model.save_pretrained(args.run, tokenizer)
    print(f"averaged {', '.join(path.stem for path in found)} into {args.run}")
    return 0


def _demo(args: Any) -> int:
    from fastformer.demo import run_demo

    run_demo(Path(args.out), seed=args.seed)
    return 0


def _doctor(args: Any) -> int:
    from fastformer.doctor import report

    print(report())
    return 0


COMMANDS = {
    "train": _train,
    "translate": _translate,
    "generate": _generate,
    "average": _average,
    "demo": _demo,
    "doctor": _doctor,
}

if __name__ == "__main__":
    sys.exit(main())
