"""The slow, exact backend that others are compared with: paged attention in numpy."""
