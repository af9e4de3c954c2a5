"""What ``init`` makes and ``shutdown`` ends: this process's ranks and process sets. There is one at a time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from hybridpar.comm.any_order.readiness import name_ranks
from hybridpar.comm.group import DEFAULT_TIMEOUT, Group
from hybridpar.comm.horovod.exchange import Exchange
from hybridpar.comm.horovod.handles import HANDLES
from hybridpar.comm.horovod.process_sets import ProcessSet, global_process_set, world_ranks
from hybridpar.comm.start import Transport
from hybridpar.comm.start import init as start


class Context:
    """The ranks, and the process sets among them. Collective.

    Args:
        group: nobody else may use it.
        timeout: see ``Exchange``.
    """

    def __init__(self, group: Group, *, timeout: float = DEFAULT_TIMEOUT) -> None:
        self.group, self._timeout = group, timeout
        self._next_number = 1
        self.exchange = Exchange(group, timeout=timeout)
        global_process_set.bind(0, range(group.size), group.rank, self.exchange)
        self.process_sets: dict[int, ProcessSet] = {0: global_process_set}
        self._statistics: Group | None = None

    def add(self, process_set: ProcessSet) -> None:
        """Collective over all ranks.

        Raises:
            ValueError: it is registered already, or names ranks that do not exist.
            CommunicationError: the ranks named different sets.
        """
        ranks = process_set.ranks
        problem = ""
        if process_set.process_set_id is not None:
            problem = f"expected a process set that is not registered yet, got {process_set}"
        elif not ranks or ranks[-1] >= self.group.size:
            problem = f"expected ranks below {self.group.size}, at least one, got {ranks}"
        elif known := [known for known in self.process_sets.values() if known.ranks == ranks]:
            problem = f"expected ranks that are no process set yet, got those of {known[0]}; use that one"
        if problem:
            raise ValueError(f"add_process_set: {problem}")
        assert ranks is not None
        self._together(f"add the process set of {name_ranks(ranks)}", lambda: self._add(process_set, ranks))

    def _add(self, process_set: ProcessSet, ranks: Sequence[int]) -> None:
        member = self.group.rank in ranks
        exchange = Exchange(self.group.split(ranks), timeout=self._timeout) if member else None
        process_set.bind(self._next_number, ranks, self.group.rank, exchange)
        self.process_sets[self._next_number] = process_set
        self._next_number += 1

    def remove(self, process_set: ProcessSet) -> bool:
        """Collective over all ranks. False for the global one, which stays.

        Raises:
            ValueError: it is not registered.
            CommunicationError: the ranks named different sets.
        """
        number = process_set.process_set_id
        if number == 0:
            return False
        if number is None or self.process_sets.get(number) is not process_set:
            raise ValueError(f"remove_process_set: expected a process set that is registered, got {process_set}")
        self._together(f"remove process set {number}", lambda: self.process_sets.pop(number))
        process_set.invalidate()
        return True

    def statistics_group(self) -> Group:
        """Collective: a group of all ranks for layers that communicate in program order. Made once."""
        if self._statistics is None:
            everyone = range(self.group.size)
            self._statistics = self._together("make a group for layers", lambda: self.group.split(everyone))
        assert self._statistics is not None
        return self._statistics

    def close(self) -> None:
        """End everything. What is in flight fails, here and on the other ranks."""
        for process_set in reversed(self.process_sets.values()):
            process_set.invalidate()
        if self._statistics is not None:
            self._statistics.close()
        HANDLES.clear()

    def _together(self, detail: str, task: Callable[[], Any]) -> Any:
        name = self.exchange.named("task", None)
        return self.exchange.finished(self.exchange.together(name, detail, task))


_CONTEXTS: list[Context] = []  # none or one


def current() -> Context:
    """Raises ValueError before ``init`` and after ``shutdown``, as Horovod does."""
    if not _CONTEXTS:
        raise ValueError("Horovod has not been initialized; call hvd.init() first")
    return _CONTEXTS[-1]


def init(
    comm: Sequence[int] | Any = None,
    process_sets: Sequence[ProcessSet] | str | None = None,
    *,
    timeout: float = DEFAULT_TIMEOUT,
    transport: Transport = "torch",
    shared_memory: bool = True,
    interfaces: Sequence[str] = (),
) -> None:
    """Find the other ranks, under torchrun, mpirun or Slurm, or alone. Collective. Does nothing the second time.

    Args:
        comm: the ranks to use, of those that were launched: a list, or an mpi4py communicator; None means all. Every
            process calls ``init`` with a list in which it is.
        process_sets: sets to register, in the same order on all ranks. "dynamic" means none yet; sets can be added
            later either way.
        timeout: seconds that a call may wait for the other ranks to make it, too.
        transport, shared_memory, interfaces: as for ``hybridpar.init``.

    Raises:
        ValueError: this process is not in ``comm``, or a process set cannot be.
        CommunicationError: the other ranks could not be reached in time.
    """
    if _CONTEXTS:
        return
    if isinstance(process_sets, str) and process_sets.lower() != "dynamic":
        raise ValueError(f"process_sets: expected a list of process sets, 'dynamic' or None, got {process_sets!r}")
    group = start(timeout=timeout, transport=transport, shared_memory=shared_memory, interfaces=interfaces)
    members = world_ranks(comm) if hasattr(comm, "allgather") else list(comm or ())
    if members and members != list(range(group.size)):
        group = group.split(members)
    context = Context(group, timeout=timeout)
    _CONTEXTS.append(context)
    try:
        for process_set in () if process_sets is None or isinstance(process_sets, str) else process_sets:
            context.add(process_set)
    except BaseException:
        shutdown()
        raise


def shutdown() -> None:
    """End what ``init`` began, so that it can be called again. What is in flight fails, here and on the other ranks."""
    if _CONTEXTS:
        _CONTEXTS.pop().close()


def is_initialized() -> bool:
    """Whether ``init`` was called, and ``shutdown`` was not since."""
    return bool(_CONTEXTS)


def add_process_set(process_set: ProcessSet | Sequence[int]) -> ProcessSet:
    """Register a process set. Every rank calls this, with the same ranks, also those that are not in it.

    Raises:
        ValueError: it is registered already, or names ranks that do not exist.
        CommunicationError: the ranks named different sets.
    """
    added = process_set if isinstance(process_set, ProcessSet) else ProcessSet(process_set)
    current().add(added)
    return added


def remove_process_set(process_set: ProcessSet) -> bool:
    """Take a process set away, on every rank. False for the global one, which stays.

    Raises:
        ValueError: it is not registered.
        CommunicationError: the ranks named different sets.
    """
    return current().remove(process_set)


def process_set_by_id(process_set_id: int) -> ProcessSet:
    """Raises ValueError if there is none."""
    known = current().process_sets
    if process_set_id not in known:
        raise ValueError(f"expected the id of one of the process sets {sorted(known)}, got {process_set_id!r}")
    return known[process_set_id]
