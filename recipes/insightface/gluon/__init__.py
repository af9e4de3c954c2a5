"""The recipe's backbone and training step in MXNet's Gluon. Needs ``pip install 'hybridpar[mxnet]'``."""
