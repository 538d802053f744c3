"""The directory of a fleet: the schedulers that this one knows, and how it learns of them."""
