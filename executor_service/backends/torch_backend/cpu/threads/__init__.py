"""Threads that work off tables of kernel calls together."""
