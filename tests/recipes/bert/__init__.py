"""Tests of the BERT recipe."""
