"""aurakv tune: a policy for a model, measured on it."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import InputError
from . import arguments, loading
from .screen import Screen, up_to

if TYPE_CHECKING:
    from ..calibration.policy import Policy
    from ..format.codec import Format

FIRST = 4  # as of a model without a policy
CHUNK = 128  # tokens at a time of the last check
CHECKED = 2048  # tokens of it, at most


def add(subparsers: Any) -> None:
    parser = arguments.command(
        subparsers,
        "tune",
        run,
        "choose the format of every layer of a model",
        "The model reads a text. Each layer gets the key offset and key_scale that fit its keys and queries, then its\n"
        "keys and its values are compressed alone and the KL divergence from the uncompressed model is measured.\n"
        "With --gradients it is foreseen for all layers and widths at once, from much more text in the same time.\n"
        "Bits go where they lower it most, for the size of one format (--size) or up to a summed KL divergence\n"
        "(--kl). With --rounds, widths nearby are then measured in the whole and chosen again. The result is compared\n"
        "with that format in all layers and written as a policy, which AuraCache and the other commands load.",
        [
            "aurakv tune --out policy.json",
            "aurakv tune --model path/to/model --text report.txt --size k3v3 --out small.json",
            "aurakv tune --model path/to/model --text report.txt --size k3v2 --gradients 4 --probe 4K",
            "aurakv tune --kl 0.01 --out good.json --resume tune.state  # go on where it stopped",
            "aurakv eval --formats policy.json,k4v4,plain:k4v4",
        ],
        check,
    )
    parser.add_argument("--out", type=Path, default=Path("policy.json"), metavar="FILE",
                        help="the policy (default policy.json)")  # fmt: skip
    parser.add_argument(
        "--text", type=Path, metavar="FILE", help="a text (default two chapters of Alice in Wonderland)"
    )
    parser.add_argument(
        "--tokens", type=arguments.tokens, default=4096, help="for offsets and key scales (default 4096)"
    )
    parser.add_argument("--probe", type=arguments.tokens, default=512, help="for measuring layers (default 512)")
    parser.add_argument("--gradients", type=arguments.count, metavar="SAMPLES",
                        help="foresee losses by so many gradients over the probe instead of measuring them (4 are"
                        " enough; takes the memory of training on 1,024 tokens)")  # fmt: skip
    goal = parser.add_mutually_exclusive_group()
    goal.add_argument("--size", default="k4v4", metavar="FORMAT",
                      help="no larger than this format in all layers, with the same uncompressed tokens, offsets and"
                      " key scales (default k4v4)")  # fmt: skip
    goal.add_argument(
        "--kl",
        type=arguments.fraction,
        metavar="NATS",
        help="instead of --size: the smallest policy within this KL divergence",
    )
    parser.add_argument("--percent", type=float, help="percent by which the policy may exceed --size (default 0)")
    parser.add_argument("--first", type=arguments.natural, default=FIRST, metavar="TOKENS",
                        help=f"of a sequence that stay uncompressed (default {FIRST})")  # fmt: skip
    parser.add_argument("--recent", type=arguments.natural, default=0, metavar="TOKENS",
                        help="up to each query that stay uncompressed, too (default 0)")  # fmt: skip
    parser.add_argument("--rounds", type=arguments.natural,
                        help="rounds that try neighbouring widths in the whole model (needs --size;"
                        " default 0)")  # fmt: skip
    parser.add_argument("--context", type=arguments.tokens, default=4096,
                        help="length at which sizes count; windows do not grow (default 4096)")  # fmt: skip
    parser.add_argument("--resume", type=Path, metavar="FILE", help="keep what was measured here, and do not repeat it")
    loading.add_options(parser)


def check(args: argparse.Namespace) -> None:
    if args.out.suffix != ".json":
        raise InputError(f"--out must be a .json file, got {args.out}")
    arguments.check_formats([args.size], "--size", policies=False, instead="--recent")
    if args.kl is not None and not (args.percent is None and args.rounds is None):
        raise InputError("--percent and --rounds belong to --size: with --kl a policy is as small as its loss allows")
    if args.gradients is not None and args.recent:
        raise InputError("--gradients does not know which queries read --recent tokens: measure layers alone")
    if not -50 <= (args.percent or 0.0) <= 400:
        raise InputError(f"--percent must be from -50 to 400, got {args.percent}")
    for path in filter(None, (args.out, args.resume)):
        arguments.in_folder(path)


def run(args: argparse.Namespace) -> None:
    from ..calibration import texts, tune
    from ..evaluation import measure
    from ..evaluation.results import Results
    from ..format.codec import Format
    from ..hf import AuraCache
    from ..hf.support import head_dim

    screen = Screen(args)
    if "signs" not in args.size:  # given ones are as many as a head of the model has dimensions
        check_size(Format.parse(args.size, 64))
    state = Results(args.resume, tune.STATE)
    text = texts.builtin() if args.text is None else texts.read(args.text)
    loaded = loading.load(args, screen)
    config = loaded.model.config
    size = Format.parse(args.size, head_dim(config))
    check_size(size)
    ids = texts.ids_of(text, loaded.tokenizer, config)
    used = ids[:, : args.tokens]
    source = f"{Path(loaded.name).name}, {used.shape[1]} tokens of {'alice' if args.text is None else args.text.stem}"
    with screen.progress("reading the text", used.shape[1], lines=True) as step:
        policy = tune.calibrated(loaded.model, used, size.name, source, args.first, args.recent, step)
    budget = _budget(args, size, policy, config)  # refused now, not after all layers were measured
    probe = ids[:, : args.probe]
    if args.gradients is None:
        with screen.progress("layers alone", 4 * len(policy.layers), lines=True) as step:
            layers = tune.sensitivities(loaded.model, policy, probe, args.context, state, _report(step))
    else:
        steps = args.gradients * len(tune.pieces(probe))
        with screen.progress("gradients", steps, lines=True) as step:
            layers = tune.foreseen(loaded.model, policy, probe, args.context, args.gradients, state, _report(step))
    uniform = policy
    formats = tune.choose(layers, policy.head_dim, **({"kl": args.kl} if args.kl is not None else {"budget": budget}))
    policy = tune.tuned(policy, formats)
    for number in range(args.rounds or 0):
        with screen.progress(f"round {number + 1}", 4 * len(policy.layers), lines=True) as step:
            before, policy = policy, tune.refined(loaded.model, policy, probe, args.context, budget, _report(step))
        if policy is before:
            break
    formats = [layer.format for layer in policy.layers]
    policy.save(args.out)
    check = ids[
        :, -min(ids.shape[1], 2 * args.probe, CHECKED) :
    ]  # the end of the text, which the layers were not measured on
    caches = {
        str(args.out): lambda: AuraCache(config, policy),
        str(size): lambda: AuraCache(config, uniform),
    }
    passes = (1 + len(caches)) * -(-check.shape[1] // CHUNK)
    with screen.progress("the whole", passes, lines=True) as step:
        rows = measure.compare(loaded.model, check, caches, chunk=CHUNK, progress=up_to(step))[1:]
    losses = [
        (i, name, f"{x.key[size.key.bits]:.2g}", f"{x.value[size.value.bits]:.2g}")
        for i, (name, x) in enumerate(zip(formats, layers, strict=True))
    ]
    screen.table("", ["layer", "format", f">KL of keys in {size}", ">of values"], losses)
    checked = [(row.name, f"{row.kl:.4f}", f"{row.top1:.1%}", f"{row.bytes_per_token:,.0f}") for row in rows]
    screen.table("", ["policy", ">KL", ">same token", ">bytes per token"], checked)
    screen.say(f"policy: {args.out}")
    if args.kl is None and rows[0].kl >= rows[1].kl:
        screen.say(
            f"{size} in all layers loses no more on this text: take that, or measure more (--rounds 1, --probe 4K)"
        )
    listed = {"layers": [asdict(layer) for layer in layers], "check": [asdict(row) for row in rows]}
    screen.result({"policy": str(args.out), "formats": formats, **listed})


def check_size(size: Format) -> None:
    if not (size.key.coded and size.value.coded):
        raise InputError(f"--size must have codes for keys and values, got {size}")


def _budget(args: argparse.Namespace, size: Format, policy: Policy, config: Any) -> float:
    """Bytes per token and KV head of all layers that formats may take; with --kl nothing depends on it. What a policy
    takes besides, `size` in all layers takes, too."""
    from ..calibration import tune

    shares, percent = tune.shares(config, args.context), args.percent or 0.0
    budget = sum(shares) * size.bytes_per_token * (1 + percent / 100)
    least = tune.smallest(shares, policy.head_dim)
    if args.kl is None and budget < least:
        raise InputError(
            f"--size {size} and --percent {percent:g} are {budget:.1f} bytes per token and KV head, and the smallest"
            f" formats take {least:.1f}: raise --percent or --size"
        )
    return budget


def _report(step: Callable[..., None]) -> Callable[[str, float, int], None]:
    report = up_to(step)
    return lambda what, done, total: report(done, text=what)
