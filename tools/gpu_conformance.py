"""Conformance on a GPU, in many processes because compiling kernels takes most of the time, with or without pytest.

    PYTHONPATH=src python tools/gpu_conformance.py [--jobs 16] [--seconds 240] [--device cuda] [--capability 8.0]
        [--done FILE] [NAME …]

Runs the tests that need a GPU, every chosen case in both precisions, and the covering set once. NAMEs choose, in their
order, what contains one of them: `case NAME fast`, `case NAME float32`, `cover NAME fast`, `test MODULE:NAME:NUMBER`.
--capability runs the kernels that a GPU of that capability would. --done keeps the names of what passed in a file and
leaves out what it names, so that a run goes on where another ended. Ends with a count; exits 1 on a failure.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import contextlib
import importlib
import inspect
import itertools
import multiprocessing
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

MODULES = (
    "tests.backends.triton.test_decode", "tests.backends.triton.test_decode_scoring",
    "tests.backends.triton.test_decode_extremes", "tests.backends.triton.test_decode_first",
    "tests.backends.triton.test_decode_shapes", "tests.backends.triton.test_backend",
    "tests.backends.triton.test_extend", "tests.backends.triton.test_fit", "tests.backends.triton.test_unpack",
    "tests.storage.test_files", "tests.parallel.test_gpu", "tests.vllm.test_layer", "tests.vllm.test_beginnings",
    "tests.vllm.test_recent", "tests.vllm.test_prefill", "tests.hf.test_generate_gpu",
)  # fmt: skip
Job = tuple[str, str, str]  # kind, name, precision or number


class Condition:
    """What pytest.mark.skipif gives: a decorator, or a mark of a module or of a row of parameters."""

    def __init__(self, skip: bool) -> None:
        self.skip = skip

    def __call__(self, function: Any) -> Any:
        return _note(function, "conditions", [*getattr(function, "conditions", []), self])


class Row(tuple[Any, ...]):
    """What pytest.param gives."""

    marks: Any = ()


class Mark:
    """What the tests use of pytest.mark: it notes parameters and conditions at the functions."""

    def parametrize(self, names: str | tuple[str, ...], values: Any, **_: Any) -> Callable[[Any], Any]:
        keys = [n.strip() for n in names.split(",")] if isinstance(names, str) else list(names)
        rows = []
        for value in values:
            row = value if len(keys) > 1 or isinstance(value, Row) else (value,)
            rows.append((dict(zip(keys, row, strict=True)), _conditions(getattr(value, "marks", ()))))
        return lambda f: _note(f, "parameters", [*getattr(f, "parameters", []), rows])

    def skipif(self, condition: bool, reason: str = "") -> Condition:
        return Condition(condition)

    def __getattr__(self, name: str) -> Callable[..., Any]:
        return lambda *args, **_: args[0] if args and callable(args[0]) else (lambda f: f)


def _note(function: Any, name: str, value: Any) -> Any:
    setattr(function, name, value)
    return function


def _conditions(marks: Any) -> list[Condition]:
    return [mark for mark in (marks if isinstance(marks, list | tuple) else [marks]) if isinstance(mark, Condition)]


class SkippedError(Exception):
    """A module or a test has nothing to run here."""


# what the tests use of pytest besides marks


def skip(reason: str, **_: Any) -> None:
    raise SkippedError(reason)


@contextlib.contextmanager
def raises(kind: type[BaseException], match: str = "") -> Iterator[None]:
    try:
        yield
    except kind:
        return
    raise AssertionError(f"no {kind.__name__}")


def importorskip(name: str, **_: Any) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise SkippedError(name) from error


def param(*values: Any, marks: Any = (), **_: Any) -> Row:
    return _note(Row(values), "marks", marks)


def fixture(*args: Any, **_: Any) -> Any:
    return args[0] if args else (lambda f: f)


mark = Mark()


@contextlib.contextmanager
def stand_in() -> Iterator[None]:
    """Makes `import pytest` find this file, here and in every process that is started meanwhile."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "pytest.py").write_text("from gpu_conformance import *\n")
        sys.path[:0] = [folder, str(Path(__file__).parents[1]), str(Path(__file__).parent)]
        yield


