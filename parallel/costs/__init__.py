"""Costs of computation and communication here: models fitted to short measurements, and a cache of them on disk.

A planner that decides from these numbers must decide alike on all ranks, so every number ends up equal on all of them,
bit by bit: times are maxima over the ranks, and what is cached is what the group's first rank read or measured.
"""
