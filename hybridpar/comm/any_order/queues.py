"""Submissions that wait to be agreed on, in the order in which they came for each tensor."""

from __future__ import annotations

from collections import deque

from hybridpar.comm.any_order.submission import Submission


class Queues:
    """A queue for each tensor.

    Nearly always there is one submission of a tensor, so only what waits behind it has a container.

    Attributes:
        heads: the oldest submission of each tensor that has any; to be read only.
    """

    def __init__(self) -> None:
        self.heads: dict[int, Submission] = {}
        self._behind: dict[int, deque[Submission]] = {}  # none of them empty

    def put(self, submission: Submission) -> bool:
        """Whether it is the only one of its tensor."""
        if self.heads.setdefault(submission.index, submission) is submission:
            return True
        self._behind.setdefault(submission.index, deque()).append(submission)
        return False

    def pop(self, index: int) -> Submission:
        """The oldest one of a tensor."""
        head = self.heads.pop(index)
        behind = self._behind.get(index)
        if behind is not None:
            self.heads[index] = behind.popleft()
            if not behind:
                del self._behind[index]
        return head

    def all(self) -> list[Submission]:
        return [*self.heads.values(), *(one for behind in self._behind.values() for one in behind)]

    def clear(self) -> list[Submission]:
        """``all``; none are left."""
        found = self.all()
        self.heads.clear()
        self._behind.clear()
        return found
