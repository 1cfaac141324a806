"""Process groups of torch.distributed: what aurakv asks of them, and one clear error when a process is gone."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import Tensor

from ..errors import InputError, PeerError


class Group:
    """The processes that work together; None is all of them (the default group)."""

    def __init__(self, given: dist.ProcessGroup | None = None) -> None:
        if not dist.is_available():
            raise InputError("this build of torch comes without torch.distributed, which several processes need")
        if not dist.is_initialized():
            raise InputError("there is no process group: call torch.distributed.init_process_group first")
        self.given = given
        self.rank, self.size = dist.get_rank(given), dist.get_world_size(given)
        if self.rank < 0:
            raise InputError("this process is no member of the group")

    def wire(self, device: torch.device) -> torch.device:
        """Where a tensor of this device has to lie for the group to move it: gloo moves memory of the host."""
        served = dict(pair.split(":") for pair in str(dist.get_backend_config(self.given)).split(","))
        if served.get(device.type, "gloo") != "gloo":
            return device
        if "gloo" in served.values() or "cpu" in served:
            return torch.device("cpu")
        return torch.device("cuda", torch.cuda.current_device())

    @functools.cached_property
    def host(self) -> bool:
        """Whether the group moves memory of the host, which can be read without waiting for a device."""
        return self.wire(torch.device("cpu")).type == "cpu"

    def check_peer(self, name: str, rank: int) -> None:
        if not (isinstance(rank, int) and 0 <= rank < self.size) or rank == self.rank:
            raise InputError(
                f"{name} must be another rank of the group, 0 … {self.size - 1} without {self.rank}, got {rank}"
            )

    @contextlib.contextmanager
    def doing(self, what: str) -> Iterator[None]:
        """Errors of torch.distributed become one sentence."""
        try:
            yield
        except RuntimeError as error:  # also what torch calls DistError
            said = " ".join(str(error).split())[:200]
            raise PeerError(
                f"{what} failed on rank {self.rank} of {self.size}:"
                f" another process is gone or did not answer within the timeout of the group ({said})"
            ) from error

    def gather(self, x: Tensor, what: str) -> Tensor:
        """The tensors of all ranks, [ranks, …]; the same shape everywhere."""
        gathered = x.new_empty(self.size, *x.shape)
        with self.doing(what):
            # a later torch renamed it
            single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
            single(gathered.view(-1), x.contiguous().view(-1), group=self.given)
        return gathered

    def exchange(self, x: Tensor, what: str) -> Tensor:
        """x [ranks, …]: part i goes to rank i; what came from each rank, [ranks, …]."""
        received = torch.empty_like(x)
        with self.doing(what):
            dist.all_to_all_single(received.view(-1), x.view(-1), group=self.given)
        return received

    def numbers(self, number: int, device: torch.device, what: str) -> list[int]:
        """One whole number from each rank. Waits for all of them."""
        return [int(x) for x in self.gather(torch.tensor([number], device=self.wire(device)), what).flatten()]

    def send(self, x: Tensor, to: int, what: str) -> None:
        with self.doing(what):
            dist.send(x, dist.get_global_rank(self._process_group, to), group=self.given)

    def receive(self, x: Tensor, source: int, what: str) -> None:
        with self.doing(what):
            dist.recv(x, dist.get_global_rank(self._process_group, source), group=self.given)

    @property
    def _process_group(self) -> dist.ProcessGroup:
        found = dist.group.WORLD if self.given is None else self.given
        assert found is not None
        return found
