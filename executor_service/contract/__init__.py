"""What a step is, whatever carries it: plans and results, limits, the sampling noise."""
