"""Tests of the recipe data sets."""
