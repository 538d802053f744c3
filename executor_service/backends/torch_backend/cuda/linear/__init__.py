"""Linear layers, experts and adapters, with what stands between them."""
