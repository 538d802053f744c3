"""Fleets: stacks on the nodes of a Ray cluster, placed, healed, scaled and updated by Ray Serve.

Ray is the control plane alone: no token, no text and no stream goes through it. Needs the extra `ray`.
"""
