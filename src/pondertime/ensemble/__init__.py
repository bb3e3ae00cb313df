"""Many networks of one shape trained at once."""

from pondertime.ensemble.stack import Ensemble

__all__ = ["Ensemble"]
