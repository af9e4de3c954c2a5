"""Process sets: some of the ranks, with collectives of their own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hybridpar.comm.horovod.exchange import Exchange


class ProcessSet:
    """Ranks that run collectives together. Give it to ``init``, or to ``add_process_set``.

    Attributes:
        ranks: ascending; None after the set was removed.
        process_set_id: the same on all ranks; None where the set is not registered.

    Args:
        ranks_or_comm: numbers of ranks, or an mpi4py communicator of them (under mpirun).

    Raises:
        ValueError: not different whole numbers from 0 on.
    """

    def __init__(self, ranks_or_comm: Sequence[int] | Any) -> None:
        if hasattr(ranks_or_comm, "allgather"):  # collective over the communicator, as in Horovod
            ranks_or_comm = world_ranks(ranks_or_comm)
        ranks = list(ranks_or_comm)
        if not all(isinstance(rank, int) and rank >= 0 for rank in ranks) or len(set(ranks)) != len(ranks):
            raise ValueError(f"ProcessSet: expected different ranks, or an mpi4py communicator, got {ranks_or_comm!r}")
        self.ranks: list[int] | None = sorted(ranks)
        self.process_set_id: int | None = None
        self._rank: int | None = None
        self._exchange: Exchange | None = None

    def size(self) -> int | None:
        """How many ranks it has; None where it is not registered."""
        return None if self.process_set_id is None or self.ranks is None else len(self.ranks)

    def rank(self) -> int | None:
        """Place of this rank among ``ranks``; None where the set is not registered.

        Raises:
            ValueError: this rank is not one of them.
        """
        if self.process_set_id is None or self.ranks is None:
            return None
        if self._rank not in self.ranks:
            raise ValueError(f"{self}: expected a member, got rank {self._rank}; ask included() first")
        return self.ranks.index(self._rank)

    def included(self) -> bool | None:
        """Whether this rank is one of them; None where the set is not registered."""
        return None if self.process_set_id is None or self.ranks is None else self._rank in self.ranks

    @property
    def exchange(self) -> Exchange:
        """What its collectives run on.

        Raises:
            ValueError: it is not registered, or this rank is not one of them.
        """
        if self._exchange is not None:
            return self._exchange
        if self.process_set_id is None:
            if self is global_process_set:
                raise ValueError("Horovod has not been initialized; call hvd.init() first")
            raise ValueError(
                f"{self}: expected a process set that is registered; pass it to hvd.init(process_sets=[...]) or to "
                "hvd.add_process_set() on all ranks"
            )
        raise ValueError(f"{self}: expected a member, got rank {self._rank}; call it on the ranks of the set only")

    def place_of(self, rank: int) -> int:
        """Of a rank of the job, in the set.

        Raises:
            ValueError: it is none of them.
        """
        if self.ranks is None or rank not in self.ranks:
            raise ValueError(f"root_rank: expected one of the ranks {self.ranks}, got {rank!r}")
        return self.ranks.index(rank)

    def bind(self, number: int, ranks: Sequence[int], rank: int, exchange: Exchange | None) -> None:
        """Internal: it is registered."""
        self.process_set_id, self.ranks, self._rank, self._exchange = number, list(ranks), rank, exchange

    def invalidate(self) -> None:
        """Internal: it is no longer registered."""
        if self._exchange is not None:
            self._exchange.close()
        self.process_set_id = self._exchange = None
        if self is not global_process_set:
            self.ranks = None

    def __repr__(self) -> str:
        return f"ProcessSet(process_set_id={self.process_set_id}, ranks={self.ranks})"


global_process_set = ProcessSet([])


def world_ranks(communicator: Any) -> list[int]:
    """The ranks that the members of an mpi4py communicator have in MPI.COMM_WORLD. Collective over its members."""
    from mpi4py import MPI

    ranks: list[int] = communicator.allgather(MPI.COMM_WORLD.Get_rank())
    return ranks
