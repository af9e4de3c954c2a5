"""Lanes: ordered communicators of existing libraries, and routes, which are lanes made of lanes."""
