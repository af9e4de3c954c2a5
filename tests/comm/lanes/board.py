"""A watch for ranks that are threads: what one process asks of another over a socket stands on a common board."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any


class Board:
    """Shared by all ranks; ``of(rank)`` is one rank's view. Ranks in ``silent`` do not answer."""

    def __init__(self) -> None:
        self.statuses: dict[int, dict[str, Callable[[], Any]]] = {}
        self.silent: set[int] = set()

    def of(self, rank: int) -> BoardWatch:
        self.statuses[rank] = {}
        return BoardWatch(self, rank)


class BoardWatch:
    def __init__(self, board: Board, rank: int) -> None:
        self._board, self._rank = board, rank

    def set_status(self, key: str, status: Callable[[], Any] | None) -> None:
        if status is None:
            self._board.statuses[self._rank].pop(key, None)
        else:
            self._board.statuses[self._rank][key] = status

    def ask(self, ranks: Sequence[int]) -> dict[int, Any]:
        assert self._rank not in ranks
        answers = {rank: self._board.statuses[rank] for rank in ranks if rank not in self._board.silent}
        found = {rank: {key: status() for key, status in list(of.items())} for rank, of in answers.items()}
        return dict.fromkeys(ranks) | found
