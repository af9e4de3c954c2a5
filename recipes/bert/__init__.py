"""Masked-language modelling with BERT: a replicated encoder and a vocabulary head cut by token across ranks."""
