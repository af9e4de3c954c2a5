"""Which rank holds which class: layouts, and the rules that choose them."""

from __future__ import annotations

from hybridpar.partition.layout import Layout
from hybridpar.partition.rules import Rule, build_layout, get_rule, register_rule

__all__ = ["Layout", "Rule", "build_layout", "get_rule", "register_rule"]
