"""aurakv demo: one long prompt with the uncompressed cache and with compressed ones, side by side."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import InputError, counted, cut
from . import arguments, loading
from .screen import Screen, bytes_text, up_to

if TYPE_CHECKING:
    import torch

    from ..bench import model
    from ..evaluation import Row

FORMATS = ["k8v8", "k8v4", "k4v4", "k3v3"]
CHUNK = 2048  # tokens that are read at a time: the first of them calibrate the keys


def add(subparsers: Any) -> None:
    parser = arguments.command(
        subparsers,
        "demo",
        run,
        "compare the compressed caches with the uncompressed one on a real model",
        "A model reads a long text and goes on with it, with the uncompressed cache and with each format.\n"
        "Shown for each: the bytes that the cache holds, counted from its tensors; tokens/s of decoding, the caches\n"
        "taking turns token by token; the text; and over all tokens of the prompt, which read the compressed\n"
        "history, how far the predictions are from those of the uncompressed model (mean KL divergence in nats) and\n"
        "how often both find the same token most likely. Saves a picture.",
        [
            "aurakv demo",
            "aurakv demo --formats k8v4,k4v4 --tokens 2K --picture demo.png",
            'aurakv demo --model path/to/model --file report.txt --question "What is the conclusion?"',
        ],
        check,
    )
    parser.add_argument("--formats", type=arguments.names, default=FORMATS, metavar="LIST",
                        help=f"formats and policies, separated by commas (default {','.join(FORMATS)})")  # fmt: skip
    parser.add_argument("--tokens", type=arguments.tokens, default=4352, help="of the prompt (default 4352)")
    parser.add_argument("--new", type=arguments.tokens, default=48, help="tokens to generate (default 48)")
    parser.add_argument("--file", type=Path, help="a text to read (default two chapters of Alice in Wonderland)")
    parser.add_argument("--question", help="what to ask about the text (default none: the model goes on with it)")
    parser.add_argument("--picture", type=Path, default=Path("aurakv-demo.png"), metavar="FILE",
                        help="where to save the picture (default aurakv-demo.png)")  # fmt: skip
    loading.add_options(parser)


def check(args: argparse.Namespace) -> None:
    if arguments.UNCOMPRESSED in args.formats or len(set(args.formats)) < len(args.formats):
        raise InputError(f"--formats must name compressed formats, each once, got {cut(','.join(args.formats))}")
    arguments.check_formats(args.formats, others=[arguments.AUTO])
    arguments.picture(args.picture)


def run(args: argparse.Namespace) -> None:
    from ..bench import machine, model
    from ..evaluation.tensors import bytes_of
    from . import demo_plot

    screen = Screen(args)
    loaded = loading.load(args, screen)
    ids = _prompt(args, loaded)
    rows, runs = _read(args, loaded, ids, screen)
    with screen.progress("decoding", args.new * len(runs)) as step:
        model.decode(runs, args.new, step)
    results = []
    whole, kept = bytes_of(runs[0].cache), loaded.model.dtype.itemsize
    sizes = {f"of_{bits}": whole * width / kept for bits, width in (("float32", 4), ("bfloat16", 2))}
    base, expected = runs[0], _text(loaded.tokenizer, runs[0].tokens)
    for row, run in zip(rows, runs, strict=True):
        results.append(
            {
                "cache": row.name,
                "bytes": bytes_of(run.cache),
                "bytes_per_token": bytes_of(run.cache) / run.cache.get_seq_length(),
                "tokens_per_second": run.tokens_per_second,
                "times_smaller": {name: size / bytes_of(run.cache) for name, size in sizes.items()},
                "times_faster": run.tokens_per_second / base.tokens_per_second,
                "kl": row.kl,
                "top1": row.top1,
                "perplexity": row.perplexity,
                "tokens_from_codes": row.tokens_from_codes,
                "same_words": _common(expected, _text(loaded.tokenizer, run.tokens)),
                "text": _text(loaded.tokenizer, run.tokens),
            }
        )
    facts = {"model": loaded.name, "prompt_tokens": ids.shape[1], "dtype": str(loaded.model.dtype).split(".")[1],
             **machine.facts(loaded.device)}  # fmt: skip
    demo_plot.save(results, facts, args.picture)
    _show(screen, results, facts, args.new)
    screen.say(f"picture: {args.picture}")
    screen.result({**facts, "question": args.question, "rows": results, "picture": str(args.picture)})


def _prompt(args: argparse.Namespace, loaded: loading.Loaded) -> torch.Tensor:
    """The ids [1, tokens] of the text, cut to fit, and of the question behind it if there is one."""
    import torch

    from ..calibration import texts

    tokenizer = loaded.tokenizer
    text = texts.builtin() if args.file is None else texts.read(args.file)
    if loaded.longest is not None and args.tokens + args.new > loaded.longest:
        raise InputError(f"--tokens and --new must stay within the {loaded.longest:,} tokens of this model")
    if args.question is None:
        return texts.ids_of(text, tokenizer, loaded.model.config, args.tokens)
    before, after = _around(tokenizer, args.question)
    room = args.tokens - len(before) - len(after)
    words = tokenizer(text, add_special_tokens=False)["input_ids"]
    if not 0 < room <= len(words):
        raise InputError(
            f"--tokens must be from {args.tokens - room + 1:,} to {args.tokens - room + len(words):,} with this text"
            f" and question, got {args.tokens:,}"
        )
    return torch.tensor([[*before, *words[:room], *after]])


def _around(tokenizer: Any, question: str) -> tuple[list[int], list[int]]:
    """What comes before and after the text: the chat template where there is one."""
    mark = "\u241e"
    asked = f"{mark}\n\n{question}"
    if getattr(tokenizer, "chat_template", None) is not None:
        turns = [{"role": "user", "content": asked}]
        asked = tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
    before, _, after = asked.partition(mark)
    first, last = (tokenizer(part, add_special_tokens=False)["input_ids"] for part in (before, after))
    return first, last


def _read(
    args: argparse.Namespace, loaded: loading.Loaded, ids: torch.Tensor, screen: Screen
) -> tuple[list[Row], list[model.Run]]:
    """Let all caches read the prompt, comparing the predictions on the way; they hold it afterwards."""
    from ..bench import model
    from ..evaluation import compare
    from ..hf.cache_names import UNCOMPRESSED, cache_named

    made: dict[str, model.Run] = {}

    def maker(name: str) -> Any:
        def make() -> Any:
            with arguments.entry(name):
                cache = cache_named(loaded.model, name)
            made[name] = model.Run(name, loaded.model, cache, loaded.model.config._attn_implementation)
            return cache

        return make

    plain, makers = maker(UNCOMPRESSED), {name: maker(name) for name in args.formats}
    passes = (1 + len(makers)) * -(-ids.shape[1] // CHUNK)
    with screen.progress(f"reading {ids.shape[1]:,} tokens", passes, lines=True) as step:
        rows = compare(loaded.model, ids, makers, chunk=CHUNK, reference=plain, progress=up_to(step))
    for run in made.values():
        run.cache.crop(-1)  # the last token is where decoding begins
        run.prefill(ids)
    return rows, list(made.values())


def _show(screen: Screen, results: list[dict[str, Any]], facts: dict[str, Any], count: int) -> None:
    base = results[0]
    screen.say(
        f"{facts['model']} ({facts['dtype']}) with a prompt of {facts['prompt_tokens']:,} tokens, on {facts['device']},"
        f" {counted(facts['threads'], 'thread')}"
    )
    columns = [
        ">held",
        ">bytes a token",
        ">smaller than float32",
        ">smaller than bfloat16",
        ">tokens/s",
        ">faster",
        ">KL",
    ]
    rows = []
    for row in results:
        smaller = row["times_smaller"]
        cells = [row["cache"], bytes_text(row["bytes"]), f"{row['bytes_per_token']:,.0f}"]
        cells += [f"{smaller['of_float32']:.2f}x", f"{smaller['of_bfloat16']:.2f}x"]
        cells += [f"{row['tokens_per_second']:.1f}", f"{row['times_faster']:.2f}x"]
        rows.append([*cells, *(["", ""] if row is base else [f"{row['kl']:.4f}", f"{row['top1']:.1%}"])])
    screen.table("", ["cache", *columns, ">same top choice"], rows)
    screen.say(
        "smaller than float32, bfloat16: times, against an uncompressed cache of that type;\n"
        f"faster: decoding, against the uncompressed cache in {facts['dtype']};\n"
        "KL, same top choice: predictions against those of the uncompressed model"
    )
    screen.table(
        f"the next {count} tokens",
        ["cache", "text", ">first words like uncompressed"],
        [(r["cache"], r["text"], "" if r is base else str(r["same_words"])) for r in results],
    )


def _text(tokenizer: Any, tokens: list[int]) -> str:
    """What was said up to the end of the answer."""
    end = tokenizer.eos_token_id
    tokens = tokens[: tokens.index(end)] if end in tokens else tokens
    return " ".join(tokenizer.decode(tokens, skip_special_tokens=True).split())


def _common(a: str, b: str) -> int:
    """How many words two texts begin with alike."""
    pairs = list(zip(a.split(), b.split(), strict=False))
    return next((n for n, (x, y) in enumerate(pairs) if x != y), len(pairs))
