"""A job's surroundings: time, threads, connections, files, processes: the real ones, or a simulation's."""
