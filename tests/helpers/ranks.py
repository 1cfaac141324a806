"""Processes of a gloo group that run functions of the tests, all at once."""

import contextlib
import datetime
import multiprocessing
import os
import tempfile
import traceback

import torch
import torch.distributed as dist

CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(["torch.distributed", "aurakv"])


def _serve(pipe, rank, size, store, timeout):
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{store}",
        rank=rank,
        world_size=size,
        timeout=datetime.timedelta(seconds=timeout),
    )
    while (job := pipe.recv()) is not None:
        function, arguments = job
        try:
            pipe.send((True, function(*arguments)))
        except BaseException:  # pytest's failures are no Exceptions
            pipe.send((False, traceback.format_exc()))
    os._exit(0)  # without a farewell to processes that may be gone


class Ranks:
    """`size` processes. `timeout` is that of their group."""

    def __init__(self, size, timeout=60):
        self.size = size
        self.folder = tempfile.TemporaryDirectory()
        self.pipes, self.processes = [], []
        for rank in range(size):
            ours, theirs = CONTEXT.Pipe()
            arguments = (theirs, rank, size, f"{self.folder.name}/store", timeout)
            process = CONTEXT.Process(target=_serve, args=arguments, daemon=True)
            process.start()
            theirs.close()
            self.pipes.append(ours)
            self.processes.append(process)

    @property
    def alive(self):
        return all(process.is_alive() for process in self.processes)

    def run(self, function, *arguments, dies=None, wait=120):
        """What the function returns on each rank. Rank `dies` must die of it and no other may."""
        for pipe in self.pipes:
            pipe.send((function, arguments))
        results = []
        for rank, pipe in enumerate(self.pipes):
            if not pipe.poll(wait):
                raise AssertionError(f"rank {rank} hangs")
            try:
                fine, value = pipe.recv()
            except EOFError:
                fine, value = rank == dies, "it died"
            else:
                assert rank != dies, f"rank {rank} lives"
            if not fine:
                self.close()
                raise AssertionError(f"rank {rank} failed:\n{value}")
            results.append(value)
        return results

    def close(self):
        for pipe in self.pipes:
            with contextlib.suppress(OSError):
                pipe.send(None)
        for process in self.processes:
            process.join(5)
            if process.is_alive():
                process.kill()
                process.join()
        self.folder.cleanup()
