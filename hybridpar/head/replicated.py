"""``ReplicatedClassifier``: the same head, whole on every rank."""

from __future__ import annotations

from torch import Tensor, nn

from hybridpar.comm.agreement import raise_together
from hybridpar.comm.functional import global_mean
from hybridpar.comm.group import Group
from hybridpar.head.classifier import ShardedClassifier


class ReplicatedClassifier(nn.Module):
    """Every rank holds all classes and computes the loss of its own samples: data parallelism, for few classes.

    Belongs inside the ``hp.DataParallel`` of the backbone, which sums its gradients. The loss is the mean over the
    global batch, as ``ShardedClassifier``'s is, and both compute the same.

    Args:
        head: a head whose group is ``Group.alone()``.
        group: the ranks that train together.

    Raises:
        ValueError: the head is sharded; or its margin (AdaFace, CurricularFace) remembers statistics of the global
            batch, which a rank that sees only its own samples does not have.
    """

    def __init__(self, head: ShardedClassifier, group: Group) -> None:
        super().__init__()
        if head.group.size != 1:
            raise ValueError(f"expected a head of Group.alone(), got one over {head.group.size} ranks")
        if head.margin_state.numel() and group.size > 1:
            raise ValueError(
                f"{type(head.margin).__name__} remembers statistics of the global batch: expected a sharded head, or "
                "a margin without memory, in data parallel training"
            )
        self.head, self.group = head, group

    def forward(self, features: Tensor, labels: Tensor) -> Tensor:
        """Features [b, D] and int64 labels [b] to the mean loss of the global batch. Collective.

        Raises:
            ValueError, TypeError, NonFiniteError: as ``ShardedClassifier``, on every rank where it is on one.
        """
        error: Exception | None = None
        try:
            mean: Tensor = self.head(features, labels)
        except (ValueError, TypeError, ArithmeticError) as problem:
            error = problem
        raise_together(self.group, error)
        # Weighed by the number of samples that count, the ranks' means give that of the global batch.
        return global_mean(mean.expand(len(labels)), labels != self.head.ignore_index, group=self.group)
