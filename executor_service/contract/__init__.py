"""Steps independent of any transport: plans, results and limits; and the sampling noise."""
