"""The CUDA path without a GPU: with numbers on a pretended device (`pretended/`), at real sizes without them (`fake/`).

`cases.py` has the layouts, `sync_points.py` where the host waits, `runs.py` and `trainings.py` what each rank does.
"""
