"""Adapters: low-rank changes of linear layers (LoRA, arXiv:2106.09685), read, named and given slots."""
