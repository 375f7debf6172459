"""One HTML page that shows a run: `python -m training.report RUN_DIR`."""
