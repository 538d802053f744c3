"""Figures for the operator's monitor."""
