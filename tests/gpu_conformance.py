"""Conformance on a GPU, in many processes because compiling kernels takes most of the time, with or without pytest.

    PYTHONPATH=src python tests/gpu_conformance.py [--jobs 16] [--seconds 240] [--device cuda] [NAME …]

Runs every chosen case in both precisions, the covering set once, and the tests that need a GPU. NAMEs choose those
whose name contains one of them. Ends with a count; exits 1 on a failure.
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
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

MODULES = ("test_triton", "test_triton_extend", "test_triton_fast", "test_files")
Job = tuple[str, str, str]  # kind, name, precision or number


class Mark:
    """What the tests use of pytest.mark: it notes parameters and conditions at the functions."""

    def parametrize(self, names: str | tuple[str, ...], values: Any, **_: Any) -> Callable[[Any], Any]:
        keys = [n.strip() for n in names.split(",")] if isinstance(names, str) else list(names)
        rows = [dict(zip(keys, v if len(keys) > 1 else (v,), strict=True)) for v in values]
        return lambda f: _note(f, "parameters", [*getattr(f, "parameters", []), rows])

    def skipif(self, condition: bool, reason: str = "") -> Callable[[Any], Any]:
        return lambda f: _note(f, "conditions", [*getattr(f, "conditions", []), condition])

    def __getattr__(self, name: str) -> Callable[..., Any]:
        return lambda *args, **_: args[0] if args and callable(args[0]) else (lambda f: f)


def _note(function: Any, name: str, value: Any) -> Any:
    setattr(function, name, value)
    return function


class SkippedError(Exception):
    """A module has nothing to run here."""


def _skip(reason: str, **_: Any) -> None:
    raise SkippedError(reason)


@contextlib.contextmanager
def _raises(kind: type[BaseException], match: str = "") -> Iterator[None]:
    try:
        yield
    except kind:
        return
    raise AssertionError(f"no {kind.__name__}")


def tests_of(module: str) -> dict[str, tuple[Callable[..., None], dict[str, Any]]]:
    """The tests of a module that need a GPU, by name, with their arguments."""
    stand_in = types.ModuleType("pytest")
    stand_in.__dict__.update(
        mark=Mark(),
        raises=_raises,
        skip=_skip,
        importorskip=importlib.import_module,
        fixture=lambda *args, **_: args[0] if args else (lambda f: f),
        param=lambda *args, **_: args if len(args) > 1 else args[0],
    )
    sys.modules["pytest"] = stand_in
    found: dict[str, tuple[Callable[..., None], dict[str, Any]]] = {}
    try:
        members = vars(importlib.import_module(module))
    except SkippedError:
        return found
    for name, function in members.items():
        if name.startswith("test_") and getattr(function, "conditions", None) and not any(function.conditions):
            for number, rows in enumerate(itertools.product(*getattr(function, "parameters", []))):
                arguments = {key: value for row in rows for key, value in row.items()}
                found[f"{module}:{name}:{number}"] = (function, arguments)
    return found


def jobs(names: list[str]) -> list[Job]:
    from aurakv.testing import CASES, covering_set

    found: list[Job] = [("case", case.name, precision) for precision in ("fast", "exact") for case in CASES]
    found += [("cover", case.name, "fast") for case in covering_set()]
    for module in MODULES:
        found += [("test", name, "") for name in tests_of(module)]
    return [job for job in found if not names or any(name in job[1] for name in names)]


def run_job(job: Job, device: str) -> tuple[Job, str]:
    """The job and what went wrong."""
    import torch

    torch.set_num_threads(1)
    from aurakv.testing import CASES, covering_set, run

    kind, name, precision = job
    try:
        if kind == "test":
            function, arguments = tests_of(name.split(":")[0])[name]
            with tempfile.TemporaryDirectory() as directory:
                if "tmp_path" in inspect.signature(function).parameters:
                    arguments["tmp_path"] = Path(directory)
                function(**arguments)
        else:
            cases = CASES if kind == "case" else covering_set()
            run(next(case for case in cases if case.name == name), "triton", device, precision)
    except Exception:
        return job, traceback.format_exc()
    return job, ""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*")
    parser.add_argument("--jobs", type=int, default=16)
    parser.add_argument("--seconds", type=float, default=1e9, help="start nothing after this long")
    parser.add_argument("--device", default="cuda")
    args = parser.parse_args()
    start, todo = time.perf_counter(), jobs(args.names)
    passed: dict[str, int] = {}
    failed: list[Job] = []
    with concurrent.futures.ProcessPoolExecutor(args.jobs, multiprocessing.get_context("spawn")) as pool:
        waiting = {pool.submit(run_job, job, args.device) for job in todo}
        while waiting:
            done, waiting = concurrent.futures.wait(waiting, 1.0, concurrent.futures.FIRST_COMPLETED)
            for job, wrong in (future.result() for future in done):
                if wrong:
                    failed.append(job)
                    print("FAILED", *job, wrong[-500:], flush=True)
                else:
                    kind = f"{job[0]} {job[2]}".strip()
                    passed[kind] = passed.get(kind, 0) + 1
            if time.perf_counter() - start > args.seconds:
                waiting = {future for future in waiting if not future.cancel()}
    late = len(todo) - sum(passed.values()) - len(failed)
    print(*(f"FAILED {' '.join(job)}" for job in failed), sep="\n")
    print(f"passed {passed}, {len(failed)} failed, {late} not run of {len(todo)}, {time.perf_counter() - start:.0f} s")
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent))
    main()