def tests_of(module: str) -> dict[str, tuple[Callable[..., None], dict[str, Any]]]:
    """The tests of a module that need a GPU, by name, with their arguments."""
    found: dict[str, tuple[Callable[..., None], dict[str, Any]]] = {}
    try:
        members = vars(importlib.import_module(module))
    except SkippedError:
        return found
    for name, function in members.items():
        if not name.startswith("test_") or not callable(function) or function.__module__ != module:
            continue
        always = [*getattr(function, "conditions", []), *_conditions(members.get("pytestmark", []))]
        for number, rows in enumerate(itertools.product(*getattr(function, "parameters", []))):
            conditions = always + [condition for _, marks in rows for condition in marks]
            if conditions and not any(condition.skip for condition in conditions):
                arguments = {key: value for row, _ in rows for key, value in row.items()}
                found[f"{module}:{name}:{number}"] = (function, arguments)
    return found


def call(function: Callable[..., None], arguments: dict[str, Any]) -> None:
    """With a folder for `tmp_path` and what the fixtures of the module yield."""
    with contextlib.ExitStack() as stack:
        for name in inspect.signature(function).parameters:
            if name == "tmp_path":
                arguments[name] = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            elif name not in arguments:
                make = getattr(sys.modules[function.__module__], name)
                arguments[name] = stack.enter_context(contextlib.contextmanager(make)())
        function(**arguments)


def jobs(names: list[str]) -> list[Job]:
    from aurakv.testing import CASES, covering_set

    found: list[Job] = [("case", case.name, precision) for precision in ("fast", "float32") for case in CASES]
    found += [("cover", case.name, "fast") for case in covering_set()]
    for module in MODULES:
        found += [("test", name, "") for name in tests_of(module)]
    chosen = (job for name in names for job in found if name in " ".join(job))
    return list(dict.fromkeys(chosen)) if names else found


_lost: list[str] = []  # the job after which this process has no GPU any more


def run_job(job: Job, device: str, capability: str | None) -> tuple[Job, str]:
    """The job and what went wrong."""
    import torch

    if _lost:
        return job, f"not run: {_lost[0]} left its process without a GPU"

    torch.set_num_threads(1)
    if capability is not None:
        from aurakv.backends.triton.common import target

        target.assume(target.parsed(capability))
    from aurakv.testing import CASES, covering_set, run

    kind, name, precision = job
    try:
        if kind == "test":
            with contextlib.suppress(SkippedError):
                call(*tests_of(name.split(":")[0])[name])
        else:
            cases = CASES if kind == "case" else covering_set()
            run(next(case for case in cases if case.name == name), "triton", device, precision)
    except Exception:
        wrong = traceback.format_exc()
        try:
            if device == "cuda":
                torch.cuda.synchronize()
        except Exception:  # what an access out of bounds leaves behind
            _lost.append(" ".join(job))
        return job, wrong
    return job, ""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*")
    parser.add_argument("--jobs", type=int, default=16)
    parser.add_argument("--seconds", type=float, default=1e9, help="start nothing after this long")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--capability", help="kernels as on such a GPU, for example 8.0")
    parser.add_argument("--done", type=Path, help="a file of what has passed")
    args = parser.parse_args()
    known = args.done.read_text().splitlines() if args.done and args.done.exists() else []
    start, todo = time.perf_counter(), [job for job in jobs(args.names) if " ".join(job) not in known]
    passed: dict[str, int] = {}
    failed: list[Job] = []
    with concurrent.futures.ProcessPoolExecutor(args.jobs, multiprocessing.get_context("spawn")) as pool:
        waiting = {pool.submit(run_job, job, args.device, args.capability) for job in todo}
        while waiting:
            done, waiting = concurrent.futures.wait(waiting, 1.0, concurrent.futures.FIRST_COMPLETED)
            for job, wrong in (future.result() for future in done):
                if wrong:
                    failed.append(job)
                    print("FAILED", *job, wrong[-500:], flush=True)
                else:
                    kind = f"{job[0]} {job[2]}".strip()
                    passed[kind] = passed.get(kind, 0) + 1
                    known.append(" ".join(job))
            if args.done and done:
                args.done.write_text("".join(f"{name}\n" for name in known))
            if time.perf_counter() - start > args.seconds:
                waiting = {future for future in waiting if not future.cancel()}
    late = len(todo) - sum(passed.values()) - len(failed)
    print(*(f"FAILED {' '.join(job)}" for job in failed), sep="\n")
    print(f"passed {passed}, {len(failed)} failed, {late} not run of {len(todo)}, {time.perf_counter() - start:.0f} s")
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    with stand_in():
        importlib.import_module("gpu_conformance").main()  # under the name by which the tests know it
