"""Ranks, communicators and the gradient engine."""
