"""The command `fastformer`: train, translate, generate, average, demo, doctor."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

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
    """Runs a command. Returns the exit code: 0, 1 for a user's error, 130 after Ctrl-C."""
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stderr)
    try:
        args = _parser().parse_args(arguments)
        command = args.subcommand
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


def _parser() -> Any:
    try:
        from jsonargparse import ArgumentParser
    except ImportError as error:
        raise ImportError("the command needs jsonargparse: pip install 'fastformer[train]'") from error
    from fastformer.training.config import TrainConfig

    parser = ArgumentParser(prog="fastformer", description="Train, translate and measure fast Transformers.")
    commands = parser.add_subcommands()

    train = ArgumentParser(description="Trains on text files or on the built-in task; writes a run folder.")
    train.add_argument("run", type=str, help="the run folder")
    train.add_argument("--config", type=str, default=None, help="a YAML file with settings; flags override it")
    train.add_argument("--resume", action="store_true", help="go on with the run in the folder")
    train.add_class_arguments(TrainConfig)
    commands.add_subcommand("train", train)

    translate = ArgumentParser(description="Translates a text, a file, or standard input line by line.")
    translate.add_argument("run", type=str, help="the run folder")
    translate.add_argument("text", type=str, nargs="?", default=None, help="what to translate")
    translate.add_argument("--file", type=str, default=None, help="a UTF-8 file, one sentence a line")
    translate.add_argument("--attention", type=str, default=None, help="draw what the translation looked at, as a PNG")
    _add(translate, SEARCH_FLAGS)
    commands.add_subcommand("translate", translate)

    generate = ArgumentParser(description="Continues a prompt with a language model.")
    generate.add_argument("run", type=str, help="the run folder")
    generate.add_argument("prompt", type=str, help="the text to continue")
    generate.add_argument("--greedy", action="store_true", help="the best token always, no sampling")
    _add(generate, SEARCH_FLAGS + SAMPLING_FLAGS)
    commands.add_subcommand("generate", generate)

    average = ArgumentParser(description="Averages the weights of a run's last checkpoints into its model.")
    average.add_argument("run", type=str, help="the run folder")
    average.add_argument("--last", type=int, default=5, help="how many checkpoints")
    commands.add_subcommand("average", average)

    demo = ArgumentParser(description="Trains a number translator on this machine and shows it.")
    demo.add_argument("--out", type=str, default="demo", help="the run folder; replaced if it is there")
    demo.add_argument("--seed", type=int, default=0, help="of data, weights and order")
    commands.add_subcommand("demo", demo)

    commands.add_subcommand("doctor", ArgumentParser(description="Versions, and which backend each op gets and why."))
    return parser


def _add(parser: Any, flags: tuple) -> None:
    for name, kind, default, text in flags:
        parser.add_argument(name, type=kind if default is not None else kind | None, default=default, help=text)


def _chosen(args: Any, flags: tuple) -> dict[str, Any]:
    return {flag[0].removeprefix("--"): args[flag[0].removeprefix("--")] for flag in flags}


def _train(args: Any) -> int:
    import dataclasses

    from fastformer.training.build import load_config, start
    from fastformer.training.config import TrainConfig

    names = [field.name for field in dataclasses.fields(TrainConfig)]
    flags = {name: args[name] for name in names}
    if isinstance(flags["settings"], str):
        raise ValueError(f"expected settings as a mapping such as '{{d_model: 256}}', got {flags['settings']!r}")
    if args.resume:
        config = load_config(args.run)
        # A run goes on as it was; how long and how it is watched may change.
        for name in ("steps", "max_minutes", "log_every", "val_every", "save_every", "patience"):
            if flags[name] != getattr(TrainConfig(), name):
                setattr(config, name, flags[name])
    else:
        defaults = TrainConfig().to_dict()
        values = _yaml(args.config) if args.config else {}
        TrainConfig.from_dict(values)
        config = TrainConfig.from_dict(values | {k: v for k, v in flags.items() if v != defaults[k]})
    trainer = start(config, args.run, resume=args.resume)
    trainer.train()
    if trainer.interrupted:
        return 130
    print(
        f"the model is in {args.run}: fastformer {'generate' if config.model == 'gpt' else 'translate'} {args.run} ..."
    )
    return 0


def _yaml(path: str) -> dict[str, Any]:
    import yaml

    if not Path(path).is_file():
        raise ValueError(f"expected a YAML file with settings, but there is no file {path}")
    try:
        values = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except yaml.YAMLError as error:
        raise ValueError(f"{path} is no YAML: {error}") from error
    if not isinstance(values, dict):
        raise ValueError(f"expected {path} to hold settings, one `name: value` a line, got {type(values).__name__}")
    return values


def _translate(args: Any) -> int:
    from fastformer.data import load_tokenizer
    from fastformer.data.text import read_lines
    from fastformer.generation import Translator, draw_attention

    translator = Translator.from_pretrained(args.run, load_tokenizer(args.run))
    options = _chosen(args, SEARCH_FLAGS)
    if args.attention:
        if args.text is None:
            raise ValueError("expected a text to draw the attention of: fastformer translate RUN 'text' --attention F")
        source, target, weights = translator.attention(args.text)
        draw_attention(source, target, weights, args.attention, title=args.text)
        print(f"drew {args.attention}", file=sys.stderr)
    if args.text is not None:
        lines: Iterator[str] = iter([args.text])
    elif args.file is not None:
        lines = iter(read_lines(args.file))
    else:
        lines = _standard_input()
    for translation in translator.stream(lines, **options):
        print(translation, flush=True)
    return 0


def _standard_input() -> Iterator[str]:
    """The lines of standard input; a person at a terminal gets each answer at once, so nothing is read ahead there."""
    from fastformer.data.text import split_lines

    for number, line in enumerate(sys.stdin.buffer, 1):
        yield from split_lines(line, f"standard input (line {number})")


def _generate(args: Any) -> int:
    import torch

    from fastformer.data import load_tokenizer
    from fastformer.generation import generate
    from fastformer.models import GPT

    tokenizer, model = load_tokenizer(args.run), GPT.from_pretrained(args.run)
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
    from fastformer.data import load_tokenizer
    from fastformer.models import GPT, Transformer, read_architecture
    from fastformer.training.checkpoint import average_weights, checkpoints

    found = checkpoints(Path(args.run))[-args.last :]
    architectures: dict[str, Any] = {"GPT": GPT, "Transformer": Transformer}
    model = architectures[read_architecture(args.run)].from_pretrained(args.run)
    model.load_state_dict(average_weights(found))
    model.save_pretrained(args.run, load_tokenizer(args.run))
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
