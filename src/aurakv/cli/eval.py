"""aurakv eval: what compression does to a model on real text."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import itertools
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import AuraError, InputError, counted, cut
from ..format.names import PLAIN, RECENT, recent_and_name
from . import arguments, loading
from .screen import Screen, up_to

if TYPE_CHECKING:
    import torch

    from ..calibration.policy import Policy
    from ..evaluation.results import Results

FORMATS = ["k8v8", "k8v4", "k4v4", "k3v3"]
BUILTIN = "alice (built in)"
RIVALS = ("quanto-4", "quanto-2", "hqq-4", "hqq-3", "hqq-2", "turboquant_k8v4", "turboquant_4bit_nc",
          "turboquant_k3v4_nc", "turboquant_3bit_nc")  # fmt: skip
CHUNK = 256  # tokens at a time: what an AuraCache computes does not depend on it
RIVAL_CHUNK = 64  # quantised caches of transformers then see as many unquantised tokens as in decoding, on average
NEEDLES = (1024, 2048, 4096, 8192)
CODES = ("fitted", "nearest")
FITTED = "fitted 2"  # the mark of rows with fitted codes: another one where other codes or scales are chosen


def add(subparsers: Any) -> None:
    parser = arguments.command(
        subparsers,
        "eval",
        run,
        "measure the loss of each format on real text",
        "The text goes through the model in chunks, and each token reads the compressed history, as in decoding.\n"
        "For each format: perplexity, mean KL divergence from the uncompressed model in nats, how often both\n"
        "find the same token most likely, bytes per token counted from the tensors held, and how many tokens were\n"
        "read from codes. A format is a name such as k4v4, a policy (its name or .json file), plain:k4v4 (codes\n"
        "alone, no uncompressed tokens, no calibrated keys), or recent16:k4v4 (the last 16 tokens uncompressed).",
        [
            "aurakv eval",
            "aurakv eval --text report.txt --tokens 4K --formats k8v4,k4v4,plain:k4v4 --plot quality.png",
            "aurakv eval --rivals --needle --resume quality.json",
            "aurakv eval --resume quality.json --plot quality.png --formats k4v4  # go on, or draw again",
        ],
        check,
    )
    parser.add_argument("--text", type=Path, nargs="+", metavar="FILE",
                        help="text files (default two chapters of Alice in Wonderland)")  # fmt: skip
    parser.add_argument("--tokens", type=arguments.tokens, default=2048, help="of each text (default 2048)")
    parser.add_argument("--formats", type=arguments.names, default=FORMATS, metavar="LIST",
                        help=f"formats and policies, separated by commas (default {','.join(FORMATS)})")  # fmt: skip
    parser.add_argument("--codes", choices=CODES,
                        help="how codes are chosen (default fitted on CPUs, nearest on GPUs)")  # fmt: skip
    parser.add_argument("--every", type=arguments.count, default=1,
                        help="compare each n-th prediction only, to save time (default 1)")  # fmt: skip
    parser.add_argument("--rivals", action="store_true",
                        help="also transformers' quantised caches (if installed) and vLLM's (simulated)")  # fmt: skip
    parser.add_argument("--needle", action="store_true",
                        help="also hide five facts in the text and ask for each, at 1K to 8K tokens")  # fmt: skip
    parser.add_argument("--lengths", type=arguments.token_list, metavar="LIST",
                        help="of texts with needles (default 1K,2K,4K,8K, as far as model and text go)")  # fmt: skip
    parser.add_argument("--plot", type=Path, metavar="FILE", help="save a picture of KL against bytes")
    parser.add_argument("--resume", type=Path, metavar="FILE",
                        help="write rows to this file as they finish, and measure only what is not in it")  # fmt: skip
    loading.add_options(parser)


def check(args: argparse.Namespace) -> None:
    arguments.check_formats(args.formats, others=[arguments.AUTO, *RIVALS], prefixes=[PLAIN, RECENT])
    if len(set(args.formats)) < len(args.formats):
        raise InputError(f"--formats must name each format once, got {cut(','.join(args.formats))}")
    if args.lengths is not None and not args.needle:
        raise InputError("--lengths belongs to --needle: it says how long the texts with needles are")
    if args.plot is not None:
        arguments.picture(args.plot)
    if args.resume is not None:
        arguments.in_folder(args.resume)


def run(args: argparse.Namespace) -> None:
    from ..bench import machine
    from ..calibration import texts
    from ..calibration.policy import Policy, shipped
    from ..evaluation import rivals
    from ..evaluation.results import Results, model_key
    from . import eval_plot

    screen = Screen(args)
    read = {path.stem: texts.read(path) for path in args.text} if args.text else {BUILTIN: texts.builtin()}
    if args.text and len(read) < len(args.text):
        raise InputError("--text must name files with different names")
    results = Results(args.resume)
    names = list(args.formats)
    if args.rivals:
        refused = {name: rivals.why_not(name) for name in rivals.names()}
        names += [name for name, reason in refused.items() if reason is None and name not in names]
        for reason in filter(None, refused.values()):
            screen.note(reason)
    loaded = loading.load(args, screen)
    loaded = loaded._replace(name=Path(loaded.name).name)  # results do not depend on where a model lies
    policies: dict[str, Policy] = {}
    makers: dict[str, Callable[[], Any]] = {}
    for name in names:
        with arguments.entry(name):
            policy = Policy.find(recent_and_name(name)[1])
            makers[name] = maker(name, loaded.model.config, policy, args.codes)
        if policy is not None:
            policies[name] = policy
    own = {recent_and_name(name)[1] for name in policies} & set(shipped())
    for name in sorted(own) if not args.text else []:
        screen.note(f"{name} was made on the built-in text, so measure it on another one: --text FILE")
    results.facts = {
        "model": loaded.name,
        "dtype": str(loaded.model.dtype).split(".")[1],
        "formats": names,
        **machine.facts(loaded.device),
    }
    marks = marks_of(names, policies, loaded.device, args.codes)
    work = Work(args, screen, loaded, results, makers, {"weights": model_key(loaded.model)}, marks)
    rows = [row for name, text in read.items() for row in work.measure(name, text)]
    needles = [row for name, text in read.items() for row in work.search(name, text)] if args.needle else []
    _show(screen, rows, needles)
    if args.plot is not None and rows:
        eval_plot.save({loaded.name: rows}, args.plot)
        screen.say(f"picture: {args.plot}")
    found = {"rows": rows, "needles": needles, "failed": work.failed}
    screen.result({**results.facts, **found, "picture": args.plot and str(args.plot)})
    if work.failed:
        reasons = "; ".join(f"{name}: {reason}" for name, reason in work.failed.items())
        raise AuraError(f"{counted(len(work.failed), 'row')} could not be measured: {reasons}")


def marks_of(
    names: list[str], policies: dict[str, Policy], device: torch.device, codes: str | None = None
) -> dict[str, dict[str, str]]:
    """What else a row depends on, by its name: rows of another policy, or of codes chosen otherwise, are measured
    again."""
    from ..calibration.policy import FITTED_ON
    from ..evaluation import rivals
    from ..evaluation.results import policy_key

    marks = {name: {"policy": policy_key(policy)} for name, policy in policies.items()}
    usual = CODES[0] if device.type in FITTED_ON else CODES[1]
    if usual == CODES[0] or codes == CODES[0]:
        calibrated = {
            name for name in set(names) - set(rivals.names()) if not recent_and_name(name)[1].startswith(PLAIN)
        }
        chosen = codes or usual
        mark = FITTED if chosen == CODES[0] else chosen
        marks |= {name: {**marks.get(name, {}), "codes": mark} for name in calibrated}
    return marks


def maker(name: str, config: Any, policy: Policy | None = None, codes: str | None = None) -> Callable[[], Any]:
    """What makes the cache of a name: a policy, a rival, codes alone, or whatever AuraCache makes of it. Ours is
    tried once."""
    from ..evaluation import rivals
    from ..hf import AuraCache

    recent, format = recent_and_name(name)
    if name in rivals.names():
        return lambda: rivals.make(name, config)  # what goes wrong in another library costs its row alone
    make: Callable[[], Any]
    if format.startswith(PLAIN):
        alone = format.removeprefix(PLAIN)
        make = lambda: AuraCache(config, alone, first=0, recent=recent or 0, calibrate=False)  # noqa: E731
    else:
        fitted = None if codes is None else codes == CODES[0]
        make = lambda: AuraCache(config, policy or format, recent=recent, fitted=fitted)  # noqa: E731
    make()
    return make


@dataclasses.dataclass
class Work:
    """One evaluation: it measures what its results do not have yet."""

    args: argparse.Namespace
    screen: Screen
    loaded: loading.Loaded
    results: Results
    makers: dict[str, Callable[[], Any]]
    mark: dict[str, str]  # of the model, in every key
    marks: dict[str, dict[str, str]]  # of policies and formats, by their names
    failed: dict[str, str] = dataclasses.field(default_factory=dict)  # rows that could not be measured, and why

    def measure(self, text_name: str, text: str) -> list[dict[str, Any]]:
        """The rows of a text, the uncompressed model first."""
        from ..evaluation import compare, ids_of, rivals
        from ..evaluation.measure import REFERENCE, Expected
        from ..evaluation.results import text_key

        model = self.loaded.model
        ids = ids_of(text, self.loaded.tokenizer, model.config, self._within(self.args.tokens))
        shared = {"kind": "text", "model": self.loaded.name, "dtype": str(model.dtype), "text": text_name,
                  "ids": text_key(ids), "tokens": ids.shape[1], "every": self.args.every}  # fmt: skip
        keys = self._keys(shared, REFERENCE)
        held: dict[int, Expected] = {}  # by chunk: what the uncompressed model predicted
        for name in (name for name in self.makers if self._find(keys[name]) is None):
            chunk = RIVAL_CHUNK if name in rivals.QUANTISED else CHUNK
            expected = held.setdefault(chunk, Expected())
            passes = (1 if expected.row else 2) * -(-ids.shape[1] // chunk)
            label = f"{text_name}: {name}"
            with self._row(label), self.screen.progress(label, passes, lines=True) as step:
                chosen = {name: self.makers[name]}
                options = {"chunk": chunk, "every": self.args.every, "progress": up_to(step), "expected": expected}
                for row in compare(model, ids, chosen, **options):
                    self._add(keys[row.name], {**dataclasses.asdict(row), "chunk": chunk})
                self.results.save()
        found = {name: self._find(key) for name, key in keys.items()}
        return [{"text": text_name, **row} for row in found.values() if row is not None]

    def search(self, text_name: str, text: str) -> list[dict[str, Any]]:
        """The needles of a text in all lengths that model and text allow."""
        from ..evaluation import ids_of
        from ..evaluation.measure import REFERENCE
        from ..evaluation.needle import search
        from ..evaluation.results import text_key

        model, rows = self.loaded.model, []
        whole = ids_of(text, self.loaded.tokenizer, model.config)
        for tokens in self.args.lengths or NEEDLES:
            if tokens > whole.shape[1] or tokens + 64 > (
                self.loaded.longest or tokens + 64
            ):  # the question comes after
                self.screen.note(f"{text_name}: no needles at {tokens:,} tokens, which text or model does not have")
                continue
            shared = {"kind": "needle", "model": self.loaded.name, "dtype": str(model.dtype), "text": text_name,
                      "ids": text_key(whole[:, :tokens]), "tokens": tokens}  # fmt: skip
            keys = self._keys(shared, REFERENCE)
            known = self._find(keys[REFERENCE]) is not None
            for name in (name for name in self.makers if self._find(keys[name]) is None):
                label = f"{text_name}: needles in {tokens:,} tokens: {name}"
                with self._row(label), self.screen.progress(label, 1 if known else 2, lines=True) as step:
                    found = search(
                        model,
                        self.loaded.tokenizer,
                        text,
                        {name: self.makers[name]},
                        tokens=tokens,
                        chunk=RIVAL_CHUNK if self.args.rivals else CHUNK,
                        reference=not known,
                        progress=up_to(step),
                    )
                    for each, needles in itertools.groupby(found, key=lambda needle: needle.name):
                        listed = [dataclasses.asdict(needle) for needle in needles]
                        self._add(keys[each], {"name": each, "needles": listed})
                    self.results.save()
                    known = True
            for key in keys.values():
                row = self._find(key)
                if row is not None:
                    rows += [{"text": text_name, **needle} for needle in row["needles"]]
        return rows

    @contextlib.contextmanager
    def _row(self, label: str) -> Iterator[None]:
        """What goes wrong with one row does not end the others, and warnings say which row they are about."""
        began = time.monotonic()
        with warnings.catch_warnings():
            warnings.showwarning = lambda message, *where: self.screen.note(f"{label}: {message}")
            try:
                yield
            except Exception as error:  # of any library that has a cache
                reason = cut(" ".join(f"{type(error).__name__}: {error}".split()), 200)
                self.failed[label] = reason
                self.screen.note(f"{label} failed: {reason}")
            else:
                if not self.screen.err.is_terminal:
                    self.screen.note(f"{label}: measured in {time.monotonic() - began:.0f} s")

    def _keys(self, shared: dict[str, Any], reference: str) -> dict[str, dict[str, Any]]:
        """The key of each cache: its name, and what tells others of that name apart."""
        return {
            name: {**shared, "format": name, **self.mark, **self.marks.get(name, {})}
            for name in (reference, *self.makers)
        }

    def _find(self, key: dict[str, Any]) -> dict[str, Any] | None:
        """Rows without marks count where the name says enough: of formats, and policies that come with the package."""
        from ..calibration.policy import shipped

        return self.results.find(key, unmarked="policy" not in key or key["format"] in shipped())

    def _add(self, key: dict[str, Any], row: dict[str, Any]) -> None:
        """The uncompressed model is measured with every group: the first row stays, which others were compared with."""
        if self._find(key) is None:
            self.results.add(key, row)

    def _within(self, tokens: int) -> int:
        longest = self.loaded.longest
        if longest is not None and tokens > longest:
            raise InputError(f"--tokens must stay within the {longest:,} tokens of this model, got {tokens:,}")
        return tokens


def _show(screen: Screen, rows: Sequence[dict[str, Any]], needles: Sequence[dict[str, Any]]) -> None:
    columns = (">perplexity", ">change", ">KL", ">same top choice", ">bytes/token", ">tokens from codes", ">seconds")
    for text, group in itertools.groupby(rows, key=lambda row: row["text"]):
        listed = list(group)
        base = listed[0]["perplexity"]
        cells = [
            (
                row["name"],
                f"{row['perplexity']:.3f}",
                f"{row['perplexity'] / base - 1:+.2%}",
                f"{row['kl']:.5f}",
                f"{row['top1']:.2%}",
                f"{row['bytes_per_token']:,.0f}",
                f"{row['tokens_from_codes']:,} ({row['reads_from_codes']:.0%} of reads)",
                f"{row['seconds']:.1f}",
            )
            for row in listed
        ]
        screen.table(f"{text}, {listed[0]['tokens']:,} tokens", ("cache", *columns), cells)
    for (text, tokens), found in itertools.groupby(needles, key=lambda row: (row["text"], row["tokens"])):
        needle_cells = []
        for name, each in itertools.groupby(found, key=lambda row: row["name"]):
            mine = list(each)
            marks = ", ".join(f"{row['depth']:.0%}" for row in mine if row["found"]) or "none"
            mean = sum(row["nll"] for row in mine) / len(mine)
            needle_cells.append((name, f"{sum(row['found'] for row in mine)} of {len(mine)}", f"{mean:.3f}", marks))
        heading = ("cache", ">found", ">nats per token of the answer", "at depths")
        screen.table(f"{text}, needles in {tokens:,} tokens", heading, needle_cells)
