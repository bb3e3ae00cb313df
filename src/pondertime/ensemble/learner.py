"""Training E networks at once: each with its own seed and data, all with one optimiser.

Adam works number by number, so stacked weights are updated as those of each network alone would be.
"""



