"""Many networks of one shape trained at once."""

from pondertime.ensemble.stack import Ensemble, stacks

__all__ = ["Ensemble", "stacks"]
