"""One decode step of a recurrent layer with a single slot per row: the last step's accepted inputs are
repeated (``kept_inputs.py`` explains it)."""
