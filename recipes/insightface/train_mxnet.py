"""Train a recogniser in MXNet: a Gluon backbone, replicated, under a head that is cut by class across ranks.

    torchrun --standalone --nproc-per-node 2 -m recipes.insightface.train_mxnet glyphs
    mpirun -n 2 python -m recipes.insightface.train_mxnet folders --data.path people/ --model.name convnet
    python -m recipes.insightface.train_mxnet glyphs --help          # every option

Data, order of samples, schedule, verification, plots and checkpoints are those of recipes.insightface.train, and so are
the options. The gradients of the backbone are summed by the KVStore dist_sync_hybridpar. Checkpoints hold the backbone
under the names of the torch model: recipes.insightface.evaluate and recipes.insightface.export read them.
"""

from __future__ import annotations

from recipes.insightface.gluon.learner import GluonLearner
from recipes.insightface.train import cli

if __name__ == "__main__":
    cli("recipes.insightface.train_mxnet", __doc__, GluonLearner)
