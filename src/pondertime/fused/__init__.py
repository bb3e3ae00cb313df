"""Closed-form forward and backward passes of ACT for the cells of ``torch.nn``; README.md derives them."""

from pondertime.fused.function import fused, fused_calls

__all__ = ["fused", "fused_calls"]
