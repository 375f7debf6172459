"""Costs of computation and communication: models fitted to short measurements, and a cache of them on disk.

Every number is equal on all ranks, bit by bit, so that planners decide alike: times are maxima over the ranks.
"""
