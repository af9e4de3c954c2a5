"""``ShardedClassifier``: a classification head whose classes are cut across ranks."""

from __future__ import annotations

import copy
import os
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any, Literal

import torch
from torch import Tensor, nn

from hybridpar.comm.agreement import check_same_settings, raise_together, together
from hybridpar.comm.group import Group
from hybridpar.comm.worker import Worker
from hybridpar.head.class_graph import build_graph, nearest_rows
from hybridpar.head.coverage import Coverage, DrawnSoFar, coverage
from hybridpar.head.exchange import BatchExchange, LocalBatch
from hybridpar.head.margins import ArcFace, Margin
from hybridpar.head.norms import RowNorms
from hybridpar.head.retrieval import class_rows, top_classes
from hybridpar.head.row_memory import RowMemory, row_memory
from hybridpar.head.row_optimizers import RowOptimizer, RowPolicy
from hybridpar.head.samplers import Sampler
from hybridpar.head.softmax import GlobalBatch, Problem, ShardedSoftmax
from hybridpar.head.validate import (
    check_features,
    check_finite,
    check_labels,
    policies_error,
    settings_error,
)
from hybridpar.kernels import draw_normal_rows, exact_dtype, unit_rows
from hybridpar.partition import Layout, Rule, build_layout


class ShardedClassifier(nn.Module):
    """Softmax cross-entropy over classes that live on different ranks, with an optional angular margin.

    ``head(features, labels)`` returns the mean loss over the global batch, the same scalar on every rank. Gradients
    follow "sum everywhere": ``loss.backward()`` leaves on each rank the derivative of that global loss by the rank's
    own features and by its own rows, so backbone gradients are to be summed over ranks (``hp.DataParallel`` does).
    N ranks compute what one rank would: no class is invented to fill up a shard.

    Args:
        embedding_size: D, width of the features.
        num_classes: K, over all ranks; at least one for each rank.
        margin: a policy of ``hybridpar.head.margins``.
        rule: which rank holds which class: a registered name or a rule (see docs/partition.md).
        sampler: which classes take part in a training step, beside those of the batch (``UniformSampler``,
            ``HardSampler``); None for all. In evaluation mode all do.
        optimizer: steps the rows in the backward pass (``RowSGD``, ``RowAdamW``, ``RowAdagrad``), so that the gradient
            of all rows never exists, or in the last of several: see ``no_step``. None leaves ``weight.grad`` to an
            optimizer of torch.
        dtype: of the rows: float32, float64, bfloat16 or float16.
        compute_dtype: of the matrix products; None means autocast's where autocast is on, else ``dtype``.
            Sums are accumulated in float32 (float64 for float64).
        ignore_index: label of samples that do not count.
        seed: the first row of class c depends on (seed, c) alone.
        initial_std: standard deviation of the initial rows.
        backbone_reduction: ``"mean"`` where the backbone's gradients are averaged over ranks, as torch's DDP does.
        chunk_classes: rows worked on at a time; None chooses by cache size.
        logits_budget: bytes that products of features and rows may take from forward to backward on each rank. What
            does not fit is computed again.
        state_dir: folder on a disk of this host; rows, and what ``optimizer`` remembers of them, then live in files
            there that are mapped into memory, so that they may be larger than it. A copy of the head is in memory. The
            files are no checkpoint: they end with the process.
        group: the ranks; ``hp.Group.alone()`` for this process alone.
        device: where the rows live.

    Attributes:
        weight: Parameter [rows of this rank, D], in the order of ``layout.class_ids(rank)``.
        bias: Parameter [rows of this rank], or None where the margin has none.
        margin_state: buffer, what the margin remembers from step to step; the same on every rank.
        draws: buffer, how often classes were drawn, on which the next draw depends; None without a sampler.
        class_graph: buffer [rows of this rank, k], ids of the nearest classes of each row, the nearest first, -1 for
            none; None without a sampler that needs it.
        graph_draw: buffer, for which draw it was built, -1 before the first; or None.
        row_optimizer: the ``RowOptimizer`` that steps the rows, for schedulers and checkpoints; or None.
        layout: which class is where.

    Raises:
        ValueError: a setting is out of range, or the ranks were given different settings (on every rank).
        OSError: there is no room in ``state_dir`` (on every rank).
    """

    weight: nn.Parameter
    bias: nn.Parameter | None
    margin_state: Tensor
    draws: Tensor | None
    class_graph: Tensor | None
    graph_draw: Tensor | None

    def __init__(
        self,
        embedding_size: int,
        num_classes: int,
        *,
        margin: Margin | None = None,
        rule: str | Rule = "even",
        sampler: Sampler | None = None,
        optimizer: RowPolicy | None = None,
        dtype: torch.dtype = torch.float32,
        compute_dtype: torch.dtype | None = None,
        ignore_index: int = -1,
        seed: int = 0,
        initial_std: float = 0.01,
        backbone_reduction: Literal["sum", "mean"] = "sum",
        chunk_classes: int | None = None,
        logits_budget: int = 128 << 20,
        state_dir: str | os.PathLike[str] | None = None,
        group: Group,
        device: torch.device | str = "cpu",
    ) -> None:
        super().__init__()
        self.group = group
        self.margin = ArcFace() if margin is None else margin
        self.embedding_size, self.num_classes = embedding_size, num_classes
        self.ignore_index, self.compute_dtype = ignore_index, compute_dtype
        wrong = settings_error(
            embedding_size, num_classes, dtype, compute_dtype, ignore_index, backbone_reduction, chunk_classes,
            logits_budget,
        )  # fmt: skip
        raise_together(self.group, wrong or policies_error(self.margin, sampler, optimizer))
        settings = {
            "embedding_size": embedding_size, "num_classes": num_classes, "margin": repr(self.margin),
            "dtype": str(dtype), "compute_dtype": str(compute_dtype), "ignore_index": ignore_index, "seed": seed,
            "initial_std": initial_std, "backbone_reduction": backbone_reduction, "sampler": repr(sampler),
            "optimizer": repr(optimizer),
        }  # fmt: skip
        check_same_settings(self.group, "ShardedClassifier", settings)
        self.layout = self._agreed_layout(rule)
        memory = together(self.group, lambda: row_memory(state_dir, torch.device(device)))
        self._add_parameters(dtype, seed, initial_std, memory)
        self._add_draws(sampler)
        self._exchange = BatchExchange(self.group, self.margin.uses_norms)
        factor = float(self.group.size) if backbone_reduction == "mean" else 1.0
        lane = self.group.new_lane()
        norms = RowNorms()
        self.row_optimizer = together(self.group, lambda: self._make_row_optimizer(optimizer, norms, memory))
        memory.report(self.group.rank)
        self._problem = Problem(
            self.group, self.layout, self.margin, lane, Worker("hybridpar-head"), factor, chunk_classes, norms,
            logits_budget, sampler, None if sampler is None else DrawnSoFar(len(self.weight)), self.row_optimizer,
        )  # fmt: skip

    def _agreed_layout(self, rule: str | Rule) -> Layout:
        """Collective: a rule may fail, or differ, on one rank only."""
        layout = together(self.group, lambda: build_layout(rule, self.num_classes, self.group.size))
        check_same_settings(self.group, "ShardedClassifier", {"rule": layout.describe()})
        return layout

    def _make_row_optimizer(self, policy: RowPolicy | None, norms: RowNorms, memory: RowMemory) -> RowOptimizer | None:
        if policy is None:
            return None
        return RowOptimizer(policy, self.weight, self.bias, norms, self.group.rank, memory)

    def _add_parameters(self, dtype: torch.dtype, seed: int, std: float, memory: RowMemory) -> None:
        rank, device = self.group.rank, memory.device
        shape = self.layout.rows(rank), self.embedding_size
        on_cpu = device.type == "cpu"
        rows = together(self.group, lambda: memory.empty(shape, dtype) if on_cpu else torch.empty(shape, dtype=dtype))
        draw_normal_rows(rows, self.layout.class_ids(rank), seed=seed, std=std)
        self.weight = nn.Parameter(rows.to(device))
        self.bias = nn.Parameter(torch.zeros(len(rows), dtype=dtype, device=device)) if self.margin.has_bias else None
        state = torch.tensor(self.margin.initial_state(), dtype=exact_dtype(dtype), device=device)
        self.register_buffer("margin_state", state)

    def _add_draws(self, sampler: Sampler | None) -> None:
        policy = None if sampler is None else sampler.graph
        graph = None if policy is None else policy.empty(len(self.weight), self.num_classes).to(self.weight.device)
        self.register_buffer("draws", None if sampler is None else torch.zeros((), dtype=torch.int64))
        self.register_buffer("class_graph", graph)
        self.register_buffer("graph_draw", None if graph is None else torch.tensor(-1))

    def __setattr__(self, name: str, value: Any) -> None:
        """Parameters know their group, also those that load_state_dict(assign=True) or the user puts in."""
        super().__setattr__(name, value)
        if isinstance(value, nn.Parameter):
            # Read by DataParallel (not to be reduced) and clip_grad_norm_ (norms to be summed over the ranks).
            value.hybridpar_group = self.group  # type: ignore[attr-defined]

    def __deepcopy__(self, memo: dict[int, Any]) -> ShardedClassifier:
        """Rows of its own, on the same ranks, communicators and thread."""
        twin = type(self).__new__(type(self))
        memo[id(self)] = twin
        nn.Module.__init__(twin)
        twin.__dict__.update(copy.deepcopy(self.__dict__, memo))
        for name, parameter in list(twin.named_parameters(recurse=False)):
            setattr(twin, name, parameter)
        return twin

    def close(self) -> None:
        """Free the communicator and its thread. Collective where the library demands it; not while a copy is used."""
        self._problem.worker.close()
        self._problem.lane.close()

    @contextmanager
    def no_step(self) -> Iterator[None]:
        """Backward passes inside do not step the rows; the next one outside does, by the sum of all their gradients.

        For steps that are cut into micro-batches, as ``DataParallel.no_sync()``, and with it where there is one::

            for number, (images, labels) in enumerate(micro_batches, 1):
                with nullcontext() if number == len(micro_batches) else head.no_step():
                    (head(backbone(images), labels) / len(micro_batches)).backward()

        Each backward pass inside gives the gradient of its features, and leaves behind those of the global batch and,
        with a sampler, about 28 bytes for each row that was drawn. Every micro-batch has a draw of its own; rows that
        any of them drew take part in the step. Rows stay as they are until then; where others change them, the step is
        refused. An error inside, or in a forward pass of the head, ends the step, and so does
        ``row_optimizer.zero_grad()``: nothing is left of it.

        Without ``optimizer`` this changes nothing: ``weight.grad`` adds up by itself.
        """
        with nullcontext() if self.row_optimizer is None else self.row_optimizer.micro_batches.hold():
            yield

    def settle(self) -> None:
        """Move rows on that a sampler left out: see ``lazy_decay`` of the optimizer. Needed only before rows are read
        directly; evaluation, ``predict``, ``class_centers``, ``state_dict`` and checkpoints do it by themselves.
        """
        if self.row_optimizer is not None:
            self.row_optimizer.catch_up()

    def state_dict(self, *arguments: Any, **options: Any) -> Any:
        """As any module's; rows are moved on first."""
        self.settle()
        return super().state_dict(*arguments, **options)

    def load_state_dict(self, *arguments: Any, **options: Any) -> Any:
        """As any module's; what rows have missed before is over."""
        self.settle()
        return super().load_state_dict(*arguments, **options)

    def extra_repr(self) -> str:
        return (
            f"{self.embedding_size}, {self.num_classes}, margin={self.margin}, "
            f"rank {self.group.rank} of {self.group.size} with {len(self.weight)} rows"
        )

    def forward(self, features: Tensor, labels: Tensor) -> Tensor:
        """Mean loss of the global batch. Collective.

        Args:
            features: [b, D] floating point, finite; b may differ between ranks and steps, and may be 0.
            labels: int64 [b], global class ids, or ``ignore_index``.

        Returns:
            A scalar, float64 for float64 rows, else float32; 0 where every label of the global batch is ignored.

        Raises:
            ValueError: a label outside [0, K) on any rank, or a wrong shape; raised on every rank.
            TypeError: labels not int64, or features not floating point; raised on every rank.
            NonFiniteError: NaN or Inf among the features or in the rows of any rank; raised on every rank.
            CommunicationError: a rank did not take part.
        """
        try:
            batch = self._exchange(self._local_batch(features, labels))
            if batch.training:
                batch = self._with_draw(batch)
            loss: Tensor = ShardedSoftmax.apply(  # type: ignore[no-untyped-call]
                features, self.weight, self.bias, self.margin_state, batch, self._problem
            )
        except BaseException:
            if self.row_optimizer is not None:
                self.row_optimizer.micro_batches.drop()  # of this step, in which no rank goes on
            raise
        return loss

    def _with_draw(self, batch: GlobalBatch) -> GlobalBatch:
        """What the draw of this step depends on. Collective."""
        sampler, near = self._problem.sampler, None
        if sampler is None or self.draws is None:
            return batch
        if sampler.graph is not None:
            assert self.class_graph is not None and self.graph_draw is not None
            if batch.graph_due:
                self.settle()
                self.graph_draw.fill_(-1)
                build_graph(self.group, self.layout, self.weight, self.class_graph, sampler.graph)
                self.graph_draw.copy_(self.draws)
            near = nearest_rows(self.group, self.layout, self.class_graph, batch.labels_B)
        batch = replace(batch, draw=int(self.draws), near=near)
        self.draws += 1
        return batch

    def _graph_due(self) -> bool:
        """Whether a step in training mode needs another class graph."""
        sampler = self._problem.sampler
        if sampler is None or sampler.graph is None:
            return False
        assert self.draws is not None and self.graph_draw is not None
        built = int(self.graph_draw)
        return built < 0 or not 0 <= int(self.draws) - built < sampler.graph.every

    def _local_batch(self, features: Tensor, labels: Tensor) -> LocalBatch:
        """What this rank tells the others. Errors are told, not raised: otherwise the others would wait for it."""
        error: Exception | None = None
        try:
            check_features(features, self.embedding_size, self.weight.device)
            check_labels(labels, features, self.num_classes, self.ignore_index)
            check_finite(features, self.group.rank)
        except (ValueError, TypeError, ArithmeticError) as problem:
            error = problem
            features = self.weight.new_zeros(0, self.embedding_size)
            labels = torch.zeros(0, dtype=torch.int64, device=self.weight.device)
        norms = None
        if self.margin.uses_norms:
            norms = unit_rows(features.detach().to(self.margin_state.dtype))[1]
        labels = torch.where(labels == self.ignore_index, -1, labels)
        wants_gradient = torch.is_grad_enabled() and features.requires_grad
        graph_due = self.training and self._graph_due()
        return LocalBatch(labels, norms, wants_gradient, self.training, graph_due, self._product_dtype(), error)

    def _product_dtype(self) -> torch.dtype:
        if self.compute_dtype is not None:
            return self.compute_dtype
        device = self.weight.device.type
        if torch.is_autocast_enabled(device) and self.weight.dtype != torch.float64:
            return torch.get_autocast_dtype(device)
        return self.weight.dtype

    @torch.no_grad()
    def predict(self, features: Tensor, k: int = 1) -> tuple[Tensor, Tensor]:
        """The k best classes of each feature, over all ranks. Collective; no margin is applied.

        Args:
            features: [b, D]; b may differ between ranks.
            k: 1 to K.

        Returns:
            Scores [b, k] in descending order (cosines, or logits for ``Softmax``), and int64 class ids [b, k].

        Raises:
            ValueError, TypeError: wrong shape, dtype or k on any rank, or another k; raised on every rank.
            NonFiniteError: NaN or Inf among the features of any rank; raised on every rank.
        """

        def check() -> None:
            check_features(features, self.embedding_size, self.weight.device)
            check_finite(features, self.group.rank)
            if not 1 <= k <= self.num_classes:
                raise ValueError(f"k: expected 1 to {self.num_classes} (the number of classes), got {k}")

        together(self.group, check)
        dtype = self._product_dtype()
        check_same_settings(self.group, "predict", {"k": k, "dtype of products": str(dtype)})
        self.settle()
        return top_classes(self._problem, features, self.weight, self.bias, dtype, k)

    def coverage(self) -> Coverage:
        """Which part of the classes took part in training steps since the head was built, and how often. Collective.

        Counting costs 4 bytes a class and, in a step, one pass over what is drawn. It starts anew when a run goes on
        from a checkpoint.

        Raises:
            ValueError: the head has no sampler, so that all classes take part in every step.
        """
        if self._problem.drawn_so_far is None:
            raise ValueError("coverage: expected a head with a sampler, got one in which all classes always take part")
        return coverage(self.group, self._problem.drawn_so_far)

    @torch.no_grad()
    def class_centers(self, ids: Tensor) -> Tensor:
        """Rows of the given classes, wherever they live. Collective; ranks may ask for different classes.

        Args:
            ids: int64 [m], in any order, repeats allowed; m may differ between ranks.

        Returns:
            [m, D] in the dtype of the rows, as they are (not normalised).

        Raises:
            ValueError, TypeError: ids that are no classes on any rank; raised on every rank.
        """
        together(self.group, lambda: check_labels(ids, ids, self.num_classes, ignore_index=None, name="ids"))
        self.settle()
        return class_rows(self._problem, self.weight, ids)
