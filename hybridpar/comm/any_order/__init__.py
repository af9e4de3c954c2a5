"""Tensors that become ready in any order, different on every rank."""
