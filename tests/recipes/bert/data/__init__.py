"""Tests of the data of the BERT recipe."""
