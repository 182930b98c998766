"""Drawn jobs of one worker, and the same training in plain Keras: the tables of what is drawn, and the two runs."""
